// Products of matrices with the same bits on any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero::optim {

/// Sets c to beta c + alpha a b, all 2-D and fp32.
void product(const at::Tensor& c, double beta, double alpha, const at::Tensor& a,
             const at::Tensor& b);

}  // namespace zero::optim
