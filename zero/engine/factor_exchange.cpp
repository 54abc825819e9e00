#include "zero/engine/factor_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "zero/engine/gather_arrays.h"

namespace zero {

optim::Interval FactorExchange::part_of(const Matrix& matrix, partition::Range of_unit) const {
  const auto& segment = layout_.segment_of(matrix.parameter);
  const auto part = partition::intersect(segment.range(), of_unit);
  if (part.empty()) return {};
  return {part.begin - segment.offset, part.end - segment.offset};
}

optim::Interval FactorExchange::of_rank(const Matrix& matrix, int rank) const {
  return part_of(matrix, layout_.slice(layout_.unit_of(matrix.parameter), rank));
}

optim::Interval FactorExchange::owned(const Matrix& matrix) const {
  return part_of(matrix, table_.plan(layout_.unit_of(matrix.parameter)).owned);
}

void FactorExchange::add_batch(const SweepBatch& planned) {
  Batch batch{.message = planned.factor_message};
  for (const int64_t u : planned.units) {
    if (planned.reach != optim::Reach::factors) break;
    for (const auto& segment : layout_.unit(u).segments) {
      const auto& factors = states_.factors(segment.parameter);
      batch.matrices.push_back({segment.parameter, batch.count});
      batch.count += factors.rows() + factors.columns();
    }
  }
  batches_.push_back(std::move(batch));
}

// Calls put(offset, numel) for the ranges of the batch's arrays that the slice of a rank meets, in
// the order of the rank's message.
template <class Put>
void FactorExchange::for_each_part(const Batch& batch, int rank, const Put& put) const {
  for (const auto& matrix : batch.matrices) {
    const auto& factors = states_.factors(matrix.parameter);
    const auto part = factors.part(of_rank(matrix, rank));
    put(matrix.offset + part.rows.begin, part.rows.size());
    put(matrix.offset + factors.rows() + part.columns.begin, part.columns.size());
  }
}

// Returns an array of the batch, which begins as zeros and into which the parts of all ranks are
// merged.
template <class T, class Merge>
at::Tensor FactorExchange::gathered(const Batch& batch, const at::Tensor& own,
                                    std::string_view label, const Merge& merge) const {
  if (batch.message == 0) return own;
  auto mine = at::zeros({batch.message}, own.options());
  auto all = at::empty({batch.message * group_.size()}, own.options());
  const auto* from = own.const_data_ptr<T>();
  auto* to = mine.mutable_data_ptr<T>();
  for_each_part(batch, group_.rank(),
                [&](int64_t offset, int64_t numel) { to = std::copy_n(from + offset, numel, to); });
  gather_arrays(group_, all, mine, label);
  auto merged = at::zeros({batch.count}, own.options());
  auto* into = merged.mutable_data_ptr<T>();
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto* theirs = all.const_data_ptr<T>() + rank * batch.message;
    for_each_part(batch, rank, [&](int64_t offset, int64_t numel) {
      for (int64_t i = 0; i < numel; ++i) into[offset + i] = merge(into[offset + i], *theirs++);
    });
  }
  return merged;
}

void FactorExchange::exchange(size_t index, const std::vector<int64_t>& steps,
                              const std::function<Optimizer(int64_t parameter)>& in_force,
                              const std::vector<at::Tensor>& directions,
                              std::vector<optim::ParameterNorms>& norms) {
  const auto& batch = batches_[index];
  const auto for_each = [&](const auto& f) {
    for (const auto& matrix : batch.matrices) {
      const auto& factors = states_.factors(matrix.parameter);
      const bool empty = factors.rows() == 0 || factors.columns() == 0;
      if (steps[static_cast<size_t>(matrix.parameter)] != 0 && !empty) f(matrix, factors);
    }
  };
  const auto values = [&](const Matrix& matrix) {
    const int64_t u = layout_.unit_of(matrix.parameter);
    const auto& direction = directions[static_cast<size_t>(u)];
    const auto mine =
        partition::intersect(layout_.segment_of(matrix.parameter).range(), table_.plan(u).owned);
    if (mine.empty()) return static_cast<float*>(nullptr);
    return direction.mutable_data_ptr<float>() + (mine.begin - table_.plan(u).owned.begin);
  };
  auto exponents = at::zeros({batch.count}, at::TensorOptions(at::kByte));
  for_each([&](const Matrix& matrix, const optim::Factors& factors) {
    auto* rows = exponents.mutable_data_ptr<uint8_t>() + matrix.offset;
    optim::raise_exponents(factors, owned(matrix), values(matrix), rows, rows + factors.rows());
  });
  exponents = gathered<uint8_t>(batch, exponents, "exponents of rows and columns",
                                [](uint8_t a, uint8_t b) { return std::max(a, b); });
  auto sums = at::zeros({batch.count}, at::TensorOptions(at::kDouble));
  for_each([&](const Matrix& matrix, const optim::Factors& factors) {
    const auto* largest = exponents.const_data_ptr<uint8_t>() + matrix.offset;
    auto* rows = sums.mutable_data_ptr<double>() + matrix.offset;
    optim::add_squares(factors, owned(matrix), values(matrix), largest, largest + factors.rows(),
                       rows, rows + factors.rows());
  });
  sums = gathered<double>(batch, sums, "squares of rows and columns",
                          [](double a, double b) { return a + b; });
  const auto made = at::empty({batch.count}, at::TensorOptions(at::kFloat));
  for_each([&](const Matrix& matrix, const optim::Factors& factors) {
    const auto adafactor = std::get<Adafactor>(in_force(matrix.parameter));
    const int64_t step = steps[static_cast<size_t>(matrix.parameter)];
    const auto* row_sums = sums.const_data_ptr<double>() + matrix.offset;
    auto* row_factors = made.mutable_data_ptr<float>() + matrix.offset;
    auto* column_factors = row_factors + factors.rows();
    optim::update_moments(adafactor, step, factors, row_sums, row_sums + factors.rows(),
                          states_.rows(matrix.parameter).mutable_data_ptr<float>(),
                          states_.columns(matrix.parameter).mutable_data_ptr<float>(), row_factors,
                          column_factors);
    optim::make_directions(adafactor, factors, owned(matrix), row_factors, column_factors,
                           values(matrix), norms[static_cast<size_t>(matrix.parameter)].update);
  });
}

}  // namespace zero
