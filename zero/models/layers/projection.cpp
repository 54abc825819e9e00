#include "zero/models/layers/projection.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/base/row_embedding.h"
#include "zero/models/layers/feed_forward.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/layers/packed_weight.h"

namespace zero {

ProjectionImpl::ProjectionImpl(const ProjectionOptions& options) : options_(options) { reset(); }

ProjectionImpl::ProjectionImpl(const torch::nn::LinearImpl& layer)
    : options_{.in = layer.options.in_features(),
               .out = layer.options.out_features(),
               .bias = layer.bias.defined()} {
  weight = register_parameter("weight", layer.weight, layer.weight.requires_grad());
  if (options_.bias) bias = register_parameter("bias", layer.bias, layer.bias.requires_grad());
  train(layer.is_training());
}

void ProjectionImpl::reset() {
  make_weights();
  if (low_rank_) attach(low_rank_->options());
}

void ProjectionImpl::make_weights() {
  const auto& [in, out, layout, has_bias, deviation] = options_;
  if (tile_elements_ > 0) {
    tiles = register_module("tiles", TiledLinear(tiling_of(in, out, has_bias, tile_elements_)));
    return;
  }
  const bool in_out = layout == WeightLayout::in_out;
  const auto values = normal_values({in_out ? in : out, in_out ? out : in}, deviation);
  weight = register_parameter("weight", quantised() ? packed_weight(values, format_) : values,
                              /*requires_grad=*/!quantised());
  if (has_bias) bias = register_parameter("bias", at::zeros({out}));
}

void ProjectionImpl::attach(LowRankOptions options) {
  if (!quantised())
    product_ = (tiles ? tiles->weights.front() : weight).options().requires_grad(false);
  if (options.magnitude && tiles) {
    throw ConfigError(
        "A linear layer in tiles has no magnitudes (DoRA): a tile does not have whole rows. Leave "
        "the tiles out (--tile-elements).");
  }
  at::Tensor lengths;
  if (options.magnitude && !has_absent_values(weight)) {
    const c10::NoGradGuard no_grad;
    lengths = row_lengths(whole_weight());
  }
  low_rank_.emplace(*this, options_.in, options_.out, options, product_, lengths);
}

// (out, in), in fp32 where it is quantised
at::Tensor ProjectionImpl::whole_weight() const {
  const bool in_out = this->in_out();
  const auto whole = quantised()
                         ? unpacked_weight(weight, format_, in_out ? options_.in : options_.out,
                                           in_out ? options_.out : options_.in, at::kFloat)
                         : weight;
  return in_out ? whole.t() : whole;
}

at::Tensor ProjectionImpl::own_product(const at::Tensor& x, const at::Tensor& with_bias) const {
  return quantised() ? packed_linear(x, weight, format_, options_.out, with_bias, options_.layout)
                     : linear(x, weight, with_bias, options_.layout);
}

void ProjectionImpl::adapt(const LowRankOptions& options) {
  if (low_rank_) throw ConfigError("A Projection was given LoRA a second time.");
  attach(options);
}

std::vector<AdaptedWeight> ProjectionImpl::adapted_weights() const {
  if (!tiles) return {{.name = "weight", .in_out = in_out()}};
  auto all = tiles->adapted_weights();
  for (auto& part : all) part.name.insert(0, "tiles.");
  return all;
}

at::Tensor ProjectionImpl::forward(const at::Tensor& x) {
  auto y = tiles ? tiles(x) : own_product(x, bias);
  if (!low_rank_) return y;
  return low_rank_->add_to(
      y, x, is_training(),
      {.bias = bias,
       .weight = [this] { return whole_weight(); },
       .product = [this](const auto& of) { return own_product(of, at::Tensor()); }});
}

at::Tensor ProjectionImpl::forward_of_gelu(const at::Tensor& x) {
  if (low_rank_ || quantised()) return forward(tanh_gelu(x));
  return tiles ? tiles(tanh_gelu(x)) : gelu_linear(x, weight, bias, options_.layout);
}

at::Tensor ProjectionImpl::forward_to_gelu(const at::Tensor& x, ProjectionImpl& next) {
  if (!plain() || !next.plain() || in_out() != next.in_out())
    return next.forward_of_gelu(forward(x));
  return feed_forward(x, weight, bias, next.weight, next.bias, options_.layout);
}

void ProjectionImpl::quantise(BaseFormat format) {
  if (tiles) {
    throw ConfigError(
        "A linear layer in tiles cannot be quantised. Leave the tiles out (--tile-elements).");
  }
  if (quantised() || format == BaseFormat::as_they_are) return;
  format_ = format;
  if (!low_rank_) product_ = weight.options().requires_grad(false);
  weight = parameters_["weight"] =
      packed_weight(weight, format);  // it keeps its place in the order
  if (low_rank_ && low_rank_->options().magnitude && !has_absent_values(weight))
    low_rank_->begin_magnitudes(row_lengths(whole_weight()));
}

bool ProjectionImpl::tile(int64_t max_elements) {
  if (quantised() || tiles || weight.numel() <= max_elements) return false;
  const auto whole = std::exchange(weight, at::Tensor());
  const auto whole_bias = std::exchange(bias, at::Tensor());
  parameters_.clear();
  tile_elements_ = max_elements;
  std::optional<WithValues> drawn;  // a new head has values where the rest has none yet
  if (!has_absent_values(whole)) drawn.emplace();
  make_weights();
  tiles->to(whole.device(), whole.scalar_type());
  tiles->load(options_.layout == WeightLayout::in_out ? whole.t() : whole, whole_bias);
  for (auto& part : tiles->weights) part.set_requires_grad(whole.requires_grad());
  for (auto& part : tiles->biases) part.set_requires_grad(whole_bias.requires_grad());
  tiles->train(is_training());
  return true;
}

EmbeddingTableImpl::EmbeddingTableImpl(int64_t rows, int64_t width, double deviation,
                                       int64_t padding)
    : rows_(rows), width_(width), deviation_(deviation), padding_(padding) {
  reset();
}

void EmbeddingTableImpl::reset() {
  weight = register_parameter("weight", normal_values({rows_, width_}, deviation_));
  const c10::NoGradGuard no_grad;
  if (padding_ >= 0 && !has_absent_values(weight)) weight.select(0, padding_).zero_();
}

at::Tensor EmbeddingTableImpl::forward(const at::Tensor& indices) {
  return row_embedding(weight, indices, padding_);
}

std::map<std::string, TensorPlace> tile_places(const torch::nn::Module& root) {
  std::map<std::string, TensorPlace> places;
  for (const auto& module : root.named_modules()) {
    const auto* layer = module.value()->as<ProjectionImpl>();
    if (layer == nullptr || !layer->tiles) continue;
    const auto& path = module.key();
    const auto& parts = layer->tiles;
    const auto& sizes = parts->options();
    const bool transposed = layer->options().layout == WeightLayout::in_out;
    for (int64_t o = 0; o < sizes.out_splits; ++o) {
      const int64_t out = parts->out_part(o).begin;
      if (sizes.bias) {
        places[fmt::format("{}.tiles.bias_{}", path, o)] = {
            .tensor = path + ".bias", .sizes = {sizes.out_features}, .offsets = {out}};
      }
      for (int64_t i = 0; i < sizes.in_splits; ++i) {
        const int64_t in = parts->in_part(i).begin;
        TensorPlace place{.tensor = path + ".weight",
                          .sizes = {sizes.out_features, sizes.in_features},
                          .offsets = {out, in},
                          .transposed = transposed};
        if (transposed) {
          std::swap(place.sizes[0], place.sizes[1]);
          std::swap(place.offsets[0], place.offsets[1]);
        }
        places[fmt::format("{}.tiles.weight_{}_{}", path, o, i)] = std::move(place);
      }
    }
  }
  return places;
}

}  // namespace zero
