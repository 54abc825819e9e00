#include "zero/optim/factors.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/optim/algorithm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/factors.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/norms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

// The functions below go over one run. `across` has an entry for each element of the run. The
// elements behind the last whole vector are computed one by one. Each operation is exact, or
// rounded on its own.

/// Returns the bits of the largest magnitude, and raises each entry of `across` to the magnitude of
/// its element.
uint32_t run_largest(const float* HWY_RESTRICT values, int64_t numel,
                     uint32_t* HWY_RESTRICT across) {
  const hn::ScalableTag<uint32_t> d;
  const hn::RebindToFloat<decltype(d)> df;
  const auto magnitude = hn::Set(d, 0x7FFFFFFFU);
  auto largest = hn::Zero(d);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    const auto bits = hn::And(hn::BitCast(d, hn::LoadU(df, values + i)), magnitude);
    largest = hn::Max(largest, bits);
    hn::StoreU(hn::Max(bits, hn::LoadU(d, across + i)), d, across + i);
  }
  uint32_t result = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < numel; ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFU;
    result = std::max(result, bits);
    across[i] = std::max(across[i], bits);
  }
  return result;
}

/// Returns the sum of squares, each rounded to a multiple of `unit` / 2^52. It also adds each
/// square to its entry of `across`, rounded by its entry of `units` in the same way.
double run_squares(const float* HWY_RESTRICT values, int64_t numel, double unit,
                   const double* HWY_RESTRICT units, double* HWY_RESTRICT across) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> d32;
  const auto along = hn::Set(d, unit);
  auto sum = hn::Zero(d);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    const auto value = hn::PromoteTo(d, hn::LoadU(d32, values + i));
    const auto square = hn::Mul(value, value);
    sum = hn::Add(sum, hn::Sub(hn::Add(square, along), along));
    const auto own = hn::LoadU(d, units + i);
    const auto rounded = hn::Sub(hn::Add(square, own), own);
    hn::StoreU(hn::Add(hn::LoadU(d, across + i), rounded), d, across + i);
  }
  double result = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < numel; ++i) {
    const double square = double{values[i]} * double{values[i]};
    result += (square + unit) - unit;
    across[i] += (square + units[i]) - units[i];
  }
  return result;
}

void run_directions(float* HWY_RESTRICT values, int64_t numel, float along,
                    const float* HWY_RESTRICT across, float limit) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto most = hn::Set(d, limit);
  int64_t i = 0;
  for (; i + lanes <= numel; i += lanes) {
    const auto both = hn::Mul(hn::Set(d, along), hn::LoadU(d, across + i));
    const auto factor = hn::IfThenElse(hn::Gt(both, most), most, both);
    hn::StoreU(hn::Mul(hn::LoadU(d, values + i), factor), d, values + i);
  }
  for (; i < numel; ++i) {
    const float both = along * across[i];
    values[i] *= both > limit ? limit : both;
  }
}

/// Adds the squares of whole blocks; the last block is filled up with zeros.
void add_blocks(const float* values, int64_t numel, ExactSum& squares) {
  int64_t i = 0;
  for (; i + ExactSum::kBlock <= numel; i += ExactSum::kBlock)
    squares.add(sum_of_squares(values + i));
  if (i == numel) return;
  HWY_ALIGN float last[ExactSum::kBlock] = {};
  std::copy_n(values + i, numel - i, last);
  squares.add(sum_of_squares(last));
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::optim {

namespace kernels {
HWY_EXPORT(run_largest);
HWY_EXPORT(run_squares);
HWY_EXPORT(run_directions);
HWY_EXPORT(add_blocks);
}  // namespace kernels

Factors::Factors(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const auto dimensions = static_cast<int64_t>(sizes.size());
  ensure(dimensions >= 2, "a factored parameter has rows and columns");
  row_shape_ = sizes.vec();
  column_shape_ = sizes.vec();
  row_shape_.back() = 1;
  column_shape_[static_cast<size_t>(dimensions - 2)] = 1;
  row_length_ = sizes[static_cast<size_t>(dimensions - 1)];
  column_length_ = sizes[static_cast<size_t>(dimensions - 2)];
  c10::SmallVector<std::pair<int64_t, Axis>, 6> by_stride;
  int64_t row_step = 1;
  int64_t column_step = 1;
  for (int64_t i = dimensions - 1; i >= 0; --i) {
    const auto at = static_cast<size_t>(i);
    const bool along_row = i == dimensions - 1;
    const bool along_column = i == dimensions - 2;
    by_stride.emplace_back(
        strides[at], Axis{sizes[at], along_row ? 0 : row_step, along_column ? 0 : column_step});
    if (!along_row) row_step *= sizes[at];
    if (!along_column) column_step *= sizes[at];
    if (i < dimensions - 2) matrices_ *= sizes[at];
  }
  std::stable_sort(by_stride.begin(), by_stride.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [stride, axis] : by_stride) {
    if (axis.size == 1) continue;
    if (!axes_.empty()) {
      auto& outer = axes_.back();
      if (outer.row_step == axis.size * axis.row_step &&
          outer.column_step == axis.size * axis.column_step) {
        outer = {outer.size * axis.size, axis.row_step, axis.column_step};
        continue;
      }
    }
    axes_.push_back(axis);
  }
  if (axes_.empty()) axes_.emplace_back();
}

std::array<int64_t, 2> Factors::place(int64_t element) const {
  std::array<int64_t, 2> at{};
  for (size_t i = axes_.size(); i-- > 0;) {
    const auto& axis = axes_[i];
    const int64_t index = element % axis.size;
    element /= axis.size;
    at[0] += index * axis.row_step;
    at[1] += index * axis.column_step;
  }
  return at;
}

// The first and the last element have equal indices in the outer dimensions. In the first dimension
// in which they differ, the part is the range between them; in the dimensions inside of it, the
// part is everything.
Factors::Part Factors::part(Interval elements) const {
  if (elements.size() <= 0) return {};
  int64_t within = 1;  // number of elements that have one index of the axis
  for (const auto& axis : axes_) within *= axis.size;
  int64_t first = elements.begin;
  int64_t last = elements.end - 1;
  Part part;
  const auto advance = [&](const Axis& axis, int64_t from, int64_t to) {
    part.rows.begin += from * axis.row_step;
    part.rows.end += to * axis.row_step;
    part.columns.begin += from * axis.column_step;
    part.columns.end += to * axis.column_step;
  };
  bool apart = false;
  for (const auto& axis : axes_) {
    within /= axis.size;
    if (apart) {
      advance(axis, 0, axis.size - 1);
      continue;
    }
    advance(axis, first / within, last / within);
    apart = first / within != last / within;
    first %= within;
    last %= within;
  }
  ++part.rows.end;
  ++part.columns.end;
  return part;
}

namespace {

/// Returns 2^52 units for sums of `numel` squares whose largest element has this exponent. Such a
/// sum is less than 2^53 units, and no square is above 2^52 units.
double unit_of(uint8_t exponent, int64_t numel) {
  const auto length =
      std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(numel - 1))));
  const int power = 2 * (exponent - 126) + length - 1;
  return std::bit_cast<double>(static_cast<uint64_t>(1023 + power) << 52);
}

/// Says which array of a run advances with its elements: the one of rows, or the one of columns.
struct Sides {
  bool rows_stay = false;  ///< runs go along a row, so columns advance
  bool plain = false;      ///< only one of the two advances, so vectors fit
};
Sides sides(const Factors& factors) {
  const bool along_row = factors.row_step() == 0 && factors.column_step() == 1;
  const bool along_column = factors.row_step() == 1 && factors.column_step() == 0;
  return {along_row, along_row || along_column};
}

/// Calls work(part, elements) on threads, for parts of the elements that are multiples of a block.
/// The number of parts depends on the number of threads and on the sums that each of them keeps:
/// all sums together take at most as much memory as the elements. Sums are exact, so the number of
/// parts changes no result.
constexpr int64_t kLeastPart = 1 << 14;
int64_t parts_of(Interval elements, int64_t sums) {
  const int64_t least = std::max(kLeastPart, 2 * sums);
  return std::clamp<int64_t>(elements.size() / least, 1, at::get_num_threads());
}
template <class Work>
void for_each_part(Interval elements, int64_t parts, const Work& work) {
  const int64_t numel =
      at::ceil_div(at::ceil_div(elements.size(), parts), ExactSum::kBlock) * ExactSum::kBlock;
  parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Interval mine{std::min(elements.begin + i * numel, elements.end),
                          std::min(elements.begin + (i + 1) * numel, elements.end)};
      if (mine.size() > 0) work(i, mine);
    }
  });
}

/// Arrays that have a number for each row and column of a part of a parameter.
template <class T>
class ByPart {
 public:
  ByPart(const Factors::Part& part, T* values) : part_(part), values_(values) {}
  T* row(int64_t index) { return values_ + index - part_.rows.begin; }
  T* column(int64_t index) { return values_ + part_.rows.size() + index - part_.columns.begin; }

 private:
  Factors::Part part_;
  T* values_;
};

uint8_t exponent_of(uint32_t bits) { return static_cast<uint8_t>(bits >> 23); }

}  // namespace

void raise_exponents(const Factors& factors, Interval elements, const float* values, uint8_t* rows,
                     uint8_t* columns) {
  if (elements.size() <= 0) return;
  using namespace kernels;
  const auto side = sides(factors);
  const auto all = factors.part(elements);
  const int64_t parts = parts_of(elements, all.size());
  const auto scratch = at::zeros({parts * all.size()}, at::TensorOptions(at::kInt));
  auto* bits = reinterpret_cast<uint32_t*>(scratch.mutable_data_ptr<int32_t>());
  const auto of_part = [&](int64_t index) { return ByPart(all, bits + index * all.size()); };
  for_each_part(elements, parts, [&](int64_t index, Interval mine) {
    auto largest = of_part(index);
    factors.for_each_run(mine, [&](const Factors::Run& run) {
      const float* from = values + (run.begin - elements.begin);
      if (side.plain) {
        auto* stays = side.rows_stay ? largest.row(run.row) : largest.column(run.column);
        auto* goes = side.rows_stay ? largest.column(run.column) : largest.row(run.row);
        *stays = std::max(*stays, HWY_DYNAMIC_DISPATCH(run_largest)(from, run.numel, goes));
        return;
      }
      for (int64_t i = 0; i < run.numel; ++i) {
        const auto magnitude = std::bit_cast<uint32_t>(from[i]) & 0x7FFFFFFFU;
        auto* row = largest.row(run.row + i * factors.row_step());
        auto* column = largest.column(run.column + i * factors.column_step());
        *row = std::max(*row, magnitude);
        *column = std::max(*column, magnitude);
      }
    });
  });
  for (int64_t index = 0; index < parts; ++index) {
    auto largest = of_part(index);
    for (int64_t r = all.rows.begin; r < all.rows.end; ++r)
      rows[r] = std::max(rows[r], exponent_of(*largest.row(r)));
    for (int64_t c = all.columns.begin; c < all.columns.end; ++c)
      columns[c] = std::max(columns[c], exponent_of(*largest.column(c)));
  }
}

void add_squares(const Factors& factors, Interval elements, const float* values,
                 const uint8_t* row_exponents, const uint8_t* column_exponents, double* rows,
                 double* columns) {
  if (elements.size() <= 0) return;
  using namespace kernels;
  const auto side = sides(factors);
  const auto all = factors.part(elements);
  const int64_t parts = parts_of(elements, all.size());
  const auto scratch = at::zeros({(parts + 1) * all.size()}, at::TensorOptions(at::kDouble));
  auto* numbers = scratch.mutable_data_ptr<double>();
  ByPart units(all, numbers);
  for (int64_t r = all.rows.begin; r < all.rows.end; ++r)
    *units.row(r) = unit_of(row_exponents[r], factors.row_length());
  for (int64_t c = all.columns.begin; c < all.columns.end; ++c)
    *units.column(c) = unit_of(column_exponents[c], factors.column_length());
  const auto of_part = [&](int64_t index) {
    return ByPart(all, numbers + (index + 1) * all.size());
  };
  for_each_part(elements, parts, [&](int64_t index, Interval mine) {
    auto sums = of_part(index);
    auto unit = units;
    factors.for_each_run(mine, [&](const Factors::Run& run) {
      const float* from = values + (run.begin - elements.begin);
      if (side.plain && side.rows_stay) {
        *sums.row(run.row) += HWY_DYNAMIC_DISPATCH(run_squares)(
            from, run.numel, *unit.row(run.row), unit.column(run.column), sums.column(run.column));
        return;
      }
      if (side.plain) {
        *sums.column(run.column) += HWY_DYNAMIC_DISPATCH(run_squares)(
            from, run.numel, *unit.column(run.column), unit.row(run.row), sums.row(run.row));
        return;
      }
      for (int64_t i = 0; i < run.numel; ++i) {
        const double square = double{from[i]} * double{from[i]};
        const int64_t row = run.row + i * factors.row_step();
        const int64_t column = run.column + i * factors.column_step();
        *sums.row(row) += (square + *unit.row(row)) - *unit.row(row);
        *sums.column(column) += (square + *unit.column(column)) - *unit.column(column);
      }
    });
  });
  for (int64_t index = 0; index < parts; ++index) {
    auto sums = of_part(index);
    for (int64_t r = all.rows.begin; r < all.rows.end; ++r) rows[r] += *sums.row(r);
    for (int64_t c = all.columns.begin; c < all.columns.end; ++c) columns[c] += *sums.column(c);
  }
}

namespace {

/// The numbers by which a step changes moments, in double.
struct Blend {
  double fresh;  ///< share of the new mean
  double added;  ///< is added to the new mean
  double least;  ///< lower limit of the mean of a matrix's rows
  Blend(const Adafactor& o, int64_t step)
      : fresh(std::pow(static_cast<double>(step), o.beta2_decay)),
        added(o.eps_added ? o.first_eps() : 0),
        least(o.eps_added ? 0 : o.first_eps()) {}
  double operator()(double old, double mean) const {
    return old * (1 - fresh) + (mean + added) * fresh;
  }
};

/// Returns the upper limit of a direction's factor.
float limit_of(const Adafactor& o) {
  return o.eps_added ? std::numeric_limits<float>::infinity()
                     : static_cast<float>(1 / o.first_eps());
}

float root_factor(double moment) { return static_cast<float>(1 / std::sqrt(moment)); }

}  // namespace

void update_moments(const Adafactor& optimizer, int64_t step, const Factors& factors,
                    const double* row_sums, const double* column_sums, float* row_var,
                    float* col_var, float* row_factors, float* column_factors) {
  constexpr int64_t kGrain = 4096;
  const Blend blend(optimizer, step);
  const auto row_length = static_cast<double>(factors.row_length());
  const auto column_length = static_cast<double>(factors.column_length());
  parallel_for(0, factors.columns(), kGrain, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      col_var[c] = static_cast<float>(blend(double{col_var[c]}, column_sums[c] / column_length));
      column_factors[c] = root_factor(double{col_var[c]});
    }
  });
  parallel_for(0, factors.rows(), kGrain, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      row_var[r] = static_cast<float>(blend(double{row_var[r]}, row_sums[r] / row_length));
  });
  const int64_t length = factors.column_length();
  const int64_t matrices = std::max<int64_t>(1, kGrain / length);
  parallel_for(0, factors.matrices(), matrices, [&](int64_t first, int64_t last) {
    for (int64_t r = first * length; r < last * length; r += length) {
      double mean = 0;
      for (int64_t i = r; i < r + length; ++i) mean += double{row_var[i]};
      mean /= column_length;
      if (mean < blend.least) mean = blend.least;
      for (int64_t i = r; i < r + length; ++i)
        row_factors[i] = root_factor(double{row_var[i]} / mean);
    }
  });
}

void make_directions(const Adafactor& optimizer, const Factors& factors, Interval elements,
                     const float* row_factors, const float* column_factors, float* values,
                     ExactSum& squares) {
  if (elements.size() <= 0) return;
  using namespace kernels;
  constexpr int64_t kChunk = 4096;  // stays in a core's cache
  const auto side = sides(factors);
  const float limit = limit_of(optimizer);
  std::mutex mutex;
  for_each_part(elements, parts_of(elements, 0), [&](int64_t /*index*/, Interval mine) {
    ExactSum sum;
    for (int64_t begin = mine.begin; begin < mine.end; begin += kChunk) {
      const Interval chunk{begin, std::min(begin + kChunk, mine.end)};
      float* const at = values + (begin - elements.begin);
      factors.for_each_run(chunk, [&](const Factors::Run& run) {
        float* to = at + (run.begin - begin);
        if (side.plain && side.rows_stay) {
          HWY_DYNAMIC_DISPATCH(run_directions)
          (to, run.numel, row_factors[run.row], column_factors + run.column, limit);
          return;
        }
        if (side.plain) {
          HWY_DYNAMIC_DISPATCH(run_directions)
          (to, run.numel, column_factors[run.column], row_factors + run.row, limit);
          return;
        }
        for (int64_t i = 0; i < run.numel; ++i) {
          const float both = row_factors[run.row + i * factors.row_step()] *
                             column_factors[run.column + i * factors.column_step()];
          to[i] *= both > limit ? limit : both;
        }
      });
      HWY_DYNAMIC_DISPATCH(add_blocks)(at, chunk.size(), sum);
    }
    const std::lock_guard lock(mutex);
    squares.add(sum);
  });
}

void factored_directions(const Adafactor& optimizer, int64_t step, const Factors& factors,
                         float* values, float* row_var, float* col_var, ExactSum& squares) {
  const int64_t count = factors.rows() + factors.columns();
  const Interval all{0, factors.matrices() * factors.row_length() * factors.column_length()};
  const auto exponents = at::zeros({count}, at::TensorOptions(at::kByte));
  const auto sums = at::zeros({count}, at::TensorOptions(at::kDouble));
  const auto made = at::empty({count}, at::TensorOptions(at::kFloat));
  auto* row_exponents = exponents.mutable_data_ptr<uint8_t>();
  auto* row_sums = sums.mutable_data_ptr<double>();
  auto* row_factors = made.mutable_data_ptr<float>();
  auto* column_exponents = row_exponents + factors.rows();
  auto* column_sums = row_sums + factors.rows();
  auto* column_factors = row_factors + factors.rows();
  raise_exponents(factors, all, values, row_exponents, column_exponents);
  add_squares(factors, all, values, row_exponents, column_exponents, row_sums, column_sums);
  update_moments(optimizer, step, factors, row_sums, column_sums, row_var, col_var, row_factors,
                 column_factors);
  make_directions(optimizer, factors, all, row_factors, column_factors, values, squares);
}

void factored_directions_reference(const Adafactor& optimizer, int64_t step, const Factors& factors,
                                   float* values, float* row_var, float* col_var,
                                   ExactSum& squares) {
  const auto rows = static_cast<size_t>(factors.rows());
  const auto columns = static_cast<size_t>(factors.columns());
  const Interval all{0, factors.matrices() * factors.row_length() * factors.column_length()};
  const auto for_each = [&](const auto& f) {
    factors.for_each_run(all, [&](const Factors::Run& run) {
      for (int64_t i = 0; i < run.numel; ++i) {
        f(values[run.begin + i], static_cast<size_t>(run.row + i * factors.row_step()),
          static_cast<size_t>(run.column + i * factors.column_step()));
      }
    });
  };
  std::vector<uint32_t> row_bits(rows), column_bits(columns);
  for_each([&](float value, size_t row, size_t column) {
    const auto magnitude = std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU;
    row_bits[row] = std::max(row_bits[row], magnitude);
    column_bits[column] = std::max(column_bits[column], magnitude);
  });
  std::vector<double> row_sums(rows), column_sums(columns);
  for_each([&](float value, size_t row, size_t column) {
    const double square = double{value} * double{value};
    const double along_row = unit_of(exponent_of(row_bits[row]), factors.row_length());
    const double along_column = unit_of(exponent_of(column_bits[column]), factors.column_length());
    row_sums[row] += (square + along_row) - along_row;
    column_sums[column] += (square + along_column) - along_column;
  });
  std::vector<float> row_factors(rows), column_factors(columns);
  update_moments(optimizer, step, factors, row_sums.data(), column_sums.data(), row_var, col_var,
                 row_factors.data(), column_factors.data());
  const float limit = limit_of(optimizer);
  for_each([&](float& value, size_t row, size_t column) {
    const float both = row_factors[row] * column_factors[column];
    value *= both > limit ? limit : both;
  });
  for (int64_t begin = 0; begin < all.end; begin += ExactSum::kBlock) {
    std::array<float, ExactSum::kBlock> block{};
    std::copy_n(values + begin, std::min(ExactSum::kBlock, all.end - begin), block.begin());
    squares.add(sum_of_squares(block));
  }
}

double factored_directions_exact(const Adafactor& optimizer, int64_t step, int64_t rows,
                                 int64_t columns, double* values, double* row_var,
                                 double* col_var) {
  const Blend blend(optimizer, step);
  const auto at = [&](int64_t r, int64_t c) -> double& { return values[r * columns + c]; };
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < columns; ++c) sum += at(r, c) * at(r, c);
    row_var[r] = blend(row_var[r], sum / static_cast<double>(columns));
  }
  for (int64_t c = 0; c < columns; ++c) {
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += at(r, c) * at(r, c);
    col_var[c] = blend(col_var[c], sum / static_cast<double>(rows));
  }
  const double mean = std::max(
      blend.least, std::accumulate(row_var, row_var + rows, 0.0) / static_cast<double>(rows));
  const double least = optimizer.eps_added ? 0 : optimizer.first_eps() * optimizer.first_eps();
  double squares = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      at(r, c) /= std::sqrt(std::max(least, row_var[r] * col_var[c] / mean));
      squares += at(r, c) * at(r, c);
    }
  }
  return std::sqrt(squares / static_cast<double>(rows * columns));
}

}  // namespace zero::optim
#endif
