#include "zero/engine/gradient_sums.h"

#include <utility>

namespace zero {

optim::SquaredNorm GradientSums::norm_of(const at::Tensor& slice) const {
  const auto values = context_.placement.part_of(slice);
  return optim::squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
}

at::Tensor GradientSums::part_of_bucket(const Reduction& reduction) const {
  const int64_t slice = numel(reduction.unit);
  return reduction.bucket.array.narrow(0, slice * context_.placement.shards->rank(), slice);
}

void GradientSums::add(const at::Tensor& to, const at::Tensor& addend) {
  if (to.scalar_type() == at::kFloat && to.device().is_cpu()) {
    optim::accumulate(static_cast<float*>(to.data_ptr()), addend.const_data_ptr(),
                      addend.scalar_type(), to.numel());
  } else {
    to.add_(addend);
  }
}

void GradientSums::add_output(const at::Tensor& sum, Reduction& reduction) const {
  add(sum, reduction.output);
  context_.pool.give(std::move(reduction.output));
}

void GradientSums::give_bucket(Reduction& reduction) const {
  context_.pool.give(std::exchange(reduction.bucket, {}));
}

PlacedSums::PlacedSums(const ReductionContext& context, HandOver* hand_over)
    : by_unit_(static_cast<size_t>(context.layout.unit_count()), nullptr) {
  for (const auto tier : {Tier::device, Tier::host, Tier::disk}) {
    GradientSums* made = nullptr;
    for (const int64_t unit : context.order.units()) {
      if (context.table.plan(unit).gradients_at != tier) continue;
      if (made == nullptr) {
        made_.push_back(tier == Tier::disk   ? disk_sums(context)
                        : tier == Tier::host ? host_sums(context, hand_over)
                                             : device_sums(context, hand_over));
        made = made_.back().get();
      }
      by_unit_[static_cast<size_t>(unit)] = made;
    }
  }
}

void PlacedSums::wait() const {
  for (const auto& sums : made_) sums->wait();
}

}  // namespace zero
