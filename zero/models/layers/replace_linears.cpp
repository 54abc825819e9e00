#include "zero/models/layers/replace_linears.h"

#include <fmt/format.h>

#include "zero/base/error.h"

namespace zero {

void check_replaceable(const std::vector<LinearPlace>& places, std::string_view done,
                       std::string_view instead) {
  std::unordered_map<torch::nn::LinearImpl*, int64_t> holders;
  for (const auto& place : places) {
    const bool in_sequence = dynamic_cast<torch::nn::SequentialImpl*>(place.parent) != nullptr;
    holders[place.layer] += in_sequence ? 2 : 1;
  }
  for (const auto& place : places) {
    // One reference is that of shared_from_this.
    if (place.layer->shared_from_this().use_count() - 1 > holders[place.layer]) {
      throw ConfigError(fmt::format(
          "The linear layer '{}' cannot be {}: besides its parent's list of children something "
          "else holds it (a member as `torch::nn::Linear fc`, a ModuleList, a variable), and would "
          "go on to use the layer as it is. Put it into a torch::nn::Sequential, or {} where it is "
          "made.",
          place.path, done, instead));
    }
    // This replaces the layer's member, and its entry in the list of parameters.
    if (place.layer->weight.use_count() > 2) {
      throw ConfigError(fmt::format(
          "The linear layer '{}' cannot be {}: its weight is shared with another module, an "
          "Engine or a graph. Do it before the first forward and before the Engine is constructed; "
          "a layer with a shared weight stays as it is.",
          place.path, done));
    }
  }
}

}  // namespace zero
