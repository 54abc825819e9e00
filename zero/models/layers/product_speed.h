// How fast matrices are multiplied here: what a model's speed is compared with.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

/// Multiplies two matrices by the function that layers call (`product`), and times it.
class ProductSpeed {
 public:
  /// Of (size, size) by (size, size), on the CPU.
  ProductSpeed(at::ScalarType dtype, int64_t size);
  /// Multiplies once.
  void measure();
  /// The best so far, in FLOP/s.
  double best() const { return best_; }

 private:
  at::Tensor a_, b_;
  double best_ = 0;
};

/// The best of several sizes, of 27 MiB at most, in some tenths of a second.
double best_product_speed(at::ScalarType dtype);

}  // namespace zero
