#include "zero/models/layers/linear_gradients.h"

#include <ATen/ATen.h>

#include "zero/base/gradient_place.h"
#include "zero/models/layers/column_sums.h"
#include "zero/models/layers/matmul.h"

namespace zero {

LinearGradients linear_gradients(const at::Tensor& dy, const at::Tensor& x,
                                 const at::Tensor& weight, const at::Tensor& bias, bool transposed,
                                 WantedGradients wanted) {
  LinearGradients result;
  if (wanted.x) result.x = product(dy, as_in_out(in_dtype_of(dy, weight), !transposed));
  if (wanted.weight) {
    result.weight = gradient_place(weight);
    const auto a = transposed ? dy.t() : x.t();
    const auto b = transposed ? x : dy;
    if (weight.scalar_type() == x.scalar_type()) {
      product_into(result.weight, a, b);
    } else {
      result.weight.copy_(product(a, b));
    }
  }
  if (wanted.bias) {
    result.bias = gradient_place(bias);
    column_sums_into(result.bias, dy);
  }
  return result;
}

}  // namespace zero
