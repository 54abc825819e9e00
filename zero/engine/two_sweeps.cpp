#include "zero/engine/two_sweeps.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "zero/base/device_limit.h"
#include "zero/engine/exact_exchange.h"
#include "zero/engine/gather_arrays.h"

namespace zero {

using optim::Reach;
using partition::intersect;

TwoSweeps::TwoSweeps(const EnginePlan& plan, const StateTable& table, FactoredStates& factored,
                     std::function<Optimizer(int64_t parameter)> in_force)
    : layout_(plan.layout()),
      table_(table),
      factored_(factored),
      model_(plan.model()),
      in_force_(std::move(in_force)),
      group_(table.group()),
      sliced_(plan.placement().sharded.optimizer && group_.size() > 1),
      batches_(plan.step().sweep_batches),
      factors_(table, factored),
      steps_(static_cast<size_t>(model_.size()), 0),
      ratio_(static_cast<size_t>(model_.size()), 1.0),
      directions_(static_cast<size_t>(layout_.unit_count())) {
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    const auto optimizer = model_.optimizer_of(layout_.unit(u).segments.front().parameter);
    keeps_direction_.push_back(table.trainable(u) && optim::keeps_direction(optimizer) ? 1 : 0);
  }
  for (const auto& batch : batches_) {
    factors_.add_batch(batch);
    if (batch.reach != Reach::matrix) norms_.resize(ratio_.size());
  }
}

void TwoSweeps::begin(int64_t unit) {
  const HostScope whole_or_not_at_all;  // other units have been updated already
  if (keeps_direction_[static_cast<size_t>(unit)] != 0) {
    const auto& plan = table_.plan(unit);
    directions_[static_cast<size_t>(unit)] =
        at::zeros({plan.owned.size()},
                  at::TensorOptions(at::kFloat).device(table_.device_of(plan.updated_at())));
  }
  for (const auto& segment : layout_.unit(unit).segments) {
    const auto p = static_cast<size_t>(segment.parameter);
    steps_[p] = 0;
    if (!norms_.empty()) norms_[p] = {};
  }
}

optim::Findings TwoSweeps::findings(int64_t unit, int64_t begin) const {
  optim::Findings wanted;
  const auto& direction = directions_[static_cast<size_t>(unit)];
  if (direction.defined()) wanted.direction = direction.mutable_data_ptr<float>() + begin;
  return wanted;
}

void TwoSweeps::add(int64_t parameter, const optim::Findings& found) {
  if (norms_.empty()) return;
  const std::lock_guard lock(mutex_);
  norms_[static_cast<size_t>(parameter)].add(found.norms);
}

const float* TwoSweeps::direction(int64_t unit, int64_t begin) const {
  const auto& direction = directions_[static_cast<size_t>(unit)];
  return direction.defined() ? direction.const_data_ptr<float>() + begin : nullptr;
}

void TwoSweeps::exchange(size_t index) {
  const HostScope whole_or_not_at_all;
  const auto& batch = batches_[index];
  if (batch.reach == Reach::matrix) {
    exchange_matrices(batch);
    return;
  }
  if (batch.reach == Reach::factors)
    factors_.exchange(index, steps_, in_force_, directions_, norms_);
  exchange_norms(batch.shared);
  for (const int64_t u : batch.units) {
    for (const auto& segment : layout_.unit(u).segments) {
      const auto p = static_cast<size_t>(segment.parameter);
      ratio_[p] = optim::ratio(in_force_(segment.parameter), norms_[p], segment.numel);
    }
  }
}

void TwoSweeps::exchange_norms(const std::vector<int64_t>& shared) {
  if (shared.empty()) return;
  std::vector<optim::ParameterNorms> sums;
  for (const int64_t p : shared) sums.push_back(norms_[static_cast<size_t>(p)]);
  add_over_ranks(sums, group_.size(), [&](const at::Tensor& all, const at::Tensor& mine) {
    gather_arrays(group_, all, mine, "norms of parameters and updates");
  });
  for (size_t i = 0; i < shared.size(); ++i) norms_[static_cast<size_t>(shared[i])] = sums[i];
}

// Returns the part of an array of all elements of its unit.
at::Tensor TwoSweeps::matrix_of(const at::Tensor& unit, const SweepBatch::Matrix& matrix) const {
  const auto& segment = layout_.segment_of(matrix.parameter);
  return unit.narrow(0, segment.offset, segment.numel).view({matrix.rows, matrix.columns});
}

// Returns what its owner finds out about a whole matrix of directions, 1-D: Muon's orthogonal ones,
// which take the place of `values`, or Apollo's factors, whose states move on.
at::Tensor TwoSweeps::found_in(const SweepBatch::Matrix& matrix, const at::Tensor& values) const {
  const auto optimizer = in_force_(matrix.parameter);
  if (const auto* muon = std::get_if<Muon>(&optimizer)) {
    optim::orthogonalise(values, muon->ns_steps);
    return values.view({-1});
  }
  const int64_t step = steps_[static_cast<size_t>(matrix.parameter)];
  if (step == 0 || !matrix.projection)  // it has no update, or no elements
    return at::zeros({matrix.found()}, values.options());
  const auto state = [&](size_t i) {
    return factored_.of(matrix.parameter)[i].values.mutable_data_ptr<float>();
  };
  return optim::channel_factors(std::get<Apollo>(optimizer), model_.name(matrix.parameter), step,
                                *matrix.projection, values, {state(0), state(1), state(2)});
}

// Makes the direction of this rank's part of a matrix, and the matrix's ratio.
void TwoSweeps::make_direction(const SweepBatch::Matrix& matrix, const at::Tensor& found) {
  const auto& segment = layout_.segment_of(matrix.parameter);
  const int64_t u = layout_.unit_of(matrix.parameter);
  const auto& owned = table_.plan(u).owned;
  const auto part = intersect(segment.range(), owned);
  const auto& parameter = model_.parameter(matrix.parameter);
  ratio_[static_cast<size_t>(matrix.parameter)] =
      matrix.projection ? 1 : optim::ratio(parameter.size(0), parameter.size(1));
  if (part.empty()) return;
  const auto direction =
      directions_[static_cast<size_t>(u)].narrow(0, part.begin - owned.begin, part.size());
  const optim::Interval mine{part.begin - segment.offset, part.end - segment.offset};
  if (matrix.projection) {
    optim::scale_channels(*matrix.projection, mine, found.const_data_ptr<float>(),
                          direction.mutable_data_ptr<float>());
  } else if (sliced_) {  // else the matrix is in its place already
    direction.copy_(found.narrow(0, mine.begin, mine.size()));
  }
}

void TwoSweeps::exchange_matrices(const SweepBatch& batch) {
  const auto unit_of = [&](const SweepBatch::Matrix& matrix) {
    return static_cast<size_t>(layout_.unit_of(matrix.parameter));
  };
  if (!sliced_) {
    for (const auto& matrix : batch.matrices)
      make_direction(matrix, found_in(matrix, matrix_of(directions_[unit_of(matrix)], matrix)));
    return;
  }
  std::vector<at::Tensor> whole(directions_.size());
  for (const int64_t u : batch.units) {
    const auto i = static_cast<size_t>(u);
    whole[i] = at::empty({layout_.unit(u).numel}, directions_[i].options());
    gather_arrays(group_, whole[i], directions_[i],
                  "directions of " + model_.name(layout_.unit(u).segments.front().parameter));
  }
  auto mine = at::zeros({batch.sent_by_owner},
                        directions_[static_cast<size_t>(batch.units.front())].options());
  auto all = at::empty({group_.size() * batch.sent_by_owner}, mine.options());
  for (const auto& matrix : batch.matrices) {
    if (matrix.owner != group_.rank()) continue;
    mine.narrow(0, matrix.offset, matrix.found())
        .copy_(found_in(matrix, matrix_of(whole[unit_of(matrix)], matrix)));
  }
  whole.clear();
  gather_arrays(group_, all, mine, "findings about matrices");
  for (const auto& matrix : batch.matrices) {
    const int64_t begin = matrix.owner * batch.sent_by_owner + matrix.offset;
    make_direction(matrix, all.narrow(0, begin, matrix.found()));
  }
}

}  // namespace zero
