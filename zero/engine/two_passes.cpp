#include "zero/engine/two_passes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "zero/base/device_limit.h"
#include "zero/engine/exact_exchange.h"

namespace zero {

using optim::Reach;
using partition::intersect;

namespace {

constexpr auto kNormsWords = static_cast<int64_t>(2 * optim::ExactSum::kWords);
static_assert(std::is_trivially_copyable_v<optim::ParameterNorms> &&
              sizeof(optim::ParameterNorms) == kNormsWords * sizeof(int64_t));

}  // namespace

TwoPasses::TwoPasses(const partition::Layout& layout, const StateTable& table, const Model& model,
                     const Placement& placement, FactoredStates& factored,
                     std::function<Optimizer(int64_t parameter)> in_force)
    : layout_(layout),
      table_(table),
      model_(model),
      in_force_(std::move(in_force)),
      group_(*placement.shards),
      sliced_(placement.sharded.optimizer && placement.shards->size() > 1),
      factors_(group_, layout, table, factored),
      ratio_(static_cast<size_t>(model.size()), 1.0),
      directions_(static_cast<size_t>(layout.unit_count())) {
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    const auto optimizer = model.optimizer_of(layout.unit(u).segments.front().parameter);
    const bool trains = table.trainable(u);
    reach_.push_back(table.plan(u).reach);
    keeps_direction_.push_back(trains && optim::keeps_direction(optimizer) ? 1 : 0);
  }
  make_batches();
  size_t factor_batches = 0;
  for (const auto& batch : batches_) {
    const auto kind = reach(batch.front());
    deals_.push_back(kind == Reach::matrix ? deal(batch) : Deal{});
    shared_.push_back(kind != Reach::matrix && sliced_ ? find_shared(batch)
                                                       : std::vector<int64_t>{});
    factor_batch_.push_back(factor_batches);
    if (kind == Reach::factors) {
      factors_.add_batch(batch, sliced_);
      for (const int64_t bytes : factors_.gathered_bytes(factor_batches++))
        gathered_bytes_.push_back(bytes);
    }
    if (!shared_.back().empty()) {
      gathered_bytes_.push_back(group_.size() * static_cast<int64_t>(shared_.back().size()) *
                                kNormsWords * 8);
    }
    if (kind == Reach::matrix && sliced_) {
      for (const int64_t u : batch) gathered_bytes_.push_back(layout.unit(u).numel * 4);
      gathered_bytes_.push_back(group_.size() * deals_.back().numel * 4);
    }
  }
  if (factor_batches > 0) turns_.resize(ratio_.size());
}

std::vector<int64_t> TwoPasses::find_shared(const std::vector<int64_t>& batch) const {
  std::vector<int64_t> shared;
  for (const int64_t u : batch) {
    const int64_t slice = layout_.slice_numel(u);
    for (const auto& segment : layout_.unit(u).segments) {
      const bool whole = segment.numel == 0 ||
                         segment.offset / slice == (segment.offset + segment.numel - 1) / slice;
      if (!whole) shared.push_back(segment.parameter);
    }
  }
  return shared;
}

void TwoPasses::make_batches() {
  // Directions of a batch are held at a time.
  constexpr int64_t kFactoredNumel = 1 << 22;
  std::vector<int64_t> by_parameter;
  std::vector<int64_t> by_matrix;
  std::vector<int64_t> by_factors;
  int64_t matrices = 0;
  int64_t numel = 0;
  const auto close = [&](std::vector<int64_t>& batch) {
    if (!batch.empty()) batches_.push_back(std::exchange(batch, {}));
  };
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    if (reach(u) == Reach::parameter) {
      by_parameter.push_back(u);
    } else if (reach(u) == Reach::matrix) {
      by_matrix.push_back(u);
      matrices += static_cast<int64_t>(layout_.unit(u).segments.size());
      if (matrices < group_.size()) continue;
      close(by_matrix);
      matrices = 0;
    } else if (reach(u) == Reach::factors) {
      by_factors.push_back(u);
      numel += table_.plan(u).owned.size();
      if (numel < kFactoredNumel) continue;
      close(by_factors);
      numel = 0;
    }
  }
  close(by_matrix);
  if (!by_parameter.empty() || std::ranges::count(reach_, Reach::factors) > 0)
    norms_.resize(ratio_.size());
  close(by_factors);
  close(by_parameter);
}

// The most expensive first, each to the rank that has least to do.
TwoPasses::Deal TwoPasses::deal(const std::vector<int64_t>& batch) const {
  Deal deal;
  for (const int64_t u : batch) {
    for (const auto& segment : layout_.unit(u).segments) {
      const auto& parameter = model_.parameter(segment.parameter);
      Matrix matrix{
          .parameter = segment.parameter, .rows = parameter.size(0), .columns = parameter.size(1)};
      if (!parameter.is_contiguous()) std::swap(matrix.rows, matrix.columns);
      deal.matrices.push_back(matrix);
    }
  }
  const auto cost = [](const Matrix& m) {
    return static_cast<double>(m.rows) * static_cast<double>(m.columns) *
           static_cast<double>(std::min(m.rows, m.columns));
  };
  std::stable_sort(deal.matrices.begin(), deal.matrices.end(),
                   [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
  std::vector<double> work(static_cast<size_t>(group_.size()), 0.0);
  std::vector<int64_t> sent(work.size(), 0);
  for (auto& matrix : deal.matrices) {
    const auto least =
        static_cast<size_t>(std::min_element(work.begin(), work.end()) - work.begin());
    matrix.owner = static_cast<int>(least);
    matrix.offset = sent[least];
    work[least] += cost(matrix);
    sent[least] += matrix.rows * matrix.columns;
    deal.numel = std::max(deal.numel, sent[least]);
  }
  return deal;
}

void TwoPasses::begin(int64_t unit) {
  const HostScope whole_or_not_at_all;  // other units have been updated already
  if (keeps_direction_[static_cast<size_t>(unit)] != 0) {
    directions_[static_cast<size_t>(unit)] =
        at::zeros({table_.plan(unit).owned.size()}, at::TensorOptions(at::kFloat));
  }
  if (reach(unit) == Reach::matrix) return;
  for (const auto& segment : layout_.unit(unit).segments) {
    const auto p = static_cast<size_t>(segment.parameter);
    norms_[p] = {};
    if (!turns_.empty()) turns_[p] = {};
  }
}

void TwoPasses::begin(int64_t parameter, const Optimizer& optimizer, int64_t step) {
  if (const auto* adafactor = std::get_if<Adafactor>(&optimizer); adafactor && !turns_.empty())
    turns_[static_cast<size_t>(parameter)] = {step, *adafactor};
}

optim::Findings TwoPasses::findings(int64_t unit, int64_t begin) const {
  optim::Findings wanted;
  const auto& direction = directions_[static_cast<size_t>(unit)];
  if (direction.defined()) wanted.direction = direction.mutable_data_ptr<float>() + begin;
  return wanted;
}

void TwoPasses::add(int64_t parameter, const optim::Findings& found) {
  if (norms_.empty()) return;
  const std::lock_guard lock(mutex_);
  norms_[static_cast<size_t>(parameter)].add(found.norms);
}

const float* TwoPasses::direction(int64_t unit, int64_t begin) const {
  const auto& direction = directions_[static_cast<size_t>(unit)];
  return direction.defined() ? direction.const_data_ptr<float>() + begin : nullptr;
}

void TwoPasses::exchange(const std::vector<int64_t>& batch) {
  const HostScope whole_or_not_at_all;
  const auto index = static_cast<size_t>(&batch - batches_.data());
  if (reach(batch.front()) == Reach::matrix) {
    exchange_matrices(batch, deals_[index]);
    return;
  }
  if (reach(batch.front()) == Reach::factors)
    factors_.exchange(factor_batch_[index], turns_, directions_, norms_);
  exchange_norms(shared_[index]);
  for (const int64_t u : batch) {
    for (const auto& segment : layout_.unit(u).segments) {
      const auto p = static_cast<size_t>(segment.parameter);
      ratio_[p] = optim::ratio(in_force_(segment.parameter), norms_[p], segment.numel);
    }
  }
}

void TwoPasses::exchange_norms(const std::vector<int64_t>& shared) {
  if (shared.empty()) return;
  std::vector<optim::ParameterNorms> sums;
  for (const int64_t p : shared) sums.push_back(norms_[static_cast<size_t>(p)]);
  add_over_ranks(sums, group_.size(), [&](const at::Tensor& all, const at::Tensor& mine) {
    group_.all_gather(all, mine, "norms of parameters and updates").wait();
  });
  for (size_t i = 0; i < shared.size(); ++i) norms_[static_cast<size_t>(shared[i])] = sums[i];
}

// Of an array of all elements of its unit.
at::Tensor TwoPasses::matrix_of(const at::Tensor& unit, const Matrix& matrix) const {
  const auto& segment = layout_.segment_of(matrix.parameter);
  return unit.narrow(0, segment.offset, segment.numel).view({matrix.rows, matrix.columns});
}

void TwoPasses::exchange_matrices(const std::vector<int64_t>& batch, const Deal& deal) {
  const auto unit_of = [&](const Matrix& matrix) {
    return static_cast<size_t>(layout_.unit_of(matrix.parameter));
  };
  const auto make_orthogonal = [&](const at::Tensor& unit, const Matrix& matrix) {
    const auto optimizer = in_force_(matrix.parameter);
    const auto values = matrix_of(unit, matrix);
    optim::orthogonalise(values, std::get<Muon>(optimizer).ns_steps);
    return values;
  };
  for (const auto& matrix : deal.matrices) {
    const auto& parameter = model_.parameter(matrix.parameter);
    ratio_[static_cast<size_t>(matrix.parameter)] =
        optim::ratio(parameter.size(0), parameter.size(1));
  }
  if (!sliced_) {
    for (const auto& matrix : deal.matrices) make_orthogonal(directions_[unit_of(matrix)], matrix);
    return;
  }
  std::vector<at::Tensor> whole(directions_.size());
  for (const int64_t u : batch) {
    const auto i = static_cast<size_t>(u);
    whole[i] = at::empty({layout_.unit(u).numel}, directions_[i].options());
    group_
        .all_gather(whole[i], directions_[i],
                    "directions of " + model_.name(layout_.unit(u).segments.front().parameter))
        .wait();
  }
  auto mine = at::zeros({deal.numel}, at::TensorOptions(at::kFloat));
  auto all = at::empty({group_.size() * deal.numel}, mine.options());
  for (const auto& matrix : deal.matrices) {
    if (matrix.owner != group_.rank()) continue;
    const auto values = make_orthogonal(whole[unit_of(matrix)], matrix);
    mine.narrow(0, matrix.offset, values.numel()).copy_(values.view({-1}));
  }
  whole.clear();
  group_.all_gather(all, mine, "orthogonal directions").wait();
  for (const auto& matrix : deal.matrices) {
    const auto& segment = layout_.segment_of(matrix.parameter);
    const auto& owned = table_.plan(layout_.unit_of(matrix.parameter)).owned;
    const auto part = intersect(segment.range(), owned);
    if (part.empty()) continue;
    directions_[unit_of(matrix)]
        .narrow(0, part.begin - owned.begin, part.size())
        .copy_(all.narrow(0,
                          matrix.owner * deal.numel + matrix.offset + part.begin - segment.offset,
                          part.size()));
  }
}

}  // namespace zero
