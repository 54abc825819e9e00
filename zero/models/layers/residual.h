// The sum that ends a residual branch.
#pragma once

#include <ATen/core/Tensor.h>

#include "zero/base/traced.h"

namespace zero {

/// The sum of a residual branch and what it began with, and the norm of that.
struct SumAndNorm {
  at::Tensor sum, norm;  ///< (..., C)
};

/// Returns branch + x of one shape. A branch's output is fresh and no backward needs it, so the sum
/// may take its place: not under autocast, where it has fewer bits than the sum. It is a view of
/// rows, too: where a view is written, autograd copies the gradient several times in backward,
/// which takes a device longer than the memory is worth.
inline at::Tensor add_branch(const at::Tensor& branch, const at::Tensor& x) {
  const bool in_place = on_cpu(branch) && branch.scalar_type() == x.scalar_type();
  return in_place ? branch.add_(x) : branch + x;
}

}  // namespace zero
