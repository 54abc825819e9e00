#include "zero/engine/whole_gradients.h"

#include <utility>

#include "zero/device/memory.h"

namespace zero {

namespace {

at::Tensor make_whole(const ReductionContext& context, int64_t unit, Category category) {
  return context.placement.shards
      ->empty(context.layout.unit(unit).numel, context.table.plan(unit).gradient_dtype, category)
      .zero_();
}

// The update of this unit runs on the device.
class DeviceWhole final : public WholeGradient {
 public:
  DeviceWhole(const ReductionContext& context, int64_t unit) : WholeGradient(context, unit) {
    cell() = owned();
    if (context_.settings.doubled) other_ = make_whole(context, unit, Category::offload_buffers);
  }
};

// The update of this unit runs on the host, and reads a copy of the owned elements there.
class HostWhole final : public WholeGradient {
 public:
  HostWhole(const ReductionContext& context, int64_t unit) : WholeGradient(context, unit) {
    cell() = make(Category::host_gradients);
    if (context_.settings.doubled) other_ = make(Category::host_buffers);
  }
  // The update waits for the norm, which is read behind this copy.
  void bring_down() override {
    const auto& to = cell();
    context_.table.link().down(to.data_ptr(), owned().const_data_ptr(),
                               static_cast<int64_t>(to.nbytes()), context_.mark);
  }
  at::Tensor detach() override {
    auto detached = cell();
    if (other_.defined()) std::swap(cell(), other_);
    return detached;
  }

 private:
  at::Tensor make(Category category) const {
    const auto& plan = context_.table.plan(unit_);
    return pinned_zeros(plan.owned.size(), plan.gradient_dtype, context_.table.device(),
                        context_.table.ledger(), category);
  }
};

}  // namespace

WholeGradient::WholeGradient(const ReductionContext& context, int64_t unit)
    : context_(context), unit_(unit), whole_(make_whole(context, unit, Category::gradients)) {}

at::Tensor WholeGradient::owned() const {
  const auto& range = context_.table.plan(unit_).owned;
  return whole_.narrow(0, range.begin, range.size());
}

at::Tensor WholeGradient::detach() {
  auto detached = cell();
  if (other_.defined()) {
    std::swap(whole_, other_);
    cell() = owned();
  }
  return detached;
}

std::unique_ptr<WholeGradient> make_whole_gradient(const ReductionContext& context, int64_t unit) {
  if (context.table.plan(unit).gradients_at == Tier::host)
    return std::make_unique<HostWhole>(context, unit);
  return std::make_unique<DeviceWhole>(context, unit);
}

}  // namespace zero
