// RMS norm (Zhang and Sennrich, arXiv 1910.07467) over the last dimension.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "zero/models/layers/residual.h"

namespace zero {

/// Says by what a norm multiplies the quotient, which is computed in fp32.
enum class NormScale : uint8_t {
  weight,         ///< Llama: by the weight, after it is rounded to the dtype of x
  weight_and_one  ///< Gemma: by 1 + weight in fp32, before it is rounded
};

/// Maps x (..., C) to (..., C): x / sqrt(mean(x^2) + eps) times what `scale` makes of `weight` (C).
/// Either order of casts differs from at::rms_norm's. Keeps x alone for backward, in which the
/// gradient of the weight is computed where zero::gradient_place says. Differentiable twice on the
/// CPU and on devices without the kernels `zero::rms_norm` and `zero::rms_norm_backward` (Note
/// [Kernels of a device] in zero/optim/operators.h); with them each pass is one over x.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    NormScale scale = NormScale::weight);

/// Returns add_branch(branch, x) of residual.h and the norm of that sum, in one pass on devices
/// with those kernels.
SumAndNorm add_rms_norm(const at::Tensor& branch, const at::Tensor& x, const at::Tensor& weight,
                        double eps, NormScale scale = NormScale::weight);

/// Is a layer with this function.
class RmsNormImpl : public torch::nn::Cloneable<RmsNormImpl> {
 public:
  RmsNormImpl(int64_t width, double eps, NormScale scale = NormScale::weight)
      : width_(width), eps_(eps), scale_(scale) {
    reset();
  }
  void reset() final;
  at::Tensor forward(const at::Tensor& x) { return rms_norm(x, weight, eps_, scale_); }
  SumAndNorm add(const at::Tensor& branch, const at::Tensor& x) {
    return add_rms_norm(branch, x, weight, eps_, scale_);
  }

  at::Tensor weight;  ///< (C); at first it multiplies by one

 private:
  int64_t width_;
  double eps_;
  NormScale scale_;
};
TORCH_MODULE(RmsNorm);

}  // namespace zero
