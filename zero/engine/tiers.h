// Chooses the states that go to disk, so that the rest fits into a memory budget.
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

/// Returns the bytes of one rank's states in memory by the papers' formula, without the states that
/// `config` puts on disk and without padding. All parameters are taken to have `config.optimizer`,
/// or AdamW. If the states depend on which parameters are matrices (Muon, Adafactor), `bound` asks
/// for the most or the least that they may be. A refusal takes the least. `frozen` of the
/// parameters have no gradients and no optimizer states.
enum class Bound : uint8_t { most, least };
partition::StateMemory predicted_states(const Config& config, int64_t parameters, int ranks,
                                        Bound bound, int64_t frozen = 0);

/// The sizes of a training step that tiers are chosen by.
struct StepSize {
  int64_t parameters = 0;         ///< elements of the model
  int64_t frozen = 0;             ///< those that are not trained
  int64_t largest_parameter = 0;  ///< its elements
  int64_t matrix_elements = 0;    ///< elements of parameters with two dimensions or more, if known
  int64_t matrix_sides = 0;       ///< rows and columns of these parameters
  int ranks = 1;                  ///< the number of ranks that shard states
  int64_t activations = 0;        ///< bytes of a rank, if known
  int64_t available = INT64_MAX;  ///< bytes that its host has left for a rank (memory_of_rank)
};

/// Returns the most that the states may be, to choose by. Adafactor's are known exactly: rows and
/// columns of matrices, whole on every rank.
partition::StateMemory predicted_states(const Config& config, const StepSize& size);
/// Returns the same for a device, without the states in host memory.
partition::StateMemory predicted_device_states(const Config& config, const StepSize& size);

struct TierChoice {
  Config config;
  std::string reason;  ///< a sentence for people; empty if there was nothing to choose
};

/// If `config` has a memory budget and names a folder for files (nvme_path) but puts nothing there:
/// moves as little to disk as needed for the states to fit beside the rest of a step. First it
/// moves the optimizer's states, or a part of them; then, from stage 2 on, the gradients; then, at
/// stage 3, the parameters. Optimizer states that still fit after that stay in memory. The order is
/// by cost: optimizer states move once a step, parameters with every gather. Results do not depend
/// on the choice. If nothing fits, returns the most frugal choice.
///
/// If `config` itself puts the parameters on disk and has no budget: lowers `max_live_parameters`
/// to the number that the host can hold beside a step.
TierChoice choose_tiers(Config config, const StepSize& size);

/// Throws OutOfMemory if a rank's states, as predicted, exceed `config.memory_budget`. It works
/// before there is a model. If parts of states are on disk, which are whole units, only the engine
/// knows.
void check_budget(const Config& config, int64_t parameters, int ranks, int64_t frozen = 0);
/// Does the same with states that are known. `total_at` returns the bytes of a rank's states at
/// another stage.
void check_budget(const Config& config, int ranks, const partition::StateMemory& states,
                  const std::function<double(int stage)>& total_at);

/// Returns configurations that need less of a device than `config`, the cheapest first. Stages up
/// to 2 cost no traffic, and stage 3 half as much again. The host costs 2 bytes a parameter each
/// way a step for the optimizer, and 2 for each gather for parameters.
std::vector<CheaperChoice> cheaper_choices(const Config& config, const StepSize& size);

}  // namespace zero
