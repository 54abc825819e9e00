// Estimates the memory of a rank's states before there is a plan, and before a model is built.
#pragma once

#include <cstdint>

#include "zero/config/config.h"
#include "zero/engine/model_shape.h"
#include "zero/partition/formulas.h"

namespace zero {

/// Returns the number of ranks over which states are sharded: `config.mics_shard_size`, or all
/// `ranks`.
int shard_ranks(const Config& config, int ranks);

/// Returns the bytes of one rank's states in memory by the papers' formula, without the states that
/// `config` puts on disk and without padding. All parameters are taken to have `config.optimizer`,
/// or AdamW. If the states depend on which parameters are matrices (Muon, Apollo, Adafactor),
/// `bound` asks for the most or the least that they may be. A refusal takes the least. `frozen` of
/// the parameters have no gradients and no optimizer states.
enum class Bound : uint8_t { most, least };
partition::StateMemory predicted_states(const Config& config, int64_t parameters, int ranks,
                                        Bound bound, int64_t frozen = 0);

/// The sizes of a training step that tiers are chosen by.
struct StepSize {
  int64_t parameters = 0;         ///< elements of the model
  int64_t frozen = 0;             ///< those that are not trained
  int64_t largest_parameter = 0;  ///< its elements
  int64_t matrix_elements = 0;    ///< elements of parameters with factored states, if known
  int64_t factored_numel = 0;     ///< elements of these states
  int ranks = 1;                  ///< the number of ranks that shard states
  int64_t activations = 0;        ///< bytes of a rank, if known
  int64_t available = INT64_MAX;  ///< bytes that its host has left for a rank (memory_of_rank)
};

/// Returns the most that the states may be, to choose by. Factored states are known if the matrices
/// are: Adafactor's exactly, and Apollo's as a rank's mean share. If they are not, Apollo's states
/// count as AdamW's.
partition::StateMemory predicted_states(const Config& config, const StepSize& size);
/// Returns the same for a device, without the states in host memory.
partition::StateMemory predicted_device_states(const Config& config, const StepSize& size);

/// Returns the sizes of a model's step, without activations. A packed weight counts as the elements
/// of `element_bytes` that take its bytes.
StepSize step_size(const ModelShape& model, int ranks, int64_t element_bytes);

}  // namespace zero
