#include "zero/models/lora/quantised_base.h"

#include <fmt/format.h>

#include <set>
#include <unordered_map>

#include "zero/base/error.h"
#include "zero/models/layers/projection.h"

namespace zero {
namespace {

/// Counts the modules that hold each parameter.
std::unordered_map<const c10::TensorImpl*, int64_t> holders_of(const torch::nn::Module& root) {
  std::unordered_map<const c10::TensorImpl*, int64_t> counts;
  std::set<const torch::nn::Module*> visited;
  const auto count = [&](const torch::nn::Module& module) {
    if (!visited.insert(&module).second) return;
    for (const auto& parameter : module.parameters(/*recurse=*/false))
      ++counts[parameter.unsafeGetTensorImpl()];
  };
  count(root);
  for (const auto& module : root.modules(/*include_self=*/false)) count(*module);
  return counts;
}

bool is_frozen(const at::Tensor& weight) { return weight.defined() && !weight.requires_grad(); }

}  // namespace

int64_t quantise_frozen(torch::nn::Module& root, BaseFormat format) {
  if (format == BaseFormat::as_they_are)
    throw ConfigError("The frozen weights were to be quantised to no format. Give nf4 or int8.");
  const auto holders = holders_of(root);
  std::set<ProjectionImpl*> layers;
  for (const auto& module : root.named_modules("", /*include_self=*/false)) {
    auto* layer = module.value()->as<ProjectionImpl>();
    if (layer == nullptr || layer->quantised()) continue;
    if (layer->tiles && is_frozen(layer->tiles->weights.front())) {
      throw ConfigError(fmt::format(
          "The linear layer '{}' is in tiles, which are not quantised. Leave the tiles out "
          "(--tile-elements), or the quantisation (--lora-quantize-base).",
          module.key()));
    }
    if (is_frozen(layer->weight) && holders.at(layer->weight.unsafeGetTensorImpl()) == 1)
      layers.insert(layer);
  }
  if (layers.empty()) {
    throw ConfigError(
        "The frozen weights of linear layers were to be quantised, and the model has none. Freeze "
        "them first (zero::add_lora, zero::freeze); a layer of your own is a zero::Projection.");
  }
  for (auto* layer : layers) layer->quantise(format);
  return static_cast<int64_t>(layers.size());
}

std::map<std::string, PackedMatrix> quantised_weights(const torch::nn::Module& root) {
  std::map<std::string, PackedMatrix> weights;
  for (const auto& module : root.named_modules("", /*include_self=*/false)) {
    const auto* layer = module.value()->as<ProjectionImpl>();
    if (layer == nullptr || !layer->quantised()) continue;
    const auto in = layer->in_features();
    const auto out = layer->out_features();
    weights[module.key() + ".weight"] = {
        layer->format(), layer->in_out() ? std::vector{in, out} : std::vector{out, in}};
  }
  return weights;
}

}  // namespace zero
