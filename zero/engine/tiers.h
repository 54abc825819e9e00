// The choice of the states that go to disk, so that the rest fits into a memory budget.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "zero/base/device_limit.h"
#include "zero/config/config.h"
#include "zero/partition/formulas.h"

namespace zero {

/// Returns the number of ranks over which states are sharded: `config.mics_shard_size`, or all
/// `ranks`.
int shard_ranks(const Config& config, int ranks);

/// Bytes of one rank's states in memory by the papers' formula: without what `config` puts on disk,
/// and without padding. `config.optimizer`, or AdamW, is that of all parameters. Where the states
/// depend on which of them are matrices (Muon, Adafactor), the most that it may be or the least: to
/// refuse by.
enum class Bound : uint8_t { most, least };
partition::StateMemory predicted_states(const Config& config, int64_t parameters, int ranks,
                                        Bound bound);

/// The sizes of a training step that tiers are chosen by.
struct StepSize {
  int64_t parameters = 0;         ///< of the model
  int64_t largest_parameter = 0;  ///< its elements
  int64_t matrix_elements = 0;    ///< of parameters of two dimensions or more, as far as known
  int64_t matrix_sides = 0;       ///< rows and columns of these
  int ranks = 1;                  ///< over which states are sharded
  int64_t activations = 0;        ///< bytes of a rank, as far as they are known
  int64_t available = INT64_MAX;  ///< bytes that its host has left for a rank (memory_of_rank)
};

/// The most that the states may be, to choose by. What Adafactor keeps is known: of matrices their
/// rows and columns, whole on every rank.
partition::StateMemory predicted_states(const Config& config, const StepSize& size);
/// Returns the same for a device: without the states in host memory.
partition::StateMemory predicted_device_states(const Config& config, const StepSize& size);

struct TierChoice {
  Config config;
  std::string reason;  ///< a sentence for people; empty where there was nothing to choose
};

/// Moves as little as needed to disk for the states to fit beside what a step needs, if `config`
/// has a memory budget and names a folder for files (nvme_path) but puts nothing there. First come
/// the optimizer's states, or a part of them; then, from stage 2 on, the gradients; at stage 3 the
/// parameters, too; of the optimizer's states what then still fits stays. What comes to disk first
/// costs least: optimizer states move once a step, parameters with every gather. Results do not
/// depend on the choice. Where nothing fits, the most frugal choice is returned.
/// Where `config` itself puts the parameters on disk, without a budget: lowers
/// `max_live_parameters` to what the host can hold beside a step.
TierChoice choose_tiers(Config config, const StepSize& size);

/// Throws OutOfMemory where a rank's states, as predicted, exceed `config.memory_budget`. For use
/// before there is a model; with parts of states on disk, which are whole units, only the engine
/// knows.
void check_budget(const Config& config, int64_t parameters, int ranks);
/// Does the same with states that are known. `total_at` returns the bytes of a rank's states at
/// another stage.
void check_budget(const Config& config, int ranks, const partition::StateMemory& states,
                  const std::function<double(int stage)>& total_at);

/// Configurations that need less of a device than `config`, the cheapest first: higher stages cost
/// no traffic up to 2 and half as much again at 3, the host 2 bytes a parameter each way a step for
/// the optimizer, and 2 for each gather for parameters.
std::vector<CheaperChoice> cheaper_choices(const Config& config, const StepSize& size);

}  // namespace zero
