#include "zero/train/planned_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/train/make_task.h"
#include "zero/train/parts.h"
#include "zero/train/tuning.h"

namespace zero::train {
namespace {

/// Returns the tracer of the run's model.
plan::Tracer tracer(const Settings& settings, std::shared_ptr<LanguageModelConfig> sizes) {
  return [settings, sizes = std::move(sizes)](int64_t batch, int64_t recompute,
                                              const plan::TraceOptions& options) {
    plan::Tracing tracing(options);
    const auto model = sizes->build();
    tile_linears(model->module(), settings.model.tile_elements.value_or(0));
    const auto lora = choose_trained(*model, settings.program);
    model->recompute({.every = recompute});
    model->module().train();
    tracing.begin(named_tensors(model->module()));
    const auto tokens = at::zeros({batch, settings.program.seq}, at::TensorOptions(at::kLong));
    const auto targets = sizes->head() == Head::classes ? tokens.select(1, 0) : tokens;
    return tracing.run([&] { return model->loss(tokens, targets); });
  };
}

std::vector<std::string> left_out(const Settings& settings) {
  std::vector<std::string> notes;
  const auto& recompute = settings.model.activation_checkpointing;
  if (settings.engine.layer_major_accumulation)
    notes.emplace_back(
        "The plan has the micro-batches one after the other, and not layer by layer "
        "(layer_major_accumulation).");
  if (const int64_t after = settings.engine.offload_optimizer.delayed_update_after; after > 0)
    notes.push_back(fmt::format(
        "The plan is of steps with a delayed update, which come after the first {}.", after));
  if (recompute.nvme || recompute.contiguous_memory_optimization)
    notes.emplace_back("The plan keeps the inputs of recomputed layers where they are.");
  return notes;
}

}  // namespace

PlannedRun plan_run(const Settings& given, int ranks, int hosts,
                    const std::function<plan::Cluster(const Config&)>& machines,
                    const plan::OfHosts& together) {
  auto settings = completed(given);
  const auto& program = settings.program;
  const auto data = open_data(program);
  const std::shared_ptr<LanguageModelConfig> sizes = model_config(program, data);
  (void)task_data(program, data, *sizes, 0, ranks);
  (void)schedule_of(settings);
  auto size = step_size(settings, *sizes, ranks);
  auto available = static_cast<double>(available_memory().available);
  if (together) available = std::ranges::min(together(available));
  size.available = static_cast<int64_t>(available) / (ranks / hosts);
  auto tiers = choose_tiers(settings.engine, size);
  settings.engine = std::move(tiers.config);
  auto cluster = machines(settings.engine);
  if ((program.device == TrainingDevice::cpu) != cluster.device.cpu) {
    throw ConfigError(fmt::format(
        "The plan of a run is made for the machine that it is given on, and the speeds of {} are "
        "not known. Plan it by its figures: zero plan --device or --hardware.",
        cluster.device.cpu ? "its GPU" : "its processors"));
  }

  PlannedRun planned;
  planned.model = model_name(program);
  planned.notes = left_out(settings);
  if (!tiers.reason.empty()) planned.notes.push_back(tiers.reason);
  const auto& config = settings.engine;
  const int64_t micro_batch = *program.micro_batch_size;
  cluster.device.bf16 = !config.fp16;
  auto& question = planned.question;
  question = {.trace = tracer(settings, sizes),
              .global_batch = micro_batch * config.gradient_accumulation_steps * ranks,
              .sequence = program.seq,
              .bf16 = config.bf16 || config.fp16,
              .autocast = config.autocast_dtype(),
              .cluster = std::move(cluster),
              .hosts = together,
              .optimizer = *config.optimizer};
  const int64_t every = settings.model.activation_checkpointing.every.value_or(0);
  planned.run = plan::evaluate(question, config, micro_batch, every);
  planned.answer = plan::plan(question);
  return planned;
}

}  // namespace zero::train
