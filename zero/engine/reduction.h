// One reduction of a unit's array of gradients, with the memory that it holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/engine/bucket_pool.h"
#include "zero/engine/phased_reduction.h"

namespace zero {

class GradientSums;

/// The reduction of one unit's array, or of a piece of it.
struct Reduction {
  int64_t unit = 0;
  /// The first element of the piece in each slice of the unit (look_up_gradient.cpp).
  int64_t begin = 0;
  /// The sums that the result goes to. Null if the result lies in its place when the reduction
  /// is done.
  GradientSums* sums = nullptr;
  Bucket bucket{};
  /// The sum of an earlier pass of this step is there, and this one must be added to it.
  bool accumulates = false;
  at::Tensor output{};   ///< the array that the reduction writes to
  at::Tensor sum{};      ///< memory that `sums` has taken for the unit's sum, if it needs some
  at::Tensor partial{};  ///< memory for a shard group's sum, where replicas need some
  PhasedReduction collectives{};
};

}  // namespace zero
