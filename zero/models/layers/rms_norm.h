// RMS norm (Zhang and Sennrich, arXiv 1910.07467) over the last dimension.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace zero {

/// Maps x (..., C) to (..., C): x / sqrt(mean(x^2) + eps) times `weight` (C). The quotient is
/// computed in fp32 and rounded to the dtype of x before it is multiplied, in which Llama's order
/// of casts differs from at::rms_norm's. Keeps x alone for backward, in which the gradient of the
/// weight is computed where zero::gradient_place says. Differentiable twice.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// Is a layer with this function.
class RmsNormImpl : public torch::nn::Cloneable<RmsNormImpl> {
 public:
  RmsNormImpl(int64_t width, double eps) : width_(width), eps_(eps) { reset(); }
  void reset() final;
  at::Tensor forward(const at::Tensor& x) { return rms_norm(x, weight, eps_); }

  at::Tensor weight;  ///< (C), ones at first

 private:
  int64_t width_;
  double eps_;
};
TORCH_MODULE(RmsNorm);

}  // namespace zero
