// Quantises a matrix of a file, of which a piece at a time is in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "zero/optim/base_format.h"
#include "zero/partition/layout.h"

namespace zero {

/// Makes ranges of the bytes that optim::pack makes of a whole matrix.
class MatrixPacker {
 public:
  /// Returns the elements [begin, begin + count) of the matrix, in any floating-point dtype.
  using Read = std::function<at::Tensor(int64_t begin, int64_t count)>;

  MatrixPacker(BaseFormat format, int64_t numel, Read read);

  /// Returns bytes. They come from the elements that they stand for, but the scales of NF4 from the
  /// whole matrix, which is read once for them.
  at::Tensor bytes(partition::Range range);

 private:
  at::Tensor int8(partition::Range range) const;
  at::Tensor nf4(partition::Range range);
  const at::Tensor& nf4_constants();
  /// Calls take(first, values) with pieces in fp32. All but the last are whole blocks.
  template <class Take>
  void for_each_piece(partition::Range elements, const Take& take) const;

  BaseFormat format_;
  int64_t numel_;
  Read read_;
  at::Tensor constants_;  // what stands behind the codes of NF4, once it was asked for
};

}  // namespace zero
