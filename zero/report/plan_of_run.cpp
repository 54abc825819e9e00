#include "zero/report/plan_of_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "zero/base/error.h"
#include "zero/config/settings.h"
#include "zero/engine/plan_units.h"
#include "zero/models/architectures.h"
#include "zero/planner/trace.h"

namespace zero::report {
namespace {

plan::RankMemory predict(const RunLog& log, const Settings& settings) {
  const auto sizes = language_model_config_from_json(log.model, log.path.string());
  const auto& program = settings.program;
  if (program.dropout) sizes->set_dropout(*program.dropout);
  const auto batch = program.micro_batch_size.value_or(1);
  const auto& config = settings.engine;
  const bool host = program.device != TrainingDevice::cuda;
  const auto trace = plan::trace(*sizes, batch, program.seq,
                                 settings.model.activation_checkpointing.every.value_or(0),
                                 plan::trace_options(config, host));
  return plan::predict_memory(trace, config, grid_of(config, 1, log.ranks));
}

}  // namespace

PlannedMemory planned_memory(const RunLog& log) {
  const auto no = [](std::string why) {
    return PlannedMemory{.memory = {}, .note = std::move(why)};
  };
  const bool hosts = std::ranges::any_of(
      log.traffic, [](const train::RankTraffic& rank) { return rank.hosts > 1; });
  if (hosts)
    return no("There is no plan beside it: the log does not say which ranks shared a host.");
  try {
    const auto settings = Settings::parse(log.configuration, log.ranks, log.path.string(),
                                          {.lenient = true, .warn = [](std::string_view) {}});
    const auto& program = settings.program;
    if (program.lora.on() || !program.freeze.empty() || settings.model.tile_elements)
      return no(
          "There is no plan beside it: this run changed its model (adapters, frozen parameters, "
          "tiles).");
    return {.memory = predict(log, settings), .note = {}};
  } catch (const std::exception& error) {
    return no(fmt::format("There is no plan beside it: {}", error.what()));
  }
}

}  // namespace zero::report
