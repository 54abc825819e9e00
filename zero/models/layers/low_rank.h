// A product of two thin matrices that is added to a linear layer's result: LoRA (Hu et al., arXiv
// 2106.09685).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zero {

struct LowRankOptions {
  int64_t rank = 8;
  double scale = 1;    ///< of the product
  double dropout = 0;  ///< the probability with which an element of the product's input is zero
};

/// A matrix that is a parameter called `weight`.
class LowRankMatrixImpl : public torch::nn::Cloneable<LowRankMatrixImpl> {
 public:
  explicit LowRankMatrixImpl(at::Tensor values) : weight(std::move(values)) { reset(); }
  void reset() final { weight = register_parameter("weight", weight.detach()); }

  at::Tensor weight;
};
TORCH_MODULE(LowRankMatrix);

/// Holds the matrices A (rank, in) and B (out, rank) of a linear layer, as its submodules `lora_A`
/// and `lora_B`.
class LowRank {
 public:
  /// Makes the submodules, in the dtype and on the device of `like`. A is drawn by LibTorch's
  /// default generator, evenly within +-1/sqrt(in), which is peft's Kaiming with a = sqrt(5); B is
  /// zero. Throws ConfigError for a rank below 1, or a probability outside of [0, 1).
  LowRank(torch::nn::Module& layer, int64_t in, int64_t out, const LowRankOptions& options,
          const at::TensorOptions& like);

  const LowRankOptions& options() const { return options_; }
  /// Returns y + scale B A dropout(x). (..., in), (..., out) -> (..., out). It may write `y`, whose
  /// layer has just computed it.
  at::Tensor add_to(const at::Tensor& y, const at::Tensor& x, bool training) const;

 private:
  LowRankOptions options_;
  LowRankMatrix a_;
  LowRankMatrix b_;
};

/// A part of an adapted layer's own weight: all of it, or a tile.
struct AdaptedWeight {
  std::string name{};     ///< of the parameter, below the layer
  int64_t out_begin = 0;  ///< the first row of B that acts on it
  int64_t in_begin = 0;   ///< the first column of A that does
  bool in_out = false;    ///< it lies as (in, out)
};

/// A layer that can have a low-rank product beside its own.
class Adaptable {
 public:
  virtual ~Adaptable() = default;
  /// Adds the product to what the layer computes. Throws ConfigError as LowRank does, and where
  /// there is one already.
  virtual void adapt(const LowRankOptions& options) = 0;
  virtual int64_t in_features() const = 0;
  virtual int64_t out_features() const = 0;
  /// Returns whether other programs keep the weight as (in, out).
  virtual bool in_out() const = 0;
  virtual std::vector<AdaptedWeight> adapted_weights() const = 0;
};

}  // namespace zero
