// A linear layer in tiles, each a parameter of its own (memory-centric tiling; ZeRO-Infinity,
// 2104.07857, section 5.1.3).
//
// An operator needs its whole weight at once; tiled, it needs a tile. Where parameters come and go
// around operators, so falls the most that must be there at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/models/layers/low_rank.h"

namespace zero {

struct TiledLinearOptions {
  int64_t in_features = 0;
  int64_t out_features = 0;
  /// Parts into which the features are split, as evenly as possible: the first ones are larger by
  /// one. Splitting `in` adds partial sums, in the dtype of the input.
  int64_t in_splits = 1;
  int64_t out_splits = 1;
  bool bias = true;
};

/// Computes y = x W^T + b in tiles. (..., in) -> (..., out). The result equals that of
/// torch::nn::Linear up to the order of the sums.
class TiledLinearImpl : public torch::nn::Cloneable<TiledLinearImpl>, public Adaptable {
 public:
  /// Weights and bias are drawn as torch::nn::Linear draws its own. Throws ConfigError for sizes or
  /// splits that are not positive, or more splits than features.
  explicit TiledLinearImpl(const TiledLinearOptions& options);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);

  /// Copies a whole weight (out, in) and bias (out; undefined where there is none) into the tiles.
  /// Throws ConfigError for other shapes.
  void load(const at::Tensor& weight, const at::Tensor& bias = {});
  using torch::nn::Module::load;  // of an archive
  /// Returns the whole weight (out, in) and bias (out; undefined where there is none), collected a
  /// tile at a time.
  at::Tensor full_weight() const;
  at::Tensor full_bias() const;

  const TiledLinearOptions& options() const { return options_; }

  void adapt(const LowRankOptions& options) override;
  int64_t in_features() const override { return options_.in_features; }
  int64_t out_features() const override { return options_.out_features; }
  bool in_out() const override { return false; }
  std::vector<AdaptedWeight> adapted_weights() const override;

  struct Part {
    int64_t begin = 0;
    int64_t size = 0;
  };
  /// Returns the features that tiles (o, index), or (index, i), have.
  Part in_part(int64_t index) const;
  Part out_part(int64_t index) const;

  /// Tile (o, i), named "weight_o_i", is at o * in_splits + i.
  std::vector<at::Tensor> weights;
  /// Returns "bias_o", or nothing if there is no bias.
  std::vector<at::Tensor> biases;

 private:
  const at::Tensor& tile(int64_t out, int64_t in) const;
  void attach(LowRankOptions options);  // a copy: those of the product before go with it

  TiledLinearOptions options_;
  std::optional<LowRank> low_rank_;
};
TORCH_MODULE(TiledLinear);

/// Returns the fewest tiles of a weight (out, in) that have at most `max_elements` each; of whole
/// rows where a row is not larger.
TiledLinearOptions tiling_of(int64_t in_features, int64_t out_features, bool bias,
                             int64_t max_elements);

/// A linear layer of another kind than torch::nn::Linear that can split its weight itself.
class Tileable {
 public:
  virtual ~Tileable() = default;
  /// Splits the weight into tiles of at most `max_elements`, of the same values, dtype and
  /// trainability. False, and nothing is changed, where it is not larger or is split already.
  virtual bool tile(int64_t max_elements) = 0;
};

/// Replaces each torch::nn::Linear below `root` whose weight has more than `max_elements` by a
/// TiledLinear (`tiling_of`) of the same values, dtype and trainability, and has each Tileable
/// there split its own. Returns those layers' names. 0 elements: does nothing. Call it before
/// anything else holds the model's parameters, a graph among them.
///
/// Throws ConfigError, and changes nothing, for a torch::nn::Linear that cannot be replaced
/// (replace_linears.h), and for a root that is itself too large a Linear. A layer that splits
/// itself needs none of this.
std::vector<std::string> tile_linears(torch::nn::Module& root, int64_t max_elements);

}  // namespace zero
