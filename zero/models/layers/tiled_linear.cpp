#include "zero/models/layers/tiled_linear.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/layers/linear.h"
#include "zero/models/layers/replace_linears.h"

namespace zero {

namespace {

namespace nn = torch::nn;

void check_splits(const char* what, int64_t features, int64_t splits) {
  if (features < 1) {
    throw ConfigError(
        fmt::format("TiledLinear's {}_features is {}; it must be positive.", what, features));
  }
  if (splits < 1 || splits > features) {
    throw ConfigError(
        fmt::format("TiledLinear's {}_splits is {}; it must be from 1 to {}_features, "
                    "which is {}.",
                    what, splits, what, features));
  }
}

}  // namespace

TiledLinearImpl::TiledLinearImpl(const TiledLinearOptions& options) : options_(options) {
  check_splits("in", options_.in_features, options_.in_splits);
  check_splits("out", options_.out_features, options_.out_splits);
  reset();
}

void TiledLinearImpl::reset() {
  weights.clear();
  biases.clear();
  const double bound = 1.0 / std::sqrt(static_cast<double>(options_.in_features));
  for (int64_t o = 0; o < options_.out_splits; ++o) {
    for (int64_t i = 0; i < options_.in_splits; ++i) {
      weights.push_back(
          register_parameter(fmt::format("weight_{}_{}", o, i),
                             uniform_values({out_part(o).size, in_part(i).size}, bound)));
    }
  }
  for (int64_t o = 0; options_.bias && o < options_.out_splits; ++o) {
    biases.push_back(register_parameter(fmt::format("bias_{}", o),
                                        at::empty({out_part(o).size}).uniform_(-bound, bound)));
  }
  if (low_rank_) attach(low_rank_->options());
}

void TiledLinearImpl::attach(LowRankOptions options) {
  low_rank_.emplace(*this, options_.in_features, options_.out_features, options,
                    weights.front().options().requires_grad(false));
}

void TiledLinearImpl::adapt(const LowRankOptions& options) {
  if (low_rank_) throw ConfigError("A TiledLinear was given LoRA a second time.");
  if (options.magnitude)
    throw ConfigError("A TiledLinear has no magnitudes (DoRA): a tile does not have whole rows.");
  attach(options);
}

std::vector<AdaptedWeight> TiledLinearImpl::adapted_weights() const {
  std::vector<AdaptedWeight> all;
  for (int64_t o = 0; o < options_.out_splits; ++o) {
    for (int64_t i = 0; i < options_.in_splits; ++i)
      all.push_back({fmt::format("weight_{}_{}", o, i), out_part(o).begin, in_part(i).begin});
  }
  return all;
}

TiledLinearImpl::Part TiledLinearImpl::in_part(int64_t index) const {
  const int64_t whole = options_.in_features / options_.in_splits;
  const int64_t larger = options_.in_features % options_.in_splits;
  return {index * whole + std::min(index, larger), whole + (index < larger ? 1 : 0)};
}

TiledLinearImpl::Part TiledLinearImpl::out_part(int64_t index) const {
  const int64_t whole = options_.out_features / options_.out_splits;
  const int64_t larger = options_.out_features % options_.out_splits;
  return {index * whole + std::min(index, larger), whole + (index < larger ? 1 : 0)};
}

const at::Tensor& TiledLinearImpl::tile(int64_t out, int64_t in) const {
  return weights[static_cast<size_t>(out * options_.in_splits + in)];
}

at::Tensor TiledLinearImpl::forward(const at::Tensor& x) {
  if (x.dim() < 1 || x.size(-1) != options_.in_features) {
    throw ConfigError(fmt::format("A TiledLinear of {} input features was given ({}).",
                                  options_.in_features, fmt::join(x.sizes(), ", ")));
  }
  std::vector<at::Tensor> outputs(static_cast<size_t>(options_.out_splits));
  for (int64_t i = 0; i < options_.in_splits; ++i) {
    // Once for all tiles that read it; backward keeps it too.
    const auto part =
        options_.in_splits == 1 ? x : x.narrow(-1, in_part(i).begin, in_part(i).size).contiguous();
    for (int64_t o = 0; o < options_.out_splits; ++o) {
      auto& output = outputs[static_cast<size_t>(o)];
      const auto bias = i == 0 && options_.bias ? biases[static_cast<size_t>(o)] : at::Tensor();
      const auto sum = linear(part, tile(o, i), bias);
      output = output.defined() ? output + sum : sum;
    }
  }
  const auto y = outputs.size() == 1 ? outputs.front() : at::cat(outputs, -1);
  return low_rank_ ? low_rank_->add_to(y, x, is_training()) : y;
}

void TiledLinearImpl::load(const at::Tensor& weight, const at::Tensor& bias) {
  const std::vector<int64_t> sizes{options_.out_features, options_.in_features};
  if (!weight.defined() || weight.sizes() != at::IntArrayRef(sizes) ||
      bias.defined() != options_.bias ||
      (bias.defined() && bias.sizes() != at::IntArrayRef(sizes).slice(0, 1))) {
    const auto shape = [](const at::Tensor& tensor) {
      return tensor.defined() ? fmt::format("({})", fmt::join(tensor.sizes(), ", ")) : "none";
    };
    throw ConfigError(fmt::format(
        "A TiledLinear of {} to {} features with{} bias cannot hold a weight {} and a bias {}.",
        options_.in_features, options_.out_features, options_.bias ? "" : "out", shape(weight),
        shape(bias)));
  }
  const at::NoGradGuard no_grad;
  for (int64_t o = 0; o < options_.out_splits; ++o) {
    const auto rows = weight.narrow(0, out_part(o).begin, out_part(o).size);
    for (int64_t i = 0; i < options_.in_splits; ++i) {
      if (has_absent_values(weight)) {
        tile(o, i).set_data(absent_values(tile(o, i).sizes(), weight.scalar_type()));
      } else {
        tile(o, i).copy_(rows.narrow(1, in_part(i).begin, in_part(i).size));
      }
    }
    if (options_.bias)
      biases[static_cast<size_t>(o)].copy_(bias.narrow(0, out_part(o).begin, out_part(o).size));
  }
}

at::Tensor TiledLinearImpl::full_weight() const {
  const at::NoGradGuard no_grad;
  const auto options =
      at::TensorOptions().dtype(weights.front().scalar_type()).device(weights.front().device());
  auto full = at::empty({options_.out_features, options_.in_features}, options);
  for (int64_t o = 0; o < options_.out_splits; ++o) {
    const auto rows = full.narrow(0, out_part(o).begin, out_part(o).size);
    for (int64_t i = 0; i < options_.in_splits; ++i)
      rows.narrow(1, in_part(i).begin, in_part(i).size).copy_(tile(o, i));
  }
  return full;
}

at::Tensor TiledLinearImpl::full_bias() const {
  if (!options_.bias) return {};
  const at::NoGradGuard no_grad;
  auto full = at::empty(
      {options_.out_features},
      at::TensorOptions().dtype(biases.front().scalar_type()).device(biases.front().device()));
  for (int64_t o = 0; o < options_.out_splits; ++o)
    full.narrow(0, out_part(o).begin, out_part(o).size).copy_(biases[static_cast<size_t>(o)]);
  return full;
}

// --- Replacing ---

TiledLinearOptions tiling_of(int64_t in_features, int64_t out_features, bool bias,
                             int64_t max_elements) {
  const int64_t rows = std::max<int64_t>(1, max_elements / in_features);
  return {.in_features = in_features,
          .out_features = out_features,
          .in_splits = at::ceil_div(in_features, std::min(in_features, max_elements)),
          .out_splits = at::ceil_div(out_features, rows),
          .bias = bias};
}

namespace {

bool too_large(const nn::LinearImpl* layer, int64_t max_elements) {
  return layer != nullptr && layer->weight.numel() > max_elements;
}

// A layer that splits itself.
struct Splitting {
  Tileable* layer;
  std::string path;
};

void find_places(nn::Module& module, const std::string& path, int64_t max_elements,
                 std::set<const nn::Module*>& visited, std::vector<LinearPlace>& places,
                 std::vector<Splitting>& splitting) {
  if (!visited.insert(&module).second) return;
  if (auto* layer = dynamic_cast<Tileable*>(&module)) splitting.push_back({layer, path});
  for (const auto& child : module.named_children()) {
    auto child_path = path.empty() ? child.key() : path + "." + child.key();
    auto* layer = dynamic_cast<nn::LinearImpl*>(child.value().get());
    if (too_large(layer, max_elements)) {
      places.push_back({&module, child.key(), std::move(child_path), layer});
    } else {
      find_places(*child.value(), child_path, max_elements, visited, places, splitting);
    }
  }
}

std::shared_ptr<TiledLinearImpl> tiled(const nn::LinearImpl& layer, int64_t max_elements) {
  auto result = std::make_shared<TiledLinearImpl>(
      tiling_of(layer.weight.size(1), layer.weight.size(0), layer.bias.defined(), max_elements));
  result->to(layer.weight.device(), layer.weight.scalar_type());
  result->load(layer.weight, layer.bias);
  for (auto& weight : result->weights) weight.set_requires_grad(layer.weight.requires_grad());
  for (auto& bias : result->biases) bias.set_requires_grad(layer.bias.requires_grad());
  result->train(layer.is_training());
  return result;
}

}  // namespace

std::vector<std::string> tile_linears(torch::nn::Module& root, int64_t max_elements) {
  if (max_elements == 0) return {};
  if (max_elements < 0) {
    throw ConfigError(
        fmt::format("tile_linears was given tiles of {} elements; they have at least 1, and 0 "
                    "means no tiles.",
                    max_elements));
  }
  if (too_large(dynamic_cast<nn::LinearImpl*>(&root), max_elements)) {
    throw ConfigError(
        "tile_linears was given a linear layer, which has no parent in which to replace it. Make "
        "it a zero::TiledLinear.");
  }
  std::vector<LinearPlace> places;
  std::vector<Splitting> splitting;
  std::set<const nn::Module*> visited;
  find_places(root, "", max_elements, visited, places, splitting);
  check_replaceable(places, "tiled", "make it a zero::TiledLinear");
  std::vector<std::string> names;
  for (const auto& [layer, path] : splitting) {
    if (layer->tile(max_elements)) names.push_back(path);
  }
  replace_linears(places, [&](const nn::LinearImpl& layer) { return tiled(layer, max_elements); });
  for (const auto& place : places) names.push_back(place.path);
  return names;
}

}  // namespace zero
