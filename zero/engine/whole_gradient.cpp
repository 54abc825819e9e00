#include "zero/engine/whole_gradient.h"

#include <utility>

#include "zero/device/memory.h"

namespace zero {

WholeGradient::WholeGradient(const ReductionContext& context, int64_t unit)
    : context_(context), unit_(unit), whole_(make_whole(Category::gradients)) {
  cell() = on_host() ? make_on_host(Category::host_gradients) : owned();
  if (context_.settings.doubled)
    other_ =
        on_host() ? make_on_host(Category::host_buffers) : make_whole(Category::offload_buffers);
}

at::Tensor WholeGradient::make_whole(Category category) const {
  const auto dtype = context_.table.plan(unit_).gradient_dtype;
  return context_.placement.shards->empty(context_.layout.unit(unit_).numel, dtype, category)
      .zero_();
}

at::Tensor WholeGradient::make_on_host(Category category) const {
  const auto& plan = context_.table.plan(unit_);
  return pinned_zeros(plan.owned.size(), plan.gradient_dtype, context_.table.device(),
                      context_.table.ledger(), category);
}

at::Tensor WholeGradient::owned() const {
  const auto& range = context_.table.plan(unit_).owned;
  return whole_.narrow(0, range.begin, range.size());
}

// The host waits for the norm, which is read behind this copy, before it updates.
void WholeGradient::bring_down() {
  if (!on_host()) return;
  const auto& to = cell();
  context_.table.link().down(to.data_ptr(), owned().const_data_ptr(),
                             static_cast<int64_t>(to.nbytes()), context_.mark);
}

at::Tensor WholeGradient::detach() {
  auto detached = cell();
  if (!other_.defined()) return detached;
  if (on_host()) {
    std::swap(cell(), other_);
  } else {
    std::swap(whole_, other_);
    cell() = owned();
  }
  return detached;
}

}  // namespace zero
