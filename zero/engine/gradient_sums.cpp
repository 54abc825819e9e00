#include "zero/engine/gradient_sums.h"

#include <utility>

namespace zero {

optim::SquaredNorm GradientSums::norm_of(const at::Tensor& slice) const {
  const auto values = context_.placement.part_of(slice);
  return optim::squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
}

void GradientSums::make_cells(const std::vector<int64_t>& units, Category category, Category second,
                              const std::function<at::Tensor(int64_t unit, Category)>& make) {
  const bool doubled = context_.settings.doubled;
  if (doubled) other_.resize(static_cast<size_t>(context_.layout.unit_count()));
  for (const int64_t u : units) {
    cell(u) = make(u, category);
    if (doubled) other_[static_cast<size_t>(u)] = make(u, second);
  }
}

at::Tensor GradientSums::detach(int64_t unit) {
  auto detached = cell(unit);
  if (!other_.empty()) std::swap(cell(unit), other_[static_cast<size_t>(unit)]);
  return detached;
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

SumsByTier::SumsByTier(const ReductionContext& context, HandOver* hand_over)
    : by_unit_(static_cast<size_t>(context.layout.unit_count()), nullptr) {
  std::vector<int64_t> on_device;
  std::vector<int64_t> on_host;
  std::vector<int64_t> on_disk;
  for (int64_t u = 0; u < context.layout.unit_count(); ++u) {
    if (!context.table.trainable(u)) continue;
    switch (context.table.plan(u).gradients_at) {
      case Tier::device:
        on_device.push_back(u);
        break;
      case Tier::host:
        on_host.push_back(u);
        break;
      case Tier::disk:
        on_disk.push_back(u);
    }
  }
  const auto add = [&](const std::vector<int64_t>& units, const auto& make) {
    if (units.empty()) return;
    made_.push_back(make(units));
    for (const int64_t u : units) by_unit_[static_cast<size_t>(u)] = made_.back().get();
  };
  add(on_device, [&](const auto& units) { return device_sums(context, units, hand_over); });
  add(on_host, [&](const auto& units) { return host_sums(context, units, hand_over); });
  add(on_disk, [&](const auto& /*units*/) { return disk_sums(context); });
}

void SumsByTier::wait() const {
  for (const auto& sums : made_) sums->wait();
}

}  // namespace zero
