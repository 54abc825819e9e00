// Recomputation (activation checkpointing): a function keeps its inputs alone for backward, and
// runs again there.
//
// Chen et al. 2016 (1604.06174); ZeRO-R (1910.02054, section 6.1). A transformer whose blocks are
// recomputed holds one hidden state a block and the activations of one block, for a third more
// compute.
//
// Note [Recomputation]
// The first run records no graph. In backward the function runs once more, on the saved inputs and
// with gradients, and a backward pass inside the one under way goes through it: parameters are used
// by the function and named nowhere, so their gradients arrive at their accumulators from there.
// The second run starts from the random state of the first and casts as it did (autocast, whose
// cache is off in both runs: what backward put there would outlive the weights' next update). So
// losses and gradients are those without recomputation to the bit, but for the order of
// sums where a parameter or an input is used in several places.
//
// `function` must keep to three rules. It computes the same in both runs (a model's training mode,
// and what it captures, stay as they are until backward); it changes no input in place; what it
// captures are parameters, or tensors without a gradient: activations are inputs. Buffers that it
// updates, as batch norm's statistics, are updated in both runs.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace zero {

class ActivationStore;  // activation_store.h: in one buffer, or in files

struct RecomputeOptions {
  /// The store of inputs that are intermediate results (dense CPU tensors with a gradient that
  /// are no parameters); others stay where they are, as they outlive backward anyway. Null: all
  /// stay where they are.
  std::shared_ptr<ActivationStore> store{};
  /// From which `function` draws random numbers; empty: LibTorch's default generators of the CPU
  /// and of the devices where inputs lie.
  std::vector<at::Generator> generators{};
};

/// Says which of a model's layers are recomputed in backward.
struct RecomputeSettings {
  int64_t every = 0;  ///< the first of every so many, in training; 0: none
  RecomputeOptions options{};
};

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Returns function(inputs), whose intermediate results are computed again in backward instead of
/// being kept. Calls nest. Without gradients (NoGradGuard, InferenceMode) it is function(inputs).
/// Every floating-point output is taken to need a gradient, except an input that is returned as it
/// is. Inputs and outputs may be undefined tensors.
///
/// Throws Error where `function` changes an input in place. Backward throws Error where an input
/// was changed since, where `function` returns other shapes than the first time, in a second
/// backward pass without retain_graph in the first, for second derivatives (create_graph), and
/// where gradients of given inputs alone are asked for (torch::autograd::grad).
std::vector<at::Tensor> recompute(TensorFunction function, std::vector<at::Tensor> inputs,
                                  RecomputeOptions options = {});

/// Does the same for one input and one output.
at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> function, at::Tensor input,
                     RecomputeOptions options = {});

}  // namespace zero
