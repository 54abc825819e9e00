// How fast matrices are multiplied here: what a model's speed is compared with.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

/// Multiplies two matrices by the function that layers call (`product`), and
/// times it.
class ProductSpeed {
 public:
  /// Prepares a product of (size, size) by (size, size) on `device`.
  ProductSpeed(at::ScalarType dtype, int64_t size, c10::Device device = c10::kCPU);
  /// Multiplies once; on a device that works off streams several times, and waits for it.
  void measure();
  /// Returns the best speed so far, in FLOP/s.
  double best() const { return best_; }

 private:
  at::Tensor a_, b_;
  double best_ = 0;
};

/// Returns the best of several sizes, in some tenths of a second: on the CPU of 27 MiB at most, on
/// another device of some hundred MiB. Throws OutOfMemory on the CPU, and c10::OutOfMemoryError
/// elsewhere.
double best_product_speed(at::ScalarType dtype, c10::Device device = c10::kCPU);

}  // namespace zero
