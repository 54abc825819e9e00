// A product of two thin matrices that is added to a linear layer's result: LoRA (Hu et al., arXiv
// 2106.09685), and DoRA (Liu et al., arXiv 2402.09353), which learns the length of each row of the
// sum by itself.
//
// Note [DoRA]
// A row of the layer's weight is m (W + s B A) / n: n is the length of the row of W + s B A, and
// the magnitude m is learnt. In backward n counts as a constant, as section 4.3 of the paper says.
// m begins as the length of the row of W, so that the layer begins as it was. With dropout the
// whole of what the adapter changes sees the dropped input, as in peft: y + (m/n - 1) W d + (m/n) s
// B A d, where d is the dropped x.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero {

struct LowRankOptions {
  int64_t rank = 8;
  double scale = 1;        ///< of the product
  double dropout = 0;      ///< the probability with which an element of the product's input is zero
  bool magnitude = false;  ///< rows of the sum have lengths of their own: Note [DoRA]
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
  /// zero. With `magnitude` the layer gets the parameter `lora_magnitude_vector` (out), which is
  /// `lengths`, or ones where these are undefined. Throws ConfigError for a rank below 1, or a
  /// probability outside of [0, 1).
  LowRank(torch::nn::Module& layer, int64_t in, int64_t out, const LowRankOptions& options,
          const at::TensorOptions& like, const at::Tensor& lengths = {});

  const LowRankOptions& options() const { return options_; }
  /// Sets the magnitudes, if there are any.
  void begin_magnitudes(const at::Tensor& lengths);
  /// Returns y + scale B A dropout(x). (..., in), (..., out) -> (..., out). It may write `y`, whose
  /// layer has just computed it.
  at::Tensor add_to(const at::Tensor& y, const at::Tensor& x, bool training) const;

  /// A layer as DoRA needs it.
  struct Base {
    at::Tensor bias;                                       ///< undefined where there is none
    std::function<at::Tensor()> weight;                    ///< (out, in)
    std::function<at::Tensor(const at::Tensor&)> product;  ///< the layer without its bias
  };
  /// Does the same with magnitudes, if there are any.
  at::Tensor add_to(const at::Tensor& y, const at::Tensor& x, bool training,
                    const Base& base) const;

 private:
  at::Tensor product(const at::Tensor& input) const;
  at::Tensor factor(const at::Tensor& weight) const;

  LowRankOptions options_;
  LowRankMatrix a_;
  LowRankMatrix b_;
  at::Tensor magnitude_;  // undefined without
};

/// Returns the lengths of the rows of a matrix (out, in), in fp32.
at::Tensor row_lengths(const at::Tensor& weight);

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
