// The models and data of the parity tests: small, with sizes that no world size divides.
#pragma once

#include <torch/script.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/engine/named_tensors.h"

namespace zero::parity {

/// A model as the tests see it: its tensors, and the loss of one micro-batch.
struct Subject {
  NamedTensors tensors;
  std::function<at::Tensor(int rank, int64_t micro_batch)> loss;
  std::shared_ptr<void> keep;  ///< the model itself
};

/// Makes the model anew; the caller has seeded the generator, so that it is always the same one.
using Recipe = std::function<Subject(at::ScalarType dtype)>;

struct NamedRecipe {
  std::string name;
  Recipe make;
};

/// GPT-2 with tied embeddings and dropout 0.1, sequences of 17, 13 wide heads.
Recipe gpt2();
/// A Llama, an LSTM, a convolution with batch norm, a mixture of experts of which each rank uses
/// others at each step, a network whose layers share one weight, and a TorchScript module.
std::vector<NamedRecipe> other_models();

/// Deterministic data, different for every rank and micro-batch, independent of the random
/// generator.
at::Tensor values(at::IntArrayRef sizes, int rank, int64_t micro_batch);
at::Tensor tokens(at::IntArrayRef sizes, int64_t vocabulary, int rank, int64_t micro_batch);

}  // namespace zero::parity
