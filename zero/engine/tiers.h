// Chooses the states that go to disk, so that the rest fits into a memory budget.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "zero/base/device_limit.h"
#include "zero/config/config.h"
#include "zero/engine/predicted_states.h"
#include "zero/partition/formulas.h"

namespace zero {

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
