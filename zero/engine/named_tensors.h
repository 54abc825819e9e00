// The parameters and buffers that an engine takes from a model, by name, from any kind of module.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/base/error.h"

namespace zero {

struct NamedTensors {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  /// Lists the parameters as they are now, so that new ones are found; lists nothing once the
  /// module is gone. Null if that cannot be known (a module that was given by reference).
  std::function<NamedTensors()> again = {};
  /// Called in the handler of an exception that leaves through LibTorch (an operator on a sharded
  /// parameter, a backward pass). It may throw another exception in its place, which the program's
  /// language knows. Null: the exception leaves unchanged.
  std::function<void()> rethrow = {};
  /// Parameters without memory (of a model built in a WithoutValues scope) are taken: the engine
  /// makes their shards, and refuses to train, to read parameters and to save before
  /// `load_pretrained`, `Engine::load` or another function has filled them. At stage 3 an operator
  /// on one throws too; at the others it would compute with zeros. False: such a parameter is
  /// refused.
  bool values_follow = false;
};

/// Returns the parameters and buffers of a torch::nn::Module (object, pointer or holder) or of a
/// TorchScript module. A template, so that this header needs neither's headers. Throws ConfigError
/// for a null pointer or an empty holder.
template <class Model>
NamedTensors named_tensors(const Model& model) {
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
  const auto list = [collect](const auto& module) -> NamedTensors {
    return {collect(module.named_parameters()), {}};
  };
  const auto again = [list](const auto& shared) -> std::function<NamedTensors()> {
    return [list, weak = std::weak_ptr(shared)] {
      const auto module = weak.lock();
      return module ? list(*module) : NamedTensors{};
    };
  };
  NamedTensors tensors;
  const auto take = [&](const auto& module) {
    tensors = list(module);
    tensors.buffers = collect(module.named_buffers());
  };
  if constexpr (requires { model->named_parameters(); }) {
    if (!model) {
      throw ConfigError(
          "The model is null: a pointer to no module, or an empty holder. Construct the module "
          "before the Engine.");
    }
    take(*model);
    if constexpr (requires { model.ptr(); }) {
      tensors.again = again(model.ptr());  // a holder
    } else if constexpr (requires { std::weak_ptr(model); }) {
      tensors.again = again(model);
    }
  } else {
    take(model);
    // A TorchScript module is a handle.
    if constexpr (requires { model._ivalue(); })
      tensors.again = [list, model] { return list(model); };
  }
  return tensors;
}

template <class Model>
concept ModelLike = requires(const Model& model) {
  named_tensors(model);
}
&&!std::is_same_v<Model, NamedTensors>;

}  // namespace zero
