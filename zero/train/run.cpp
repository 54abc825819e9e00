#include "zero/train/run.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/job.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/models/lora/quantised_base.h"
#include "zero/models/recompute/activation_store.h"
#include "zero/store/build_on_disk.h"
#include "zero/train/adapter_files.h"
#include "zero/train/make_task.h"
#include "zero/train/monitors.h"
#include "zero/train/parts.h"
#include "zero/train/same_run.h"
#include "zero/train/tuning.h"
#include "zero/train/weights.h"

namespace zero::train {
namespace {

std::shared_ptr<ActivationStore> activation_store(const ActivationCheckpointing& chosen,
                                                  const Config& config,
                                                  std::shared_ptr<Timeline> timeline) {
  if (!chosen.every && !config.layer_major_accumulation) return nullptr;
  if (chosen.nvme) {
    return std::make_shared<DiskActivations>(
        DiskActivationOptions{.folder = chosen.nvme_path,
                              .file = {.block_bytes = config.aio.block_size,
                                       .queue_depth = static_cast<int>(config.aio.queue_depth),
                                       .uring = config.aio.use_io_uring,
                                       .timeline = std::move(timeline)}});
  }
  if (chosen.contiguous_memory_optimization) return std::make_shared<ContiguousActivations>();
  return nullptr;
}

/// Returns whether the weights come from files: published ones, or a checkpoint.
bool values_follow(const Options& options) { return !options.from.empty() || options.resume; }

/// Builds the model, and the adapter that is trained in it, if any.
std::pair<std::unique_ptr<LanguageModel>, std::optional<Lora>> build_model(const Settings& settings,
                                                                           const Dataset& data,
                                                                           comm::Group& group) {
  const auto& config = settings.engine;
  const auto& options = settings.program;
  const auto sizes = model_config(options, data);
  const auto built = count_parameters(options, *sizes);
  const auto counts = built.by_memory(config.parameter_bytes());
  const int64_t parameters = counts.all;
  check_budget(config, parameters, group.size(), counts.frozen);
  // The model is built on disk if its parameters will live there, or if it does not fit in memory
  // as a whole.
  // A model whose weights come from files takes no memory before they are read.
  const bool without_values = values_follow(options);
  const double whole = bytes_to_build(built.all, group);
  const bool on_disk =
      !without_values && (config.offload_param.device == OffloadDevice::nvme ||
                          (!config.nvme_folders().empty() &&
                           whole > static_cast<double>(available_memory().available)));
  check_fits(parameters, config, group, on_disk || without_values, counts.frozen);
  std::optional<WithoutValues> no_values;
  if (without_values) no_values.emplace();
  std::optional<BuildOnDisk> scope;
  if (on_disk) scope.emplace(config.nvme_folders().front());
  // Every rank draws the same weights. Ranks that are threads share LibTorch's generator, so that
  // one after another draws.
  static std::mutex drawing;
  const std::scoped_lock alone(drawing);
  at::manual_seed(static_cast<uint64_t>(options.seed));
  auto model = sizes->build();
  tile_linears(model->module(), settings.model.tile_elements.value_or(0));
  auto lora = choose_trained(*model, options);
  return {std::move(model), std::move(lora)};
}

/// Makes the groups: weight decay acts on matrices alone, and not on biases and norms, unless
/// `decay_all`.
std::vector<ParameterGroup> parameter_groups(const torch::nn::Module& model, const Config& config,
                                             bool decay_all) {
  const Optimizer optimizer = config.optimizer.value_or(Optimizer(kDefaultOptimizer));
  const ParameterGroup rest{.optimizer = optimizer, .rest = true};
  if (decay_all) return {rest};
  ParameterGroup vectors{{}, optim::without_decay(optimizer)};
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.value().dim() < 2) vectors.names.push_back(parameter.key());
  }
  return {rest, vectors};
}

std::string describe_optimizer(const torch::nn::Module& model, const Optimizer& optimizer,
                               bool decay_all) {
  std::string text(optim::name(optimizer));
  const double decay = std::visit([](const auto& o) { return o.weight_decay; }, optimizer);
  if (decay == 0) return text + ", no weight decay";
  auto parameters = model.parameters();
  std::erase_if(parameters, [](const auto& p) { return !p.requires_grad(); });
  const auto vectors = std::count_if(parameters.begin(), parameters.end(),
                                     [](const auto& p) { return p.dim() < 2; });
  const auto all = static_cast<int64_t>(parameters.size());
  if (decay_all) return fmt::format("{}, weight decay {} of all {} parameters", text, decay, all);
  return fmt::format("{}, weight decay {} of {} matrices, none of {} biases and norms", text, decay,
                     all - vectors, vectors);
}

/// Meets the copies in memory. The run goes on from one if this job has made it in an earlier
/// attempt, and no checkpoint on disk is newer. Collective.
void open_copies(Run& run) {
  auto& program = run.settings.settings.program;
  if (!program.memory_copies) return;
  auto& group = *run.group;
  comm::agree<ConfigError>(group, "Looking for copies in memory",
                           [&] { (void)memory_folder(program); });
  run.copies = std::make_unique<MemoryCopies>(run.group, memory_folder(program));
  auto found = run.copies->newest(&run.copy_faults);
  int64_t needed = 0;  // a copy of this step or a later one is taken
  if (group.rank() == 0) {
    const bool own = is_started_again(run.folder, comm::launched_jobs());
    needed = own ? run.folder.last_checkpoint().value_or(0) : INT64_MAX;
  }
  needed = comm::gather_records(group, needed, "checkpoint").front();
  if (needed == INT64_MAX) {
    run.copies->clear();  // they are another run's
    run.copy_faults.clear();
    return;
  }
  if (!found || found->step < needed) return;
  run.copy_faults = found->faults;
  run.copy = std::move(found);
  program.resume = true;
  program.resume_from = "auto";
  program.overwrite = false;
}

/// Opens the run's folder on rank 0, and makes the monitors. Collective.
void open_folder(Run& run, std::vector<std::unique_ptr<Monitor>> more) {
  const auto& options = run.options;
  comm::agree_on_rank_zero(*run.group, "Opening the run folder", [&] {
    // The checkpoint need not be in the folder.
    run.folder.check(options.overwrite || run.copy, continues(options) && !run.copy);
    check_monitors(options);
    check_profile_file(options);
    check_profile_step(options,
                       run.copy ? run.copy->step
                       : options.resume
                           ? resume_point(find_checkpoint(options), run.settings).progress.step
                           : 0);
    run.folder.make();
    probe_profile(options);
    for (auto& monitor : more) run.reports.add(std::move(monitor));
    run.reports.add(console_monitor(options.log_every));
    run.reports.add(jsonl_monitor(run.folder.log(), continues(options)));
    for (auto& monitor : make_monitors(options)) run.reports.add(std::move(monitor));
  });
  if (run.group->topology().hosts > 1 && options.save_every) check_shared(*run.group, run.folder);
}

/// Returns the settings with the tiers that the memory budget chooses, and the reason.
std::pair<Settings, std::string> with_tiers(Settings settings, const Dataset& data,
                                            comm::Group& group) {
  auto size = step_size(settings, *model_config(settings.program, data), group.size());
  size.available = memory_of_rank(group);
  auto tiers = choose_tiers(settings.engine, size);
  settings.engine = std::move(tiers.config);
  return {std::move(settings), std::move(tiers.reason)};
}

/// Returns the rate of each parameter group over that of the configuration's optimizer.
std::vector<double> rate_factors_of(const Engine& engine) {
  const double lr = optim::lr(engine.config().optimizer.value_or(Optimizer(kDefaultOptimizer)));
  std::vector<double> factors;
  for (size_t i = 0; i < engine.group_count(); ++i) {
    const double rate = engine.lr(i);
    factors.push_back(rate == lr || lr == 0 ? 1 : rate / lr);
  }
  return factors;
}

/// Reads the weights that the run begins with, and its adapter's. Collective.
void begin_weights(Run& run) {
  const auto& options = run.options;
  if (!options.from.empty())
    run.weights_report = load_weights(*run.engine, *run.model, run.lora, options.from, true);
  if (run.lora && options.lora.adapter.empty())
    begin_magnitudes(*run.engine, *run.lora, quantised_weights(run.model->module()));
  if (options.lora.adapter.empty()) return;
  load_adapter(*run.engine, *run.lora, options.lora.adapter);
  run.weights_report +=
      fmt::format("{}adapter of {}", run.weights_report.empty() ? "" : ", ", options.lora.adapter);
}

}  // namespace

Run::Run(const Settings& given, std::shared_ptr<comm::Group> ranks,
         std::vector<std::unique_ptr<Monitor>> more)
    : settings{completed(given), "", 1},
      options(settings.settings.program),
      group(std::move(ranks)),
      folder(options.out),
      data(open_data(options)),
      schedule(schedule_of(settings.settings)) {
  const auto sizes = model_config(options, data);
  settings.model = sizes->to_json();
  settings.ranks = group->size();
  check_same_run(*group, settings, data);
  if (options.threads) at::set_num_threads(static_cast<int>(*options.threads));
  auto tokens = task_data(options, data, *sizes, group->rank(), group->size());
  open_copies(*this);
  open_folder(*this, std::move(more));

  auto [chosen, reason] = with_tiers(settings.settings, data, *group);
  tiers_reason = std::move(reason);
  const auto& config = chosen.engine;
  const auto& recompute = chosen.model.activation_checkpointing;
  std::tie(model, lora) = build_model(chosen, data, *group);
  activations = activation_store(recompute, config, group->accounts().timeline);
  model->recompute({.every = recompute.every.value_or(0), .options = {.store = activations}});
  if (!config.fp32_modules.empty()) {
    throw ConfigError(
        "fp32_modules is for programs that cast what goes into such modules (libzero.shard does it "
        "in Python); the models of `zero train` compute in one dtype. Leave it out.");
  }
  auto tensors = named_tensors(model->module());
  tensors.values_follow = values_follow(options);
  engine.emplace(std::move(tensors), parameter_groups(model->module(), config, options.decay_all),
                 config, group);
  if (!options.resume) begin_weights(*this);
  rate_factors = rate_factors_of(*engine);
  task = make_task(*model, std::move(tokens), options, group->rank(), group->size(),
                   group->size() * micro_batches());
}

RunInfo Run::describe(int64_t first_step, const std::vector<std::string>& changes) const {
  const auto& config = engine->config();
  const auto& sizes = model->config();
  RunInfo run;
  run.model_name = model_name(options);
  run.weights = weights_report;
  if (const auto trained = describe_trained(model->module(), lora); !trained.empty())
    run.weights +=
        fmt::format("{}; {}", run.weights.empty() ? "random initial weights" : "", trained);
  const auto counts = count_parameters(model->module());
  run.parameters = engine->parameter_count() + counts.packed - counts.packed_bytes;
  run.model_description = sizes.description();
  run.vocabulary = sizes.vocab_size();
  run.dtype = config.fp16 ? "fp16" : config.bf16 ? "bf16" : "fp32";
  if (config.autocast.enabled)
    run.dtype += config.scales_loss() ? ", autocast fp16" : ", autocast bf16";
  run.stage = config.stage;
  run.ranks = group->size();
  run.threads = at::get_num_threads();
  run.micro_batch = micro_batch_size();
  run.sequence = options.seq;
  run.accumulate = config.gradient_accumulation_steps;
  run.steps = options.steps;
  run.first_step = first_step;
  run.first_sample = task->position().sample;
  run.changes = changes;
  run.tiers = tiers_reason;
  run.link = group->link_speed();
  run.optimizer =
      describe_optimizer(model->module(), *settings.settings.engine.optimizer, options.decay_all);
  run.data = names_of(options);
  run.train_tokens = data.train.size();
  run.validation_tokens = data.validation.size();
  using Json = nlohmann::ordered_json;
  auto in_force = settings.settings;
  in_force.engine = config;  // with the tiers that a budget chose
  auto engine_json = Json::parse(in_force.dump());
  auto train = engine_json.at("train");
  engine_json.erase("train");
  run.config_json = Json{{"engine", std::move(engine_json)},
                         {"train", std::move(train)},
                         {"model", Json::parse(sizes.to_json())}}
                        .dump();
  return run;
}

}  // namespace zero::train
