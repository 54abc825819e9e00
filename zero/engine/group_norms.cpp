// The norm of each parameter group's gradient.
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/exact_exchange.h"
#include "zero/optim/exact_sum.h"

namespace zero {

namespace {

using optim::ExactSum;

/// `values`, fp32 and contiguous, begin at a multiple of ExactSum::kBlock of their parameter.
void add_squares(ExactSum& sum, const at::Tensor& values) {
  const auto* v = values.const_data_ptr<float>();
  for (int64_t begin = 0; begin < values.numel(); begin += ExactSum::kBlock) {
    const int64_t end = std::min(begin + ExactSum::kBlock, values.numel());
    double square = 0;
    for (int64_t i = begin; i < end; ++i) square += double{v[i]} * double{v[i]};
    sum.add(square);
  }
}

}  // namespace

// Each of the ranks that shard sums its slices, also where it holds all; exactly (Note [Exact sums]
// in optim/exact_sum.h), since what a group has in a slice depends on their number.
std::vector<double> Engine::group_norms() {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.check_gradients_kept();
  if (!impl.passed || impl.micro_batches + 1 < impl.config.gradient_accumulation_steps) {
    throw Error(fmt::format(
        "Engine::group_norms is of a whole step, between its last backward and Engine::step; {} of "
        "its {} micro-batches have been passed.",
        impl.micro_batches + (impl.passed ? 1 : 0), impl.config.gradient_accumulation_steps));
  }
  impl.reduce->finish();
  std::vector<ExactSum> sums(group_count());
  auto& shards = *impl.placement.shards;
  for (int64_t u = 0; u < impl.layout.unit_count(); ++u) {
    if (!impl.trainable(u)) continue;
    const auto& owned = impl.table->plan(u).owned;
    const auto slice = partition::intersect(owned, impl.layout.slice(u, shards.rank()));
    at::Tensor array;  // of the owned elements, where one of them has a gradient
    for (const auto& segment : impl.layout.unit(u).segments) {
      const auto part = partition::intersect(segment.range(), slice);
      const auto p = static_cast<size_t>(segment.parameter);
      if (part.empty() || impl.reduce->present()[p] == 0) continue;
      if (!array.defined()) array = impl.reduce->sum(u).cpu();
      add_squares(sums[impl.model.group_of()[p]],
                  array.narrow(0, part.begin - owned.begin, part.size()).to(at::kFloat));
    }
  }
  add_over_ranks(sums, shards.size(), [&](const at::Tensor& all, const at::Tensor& mine) {
    shards.all_gather_control(all, mine, "norms of parameter groups");
  });
  std::vector<double> norms;
  for (const auto& sum : sums) norms.push_back(std::sqrt(sum.value()) * impl.mean_scale());
  return norms;
}

}  // namespace zero
