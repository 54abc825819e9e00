// The modules of matrices that language models share: a linear layer that can split itself into
// tiles, and a table of vectors.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "zero/checkpoint/tensor_place.h"
#include "zero/models/layers/linear.h"
#include "zero/models/layers/low_rank.h"
#include "zero/models/layers/tiled_linear.h"

namespace zero {

struct ProjectionOptions {
  int64_t in = 0;
  int64_t out = 0;
  WeightLayout layout = WeightLayout::out_in;
  bool bias = true;
  double deviation = 0.02;  ///< weights are drawn from N(0, deviation^2); a bias is zero
};

/// A linear layer. (..., in) -> (..., out).
class ProjectionImpl : public torch::nn::Cloneable<ProjectionImpl>,
                       public Tileable,
                       public Adaptable {
 public:
  explicit ProjectionImpl(const ProjectionOptions& options);
  /// Makes the same layer, which takes over the parameters of `layer`.
  explicit ProjectionImpl(const torch::nn::LinearImpl& layer);
  void reset() final;
  at::Tensor forward(const at::Tensor& x);
  /// Returns forward(tanh_gelu(x)), keeping less for backward where the weight is whole (linear.h).
  at::Tensor forward_of_gelu(const at::Tensor& x);
  /// Returns next(tanh_gelu(forward(x))): zero::feed_forward where both layers are plain and lie
  /// alike, or else next.forward_of_gelu(forward(x)).
  at::Tensor forward_to_gelu(const at::Tensor& x, ProjectionImpl& next);
  bool tile(int64_t max_elements) override;
  /// Freezes the weight in fewer bits: `weight` becomes the bytes of its matrix in `format`
  /// (zero::packed_weight), and the layer reads it back for each product. Throws ConfigError for a
  /// layer in tiles. Does nothing a second time.
  void quantise(BaseFormat format = BaseFormat::nf4);
  bool quantised() const { return format_ != BaseFormat::as_they_are; }
  BaseFormat format() const { return format_; }
  const ProjectionOptions& options() const { return options_; }

  void adapt(const LowRankOptions& options) override;
  int64_t in_features() const override { return options_.in; }
  int64_t out_features() const override { return options_.out; }
  bool in_out() const override { return options_.layout == WeightLayout::in_out; }
  std::vector<AdaptedWeight> adapted_weights() const override;

  at::Tensor weight;           ///< as `layout` says; undefined in tiles; bytes after `quantise`
  at::Tensor bias;             ///< (out); undefined in tiles, and where there is none
  TiledLinear tiles{nullptr};  ///< in place of both

 private:
  void make_weights();
  void attach(LowRankOptions options);  // a copy: those of the product before go with it
  at::Tensor own_product(const at::Tensor& x, const at::Tensor& with_bias) const;
  at::Tensor whole_weight() const;
  bool plain() const { return !low_rank_ && !quantised() && !tiles; }

  ProjectionOptions options_;
  int64_t tile_elements_ = 0;                    // 0: whole
  BaseFormat format_ = BaseFormat::as_they_are;  // of the weight
  at::TensorOptions product_;                    // of the low-rank matrices
  std::optional<LowRank> low_rank_;
};
TORCH_MODULE(Projection);

/// A table of vectors. (...) int64 -> (..., C).
class EmbeddingTableImpl : public torch::nn::Cloneable<EmbeddingTableImpl> {
 public:
  /// Weights are drawn from N(0, deviation^2). Row `padding` is zero at first and gets no gradient
  /// from here; -1: there is none.
  EmbeddingTableImpl(int64_t rows, int64_t width, double deviation, int64_t padding = -1);
  void reset() final;
  at::Tensor forward(const at::Tensor& indices);

  at::Tensor weight;  ///< (rows, C)

 private:
  int64_t rows_;
  int64_t width_;
  double deviation_;
  int64_t padding_;
};
TORCH_MODULE(EmbeddingTable);

/// Returns where the tiles of the projections below `root` lie in the tensors that other programs
/// read, by the names of the parameters: together they are a whole weight and a whole bias.
std::map<std::string, TensorPlace> tile_places(const torch::nn::Module& root);

}  // namespace zero
