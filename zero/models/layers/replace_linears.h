// Replaces torch::nn::Linear layers in a tree of modules by other modules.
//
// The code that runs a layer must find the new one: a torch::nn::Sequential does, and code that
// looks a child up by its name. A layer that is held anywhere else (a member as `torch::nn::Linear
// fc`, a ModuleList, a variable) would go on to be used, so it is refused.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace zero {

/// A layer to be replaced, at one of the places that it has in the tree.
struct LinearPlace {
  torch::nn::Module* parent = nullptr;
  std::string name;  ///< in the parent
  std::string path;  ///< in the tree
  torch::nn::LinearImpl* layer = nullptr;
};

/// Throws ConfigError, which names a layer, where one cannot be replaced: something else holds it,
/// or its weight is shared. `done` says what is to become of it ("tiled"), and `instead` what to do
/// where the layer is made ("make it a zero::TiledLinear").
void check_replaceable(const std::vector<LinearPlace>& places, std::string_view done,
                       std::string_view instead);

/// Replaces the layers, which were checked. `make` returns a std::shared_ptr of the new module; a
/// layer with several places gets one.
template <class Make>
void replace_linears(const std::vector<LinearPlace>& places, const Make& make) {
  std::unordered_map<torch::nn::LinearImpl*, decltype(make(*places.front().layer))> made;
  for (const auto& place : places) {
    auto& replacement = made.try_emplace(place.layer).first->second;
    if (!replacement) replacement = make(*place.layer);
    if (auto* sequence = dynamic_cast<torch::nn::SequentialImpl*>(place.parent)) {
      for (auto& module : *sequence) {
        if (module.ptr().get() == place.layer) module = torch::nn::AnyModule(replacement);
      }
    }
    place.parent->replace_module(place.name, replacement);
  }
}

}  // namespace zero
