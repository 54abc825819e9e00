#include "zero/engine/norm.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "zero/comm/gather_records.h"
#include "zero/device/stream.h"
#include "zero/engine/exact_exchange.h"
#include "zero/engine/reduce.h"
#include "zero/optim/exact_sum.h"
#include "zero/optim/operators.h"

namespace zero {

UnitNorms::UnitNorms(int64_t units, c10::Device device) : units_(units) {
  if (is_asynchronous(device))
    on_device_ = at::zeros({units, 2}, at::TensorOptions(at::kDouble).device(device));
}

std::vector<optim::SquaredNorm> UnitNorms::of(const std::vector<int64_t>& units,
                                              const GradientPresence& presence,
                                              const GradientReduction& reduction) const {
  std::vector<optim::SquaredNorm> norms(static_cast<size_t>(units_));
  std::vector<int64_t> enqueued;
  std::vector<at::Tensor> parts;
  for (const int64_t u : units) {
    if (!presence.wanted(u)) continue;
    if (auto part = reduction.norm_part_on_device(u); part.defined()) {
      parts.push_back(std::move(part));
      enqueued.push_back(u);
    } else {
      norms[static_cast<size_t>(u)] = reduction.norm(u);
    }
  }
  if (enqueued.empty()) return norms;
  const auto sums = on_device_.narrow(0, 0, static_cast<int64_t>(parts.size()));
  optim::squared_norms(parts, sums);
  const auto computed = sums.to(at::kCPU);
  const auto* row = computed.const_data_ptr<double>();
  for (const int64_t u : enqueued) {
    norms[static_cast<size_t>(u)] = {.sum = row[0], .finite = row[1] == 0};
    row += 2;
  }
  return norms;
}

// A rank's message has a number for each unit, and one more: a bit that is set if a gradient is not
// finite, a bit that is set if the rank's user has written to a parameter, and the settings. A
// frozen unit has no norm: its number tells whether the rank's user has written to it.
StepAgreement agree_on_step(const EnginePlan& plan, const std::vector<optim::SquaredNorm>& mine,
                            const std::vector<uint8_t>& written, int64_t settings) {
  const size_t units = mine.size();
  const auto trained = [&](size_t u) { return plan.units()[u].trainable; };
  const auto& placement = plan.placement();
  std::vector<double> terms(units + 1, 0);
  bool finite = true;
  for (size_t u = 0; u < units; ++u) {
    terms[u] = trained(u) ? mine[u].sum : written[u];
    finite = finite && (mine[u].finite || !trained(u));
  }
  const bool wrote = std::ranges::any_of(written, [](uint8_t unit) { return unit != 0; });
  terms[units] = static_cast<double>(4 * settings + (wrote ? 2 : 0) + (finite ? 0 : 1));
  const auto all = comm::gather_arrays<double>(plan.group(), terms, "gradient norm");
  const auto term_of = [&](int rank, size_t index) {
    return all[static_cast<size_t>(rank) * (units + 1) + index];
  };
  StepAgreement result{.frozen_written = std::vector<uint8_t>(units, 0)};
  double sum = 0;
  for (size_t u = 0; u < units; ++u) {
    for (int part = 0; part < placement.ranks(); ++part) {
      const double term = term_of(placement.rank_of_part(part), u);
      if (trained(u)) {
        sum += term;
      } else if (term != 0 && placement.sharded.parameters) {
        result.frozen_written[u] = 1;
      }
    }
  }
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    const auto last = static_cast<int64_t>(term_of(rank, units));
    result.finite = result.finite && last % 2 == 0;
    result.written = result.written || last / 2 % 2 != 0;
    result.settings.push_back(last / 4);
  }
  result.norm = std::sqrt(sum);
  return result;
}

namespace {

using optim::ExactSum;

// Adds the squares of `values`, which are fp32 and contiguous and begin at a multiple of
// ExactSum::kBlock of their parameter.
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

// Each of the ranks that shard adds up its slices, even if it holds all elements.
std::vector<double> group_norms(const EnginePlan& plan, const ReduceFlow& reduce) {
  const auto& layout = plan.layout();
  const auto& parameter_group_of = plan.model().parameter_group_of();
  std::vector<ExactSum> sums(plan.model().optimizers().size());
  auto& shards = *plan.placement().shards;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    if (!plan.trainable(u)) continue;
    const auto& owned = plan.units()[static_cast<size_t>(u)].owned;
    const auto slice = partition::intersect(owned, layout.slice(u, shards.rank()));
    at::Tensor gradient;  // the owned elements, once they are needed
    for (const auto& segment : layout.unit(u).segments) {
      const auto part = partition::intersect(segment.range(), slice);
      const auto p = static_cast<size_t>(segment.parameter);
      if (part.empty() || reduce.present()[p] == 0) continue;
      if (!gradient.defined()) gradient = reduce.sum(u).cpu();
      add_squares(sums[parameter_group_of[p]],
                  gradient.narrow(0, part.begin - owned.begin, part.size()).to(at::kFloat));
    }
  }
  add_over_ranks(sums, shards.size(), [&](const at::Tensor& all, const at::Tensor& mine) {
    shards.all_gather_control(all, mine, "norms of parameter groups");
  });
  std::vector<double> norms;
  for (const auto& sum : sums) norms.push_back(std::sqrt(sum.value()));
  return norms;
}

}  // namespace zero
