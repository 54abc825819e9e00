// What the engine takes from a model: its parameters and buffers by name, from any kind of module.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace zero {

struct NamedTensors {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
};

/// The parameters and buffers of a torch::nn::Module (object, pointer or holder) or of a
/// TorchScript module. A template, so that this header needs neither's headers.
template <class Model>
NamedTensors named_tensors(const Model& model) {
  const auto& module = [&]() -> const auto& {
    if constexpr (requires { model->named_parameters(); }) {
      return *model;
    } else {
      return model;
    }
  }
  ();
  const auto collect = [](auto&& list) {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& item : list) {
      if constexpr (requires { item.key(); }) {
        tensors.emplace_back(item.key(), item.value());  // torch::nn
      } else {
        tensors.emplace_back(item.name, item.value);  // TorchScript
      }
    }
    return tensors;
  };
  return {collect(module.named_parameters()), collect(module.named_buffers())};
}

template <class Model>
concept ModelLike = requires(const Model& model) {
  named_tensors(model);
}
&&!std::is_same_v<Model, NamedTensors>;

}  // namespace zero
