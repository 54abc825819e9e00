// Sums over the rows of a matrix as a device's threads compute them: Note [Kernels in plain C++] in
// zero/optim/device_elements.h.
//
// The rows are divided among thread blocks, whose sums ("parts", fp32) are added in a second
// kernel: in one order, so that results repeat.
#pragma once

#include <cstdint>

#include "zero/models/layers/packs.h"

namespace zero::column_sums {

/// Returns the sums of columns [column, column + kCount) over rows first, first + step, ... of
/// `rows` rows, each `columns` wide.
template <class Numbers, int kCount>
constexpr packs::Pack<float, kCount> of_rows(const typename Numbers::Stored* matrix, int64_t rows,
                                             int64_t columns, int64_t column, int64_t first,
                                             int64_t step) {
  constexpr int kAhead = 4;  // rows that are read before the first is added
  packs::Pack<float, kCount> sums{};
  const auto add = [&](const auto& stored) {
    const auto values = packs::widened<Numbers, kCount>(stored);
    for (int i = 0; i < kCount; ++i) sums.values[i] += values.values[i];
  };
  const auto read = [&](int64_t row) {
    return optim::device::load<kCount>(matrix + row * columns + column);
  };
  int64_t row = first;
  for (; row + (kAhead - 1) * step < rows; row += kAhead * step) {
    packs::Pack<typename Numbers::Stored, kCount> ahead[kAhead] = {};
    for (int k = 0; k < kAhead; ++k) ahead[k] = read(row + k * step);
    for (int k = 0; k < kAhead; ++k) add(ahead[k]);
  }
  for (; row < rows; row += step) add(read(row));
  return sums;
}

/// Returns the sum of column `column` over parts first, first + step, ... of `count`.
constexpr float of_parts(const float* parts, int64_t count, int64_t columns, int64_t column,
                         int64_t first, int64_t step) {
  float sum = 0;
  for (int64_t part = first; part < count; part += step) sum += parts[part * columns + column];
  return sum;
}

}  // namespace zero::column_sums
