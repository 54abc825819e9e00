#include "zero/train/trainer.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/memory_limit.h"
#include "zero/base/not_finite.h"
#include "zero/checkpoint/file.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/data/tokenizer.h"
#include "zero/device/memory.h"
#include "zero/engine/tiers.h"
#include "zero/models/architectures.h"
#include "zero/models/language/generate.h"
#include "zero/models/layers/product_speed.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/models/recompute/activation_store.h"
#include "zero/store/build_on_disk.h"
#include "zero/train/evaluation.h"
#include "zero/train/layer_major.h"
#include "zero/train/monitors.h"
#include "zero/train/same_run.h"
#include "zero/train/stop.h"
#include "zero/train/weights.h"

namespace zero::train {
namespace {

using Clock = std::chrono::steady_clock;

/// Of the numbers that ranks exchange, those that are no losses.
constexpr size_t kOthers = 4;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// --- What the parts of a run are made from ---

int64_t micro_batch_of(const Options& options) {
  return options.micro_batch_size.value_or(kDefaultMicroBatch);
}

bool same_contents(const std::filesystem::path& a, const std::filesystem::path& b) {
  return read_file(a, fail<DataError>) == read_file(b, fail<DataError>);
}

/// Throws where a token of one is not known to mean what it means in the other, but for token files
/// that do not say what they are.
void check_same_tokens(const Options& options, const Dataset& training, const Dataset& validation) {
  const bool told = training.vocab_size > 0 && validation.vocab_size > 0;
  const bool same = training.by_bytes == validation.by_bytes &&
                    (training.by_bytes || !told ||
                     (training.vocab_size == validation.vocab_size &&
                      same_contents(training.tokenizer, validation.tokenizer)));
  if (same) return;
  const auto tokens_of = [](const Dataset& data) {
    if (data.by_bytes) return std::string("bytes");
    if (data.vocab_size == 0) return std::string("tokens of a vocabulary that it does not tell");
    return fmt::format("the {} tokens of {}", data.vocab_size, data.tokenizer.string());
  };
  throw DataError(
      fmt::format("The validation data {} holds {}, but {} is {}: a loss would say nothing. "
                  "Prepare both with the same --tokenizer.",
                  options.val_data, tokens_of(validation), options.data, tokens_of(training)));
}

Dataset open_data(const Options& options) {
  const bool validates = options.eval_tokens > 0;
  const bool splits = validates && options.val_data.empty();
  auto data = open_dataset(
      options.data, {.validation_fraction = splits ? SplitOptions{}.validation_fraction : 0.0});
  if (validates && !options.val_data.empty()) {
    const auto validation = open_dataset(options.val_data, {.validation_fraction = 0.0});
    check_same_tokens(options, data, validation);
    data.validation =
        std::filesystem::is_directory(options.val_data) ? validation.validation : validation.train;
  }
  return data;
}

/// The model's sizes: a published model keeps its vocabulary, so that its weights fit elsewhere;
/// another takes that of the data.
std::unique_ptr<LanguageModelConfig> model_config(const Options& options, const Dataset& data) {
  auto sizes = language_model_config(options.model);
  if (options.vocab_size) {
    sizes->set_vocab_size(*options.vocab_size);
  } else if (sizes->takes_vocabulary_of_data() && data.vocab_size > 0) {
    sizes->set_vocab_size(data.vocab_size);
  }
  if (options.dropout) sizes->set_dropout(*options.dropout);
  if (options.seq > sizes->context()) {
    throw ConfigError(
        fmt::format("The option 'seq' is {}, but the model {} takes at most {} tokens.",
                    options.seq, options.model, sizes->context()));
  }
  if (data.vocab_size > sizes->vocab_size()) {
    throw ConfigError(fmt::format(
        "The data {} has a vocabulary of {} tokens, but the model {} has {}. Set --vocab-size {}.",
        options.data, data.vocab_size, options.model, sizes->vocab_size(), data.vocab_size));
  }
  sizes->validate();
  return sizes;
}

LoaderOptions loader_options(const Options& options, int rank, int ranks, int64_t vocabulary) {
  return {.sequence = options.seq,
          .micro_batch = micro_batch_of(options),
          .rank = rank,
          .world_size = ranks,
          .seed = static_cast<uint64_t>(options.seed),
          .vocab_size = vocabulary};
}

/// What a step of this run needs.
StepSize step_size(const Settings& settings, const LanguageModelConfig& sizes, int ranks) {
  const auto& config = settings.engine;
  const auto& options = settings.program;
  const auto bytes =
      sizes.activation_bytes(micro_batch_of(options) * options.seq, config.parameter_bytes());
  // A recomputed layer keeps its input alone; one at a time has all.
  const auto& recompute = settings.model.activation_checkpointing;
  const int64_t every = config.layer_major_accumulation ? 1 : recompute.every.value_or(0);
  const int64_t again = every > 0 ? at::ceil_div(sizes.layers(), every) : 0;
  const int64_t kept =
      config.layer_major_accumulation ? again * config.gradient_accumulation_steps : again;
  const int64_t inputs =
      recompute.nvme ? std::min<int64_t>(kept, DiskActivationOptions{}.buffers) : kept;
  const int64_t whole = sizes.layers() - again + (again > 0 ? 1 : 0);
  int64_t matrix_elements = 0;
  int64_t matrix_sides = 0;
  for (const auto [rows, columns] : sizes.matrices()) {
    matrix_elements += rows * columns;
    matrix_sides += rows + columns;
  }
  return {.parameters = sizes.parameter_count(),
          .largest_parameter = sizes.largest_parameter(),
          .matrix_elements = matrix_elements,
          .matrix_sides = matrix_sides,
          .ranks = shard_ranks(config, ranks),
          .activations = whole * bytes.layer + inputs * bytes.layer_input + bytes.loss};
}

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

std::unique_ptr<LanguageModel> build_model(const Settings& settings, const Dataset& data,
                                           comm::Group& group) {
  const auto& config = settings.engine;
  const auto& options = settings.program;
  const auto sizes = model_config(options, data);
  const int64_t parameters = sizes->parameter_count();
  check_budget(config, parameters, group.size());
  // Where its parameters will live on disk, or where it does not fit in memory while it is whole.
  const double whole = bytes_to_build(parameters, group);
  const bool on_disk =
      config.offload_param.device == OffloadDevice::nvme ||
      (!config.nvme_folders().empty() && whole > static_cast<double>(available_memory().available));
  check_fits(parameters, config, group, on_disk);
  std::optional<BuildOnDisk> scope;
  if (on_disk) scope.emplace(config.nvme_folders().front());
  at::manual_seed(static_cast<uint64_t>(options.seed));  // every rank draws the same weights
  auto model = sizes->build();
  tile_linears(model->module(), settings.model.tile_elements.value_or(0));
  return model;
}

/// Weight decay acts on matrices alone, and not on biases and norms, unless `decay_all`.
std::vector<ParameterGroup> parameter_groups(const torch::nn::Module& model, const Config& config,
                                             bool decay_all) {
  const Optimizer optimizer = config.optimizer.value_or(Optimizer(kDefaultOptimizer));
  if (decay_all) return {ParameterGroup{{}, optimizer}};
  ParameterGroup vectors{{}, optim::without_decay(optimizer)};
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.value().dim() < 2) vectors.names.push_back(parameter.key());
  }
  return {ParameterGroup{{}, optimizer}, vectors};
}

std::string describe_optimizer(const torch::nn::Module& model, const Optimizer& optimizer,
                               bool decay_all) {
  std::string text(optim::name(optimizer));
  const double decay = std::visit([](const auto& o) { return o.weight_decay; }, optimizer);
  if (decay == 0) return text + ", no weight decay";
  const auto parameters = model.parameters();
  const auto vectors = std::count_if(parameters.begin(), parameters.end(),
                                     [](const auto& p) { return p.dim() < 2; });
  const auto all = static_cast<int64_t>(parameters.size());
  if (decay_all) return fmt::format("{}, weight decay {} of all {} parameters", text, decay, all);
  return fmt::format("{}, weight decay {} of {} matrices, none of {} biases and norms", text, decay,
                     all - vectors, vectors);
}

optim::Schedule schedule_of(const Settings& settings) {
  const auto& options = settings.program;
  const Optimizer optimizer = settings.engine.optimizer.value_or(Optimizer(kDefaultOptimizer));
  const double lr = optim::lr(optimizer);
  const int64_t warmup = options.warmup.value_or(std::min<int64_t>(200, options.steps / 10));
  const optim::RunLength run{.lr = lr, .steps = options.steps, .warmup_steps = warmup};
  if (!settings.scheduler) {
    return optim::complete(optim::WarmupDecay{.min_lr = options.min_lr.value_or(lr / 10),
                                              .warmup_steps = warmup,
                                              .decay = options.schedule,
                                              .decay_steps = options.decay_steps},
                           run);
  }
  auto schedule = optim::complete(*settings.scheduler, run);
  // As in DeepSpeed: an optimizer without betas keeps its momentum.
  auto* cycle = std::get_if<optim::DeepSpeedOneCycle>(&schedule);
  if (cycle != nullptr && !has_betas(optimizer)) cycle->cycle_momentum = false;
  return schedule;
}

/// The same layers, each of which casts by itself: the backward passes between them do not.
LayerSequence cast(LayerSequence model, std::optional<at::ScalarType> dtype,
                   c10::DeviceType device) {
  if (!dtype) return model;
  model.inputs = [inputs = std::move(model.inputs), dtype, device] {
    const Autocast casts(dtype, device);
    return inputs();
  };
  for (auto& layer : model.layers) {
    layer = [layer = std::move(layer), dtype, device](const std::vector<at::Tensor>& x) {
      const Autocast casts(dtype, device);
      return layer(x);
    };
  }
  model.loss = [loss = std::move(model.loss), dtype, device](const std::vector<at::Tensor>& x,
                                                             int64_t micro_batch) {
    const Autocast casts(dtype, device);
    return loss(x, micro_batch);
  };
  return model;
}

/// Dropout is drawn afresh for each step and rank, so that a resumed run draws what an
/// uninterrupted one would.
uint64_t dropout_seed(int64_t seed, int64_t step, int rank) {
  uint64_t x = static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15u +
               static_cast<uint64_t>(step) * 0xbf58476d1ce4e5b9u +
               static_cast<uint64_t>(rank) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x * 0xd6e8feb86659fd93u;
}

/// The settings with what a run has in place of what they leave open.
Settings completed(Settings settings) {
  settings.program.validate();
  settings.validate();
  settings.program.micro_batch_size = micro_batch_of(settings.program);
  if (!settings.engine.optimizer) settings.engine.optimizer = kDefaultOptimizer;
  return settings;
}

/// Throws ConfigError where no profile would be written in a run that has done `done` steps.
void check_profile(const Options& options, int64_t done) {
  if (options.profile.empty()) return;
  const std::filesystem::path file(options.profile);
  std::error_code ignored;
  const auto type = std::filesystem::symlink_status(file, ignored).type();
  if (type != std::filesystem::file_type::not_found &&
      type != std::filesystem::file_type::regular) {
    throw ConfigError(fmt::format(
        "The profile is to be written to {}, which is no regular file. Give another --profile "
        "FILE.",
        options.profile));
  }
  const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  const bool of_the_run =
      std::filesystem::absolute(folder).lexically_normal() ==
      std::filesystem::absolute(options.out).lexically_normal();  // may yet be made
  if (!of_the_run && !std::filesystem::is_directory(folder, ignored)) {
    throw ConfigError(fmt::format(
        "The profile is to be written to {}, but the folder {} is not there. Give another "
        "--profile FILE.",
        options.profile, folder.string()));
  }
  if (options.profile_step > options.steps - done) {
    throw ConfigError(fmt::format(
        "The profile is to be of step {} (train.profile_step), but the run has {}{}. Give a "
        "smaller --profile-step, or more --steps.",
        options.profile_step, options.steps - done, done > 0 ? " left" : ""));
  }
}

/// Throws ConfigError where the profile's file cannot be written; leaves what is there. To be
/// called once the run's folder is there.
void probe_profile(const Options& options) {
  if (options.profile.empty()) return;
  try {
    const OutputFile probe(options.profile, fail<ConfigError>);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{} Give another --profile FILE.", error.what()));
  }
}

RunSettings run_settings(const Settings& settings, const Dataset& data, int ranks) {
  return {settings, model_config(settings.program, data)->to_json(), ranks};
}

}  // namespace

bool has_betas(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& o) {
        return requires { o.beta1; };
      },
      optimizer);
}

void check_run(const Settings& given, int ranks) {
  const auto settings = completed(given);
  const auto& config = settings.engine;
  const auto& options = settings.program;
  const RunFolder folder(options.out);
  folder.check(options.overwrite, options.resume);
  check_monitors(options);
  const auto data = open_data(options);
  const auto model = model_config(options, data);
  (void)schedule_of(settings);
  TokenLoader loader(data.train, loader_options(options, 0, ranks, model->vocab_size()));
  int64_t done = 0;
  if (options.resume) {
    const auto progress = resume_point(folder, run_settings(settings, data, ranks)).progress;
    loader.restore(progress.loader);
    done = progress.step;
  }
  check_profile(options, done);
  if (options.eval_tokens > 0)
    (void)Validation(data.validation, options.seq, model->vocab_size(), options.eval_tokens);
  const auto size = step_size(settings, *model, ranks);
  check_budget(choose_tiers(config, size).config, size.parameters, ranks);
  folder.make();
  probe_profile(options);
  (void)make_monitors(options);  // their folders
}

Trainer::Trainer(const Settings& given, std::shared_ptr<comm::Group> group,
                 std::vector<std::unique_ptr<Monitor>> more)
    : settings_{completed(given), "", 1},
      options_(settings_.settings.program),
      group_(std::move(group)),
      folder_(options_.out),
      data_(open_data(options_)),
      schedule_(schedule_of(settings_.settings)),
      stragglers_(group_->size(),
                  group_->topology().hosts > 1 ? group_->topology().local_size : 0) {
  settings_ = run_settings(settings_.settings, data_, group_->size());
  check_same_run(*group_, settings_, data_);
  if (options_.threads) at::set_num_threads(static_cast<int>(*options_.threads));
  const auto vocabulary = model_config(options_, data_)->vocab_size();
  train_loader_.emplace(data_.train,
                        loader_options(options_, group_->rank(), group_->size(), vocabulary));
  if (options_.eval_tokens > 0)
    validation_.emplace(data_.validation, options_.seq, vocabulary, options_.eval_tokens);
  comm::agree_on_rank_zero(*group_, "Opening the run folder", [&] {
    folder_.check(options_.overwrite, options_.resume);
    check_monitors(options_);
    const int64_t done = options_.resume ? resume_point(folder_, settings_).progress.step : 0;
    check_profile(options_, done);
    folder_.make();
    probe_profile(options_);
    monitors_ = std::move(more);
    monitors_.push_back(console_monitor(options_.log_every));
    monitors_.push_back(jsonl_monitor(folder_.log(), options_.resume));
    for (auto& monitor : make_monitors(options_)) monitors_.push_back(std::move(monitor));
  });
  if (group_->topology().hosts > 1 && options_.save_every) check_shared(*group_, folder_);

  auto chosen = settings_.settings;
  auto size = step_size(chosen, *model_config(options_, data_), group_->size());
  size.available = memory_of_rank(*group_);
  auto tiers = choose_tiers(chosen.engine, size);
  chosen.engine = std::move(tiers.config);
  tiers_reason_ = std::move(tiers.reason);
  const auto& config = chosen.engine;
  const auto& recompute = chosen.model.activation_checkpointing;
  model_ = build_model(chosen, data_, *group_);
  activations_ = activation_store(recompute, config, group_->accounts().timeline);
  model_->recompute({.every = recompute.every.value_or(0), .options = {.store = activations_}});
  engine_.emplace(model_->module(), parameter_groups(model_->module(), config, options_.decay_all),
                  config, group_);
  const double lr = optim::lr(config.optimizer.value_or(Optimizer(kDefaultOptimizer)));
  for (size_t i = 0; i < engine_->group_count(); ++i) {
    const double rate = engine_->lr(i);
    rate_factors_.push_back(rate == lr || lr == 0 ? 1 : rate / lr);
  }
  traffic_.emplace(*engine_);
  losses_.resize(static_cast<size_t>(config.gradient_accumulation_steps));
  const auto numbers = static_cast<int64_t>(losses_.size() + kOthers);
  all_losses_.resize(losses_.size() * static_cast<size_t>(group_->size()));
  rank_times_.resize(static_cast<size_t>(group_->size()));
  exchange_mine_ = at::empty({numbers}, at::kFloat);
  exchange_all_ = at::empty({numbers * group_->size()}, at::kFloat);
  if (options_.resume) resume();
  if (options_.detect_anomaly) watch_.emplace(*engine_, named_tensors(model_->module()));
}

int Trainer::train() {
  const StopSignals signals;
  // What `signals_` points to, until this function is left.
  const struct Watch {
    const StopSignals*& watched;
    ~Watch() { watched = nullptr; }
  } watch{signals_};
  signals_ = &signals;
  // The group outlives this.
  const struct Measuring {
    const comm::Accounts& accounts;
    ~Measuring() {
      accounts.calls->stop();
      accounts.timeline->measure(false);
    }
  } measuring{group_->accounts()};
  report_run();
  start_measuring();
  measure_products();
  // The full model that was sharded is gone: its memory goes back, and the peaks are the steps'.
  HostAllocator::instance().trim();
  HostAllocator::instance().reset_peaks();
  reset_peak_memory(group_->device());
  const auto begin = Clock::now();
  while (step_ < options_.steps && stop_signal_ == 0) {
    const bool complete = profile_.has_value();  // once this step has ended
    const auto step = train_step();
    report([&](Monitor& monitor) { monitor.step(step); });
    if (complete) write_profile();
    if (step.rewound) {
      comm::agree_on_rank_zero(*group_, "Going back", [&] { folder_.cut_log(step_); });
      report([&](Monitor& monitor) { monitor.rewound(*step.rewound); });
      continue;
    }
    if (options_.eval_every && step_ % *options_.eval_every == 0 && step_ < options_.steps)
      report_validation();
    const bool last = step_ == options_.steps || stop_signal_ != 0;
    if (options_.save_every && (step_ % *options_.save_every == 0 || last)) save_checkpoint();
  }
  return finish(seconds_since(begin));
}

StepReport Trainer::train_step() {
  const bool profiled =
      !options_.profile.empty() && step_ + 1 == first_step_ + options_.profile_step - 1;
  if (profiled) profile_.emplace(*group_);
  auto& timeline = *group_->accounts().timeline;
  if (options_.wall_clock_breakdown) (void)timeline.take_breakdown();
  const auto begin = Clock::now();
  const double waited_before = group_->wait_ms();
  const double disk_before = engine_->disk().wait_ms;
  traffic_->begin_step();
  StepReport report;
  report.step = step_ + 1;
  // A step that was skipped, of fp16 or for a gradient that is not finite, is none of the schedule.
  report.lr = optim::rate(schedule_, engine_->steps() + 1);
  const auto betas = optim::betas(schedule_, engine_->steps() + 1);
  for (size_t i = 0; i < engine_->group_count(); ++i) {
    engine_->set_lr(report.lr * rate_factors_[i], i);
    if (betas) engine_->set_betas(betas->beta1, betas->beta2, i);
  }
  seed_dropout(report.step);
  step_data_ = train_loader_->state();

  const auto profiler = profiler_of(report.step);
  pass_micro_batches();
  if (profiler) profiler->stop();
  auto all = exchange(losses_, report.lr);
  if (options_.check_replicas > 0 && report.step % options_.check_replicas == 0) check_replicas();
  if (options_.group_norms) report.group_norms = engine_->group_norms();
  StepResult result;
  try {
    result = engine_->step(!all.leaves_out);
  } catch (const NotFinite& error) {  // on every rank
    fail_not_finite(error.what(), "");
  }
  ++step_;
  traffic_->end_step(result.updated);

  report.loss = all.mean_loss;
  report.grad_norm = result.grad_norm;
  report.skipped = !result.updated;
  report.left_out = all.leaves_out;
  report.notices = std::move(all.notices);
  if (engine_->config().scales_loss()) {
    report.loss_scale = result.loss_scale;
    report.next_loss_scale = result.next_loss_scale;
  }
  report.step_ms = seconds_since(begin) * 1000;
  if (profiled) profile_->stop();
  if (options_.wall_clock_breakdown) report.breakdown = timeline.take_breakdown();
  report.tokens_per_s = static_cast<double>(tokens_per_step()) / report.step_ms * 1000;
  report.comm_ms = group_->wait_ms() - waited_before;
  report.disk_ms = engine_->disk().wait_ms - disk_before;
  report.memory_peak = group_->ledger()->total().peak;
  if (profiler) report.flops = flops_of(report, *profiler);
  last_time_ = {.busy_ms = static_cast<float>(report.step_ms - report.comm_ms),
                .disk_ms = static_cast<float>(report.disk_ms)};
  last_norm_ = result.grad_norm;
  stop_signal_ = all.stop_signal;
  if (result.updated) last_update_ = step_;
  if (all.rewinds_to) {
    report.rewound = rewind(*all.rewinds_to);
    report.rewound->reason = fmt::format("{}", fmt::join(report.notices, " "));
  }
  // A dynamic loss scale finds its height by steps that overflow.
  const auto& config = engine_->config();
  const bool expected = config.scales_loss() && config.loss_scaling.fixed == 0;
  if (report.skipped && !report.left_out && !expected && !std::exchange(named_, true))
    report.anomaly = find_anomaly(step_);
  return report;
}

void Trainer::start_measuring() {
  group_->accounts().timeline->measure(options_.wall_clock_breakdown);
  const auto& logger = options_.comms_logger;
  if (!logger.enabled || group_->rank() != 0) return;
  const auto wanted = [chosen = logger.prof_ops, all = logger.prof_all](comm::Collective op) {
    return all || std::any_of(chosen.begin(), chosen.end(), [&](const std::string& name) {
             return name.starts_with(comm::name(op)) ||
                    (op == comm::Collective::control && name.ends_with("barrier"));
           });
  };
  std::function<void(const comm::CallTime&)> told;
  if (logger.verbose) {
    told = [this, named = logger.debug](comm::CallTime call) {
      if (!named) call.label = {};
      for (auto& monitor : monitors_) monitor->call(call);
    };
  }
  group_->accounts().calls->start(wanted, std::move(told));
}

void Trainer::write_profile() {
  const auto written = profile_->write(options_.profile);
  profile_.reset();
  const ProfileReport told{.step = first_step_ + options_.profile_step - 1,
                           .file = options_.profile,
                           .spans = written.spans,
                           .dropped = written.dropped};
  report([&](Monitor& monitor) { monitor.profile(told); });
}

void Trainer::measure_products() {
  if (!options_.flops_profiler.enabled) return;
  comm::agree_on_rank_zero(*group_, "Measuring matrix products", [] {});  // begin together
  try {
    const auto& config = engine_->config();
    product_speed_ = best_product_speed(config.autocast_dtype().value_or(config.parameter_dtype()),
                                        group_->device());
  } catch (const OutOfMemory&) {
    product_speed_ = 0;  // memory that the run fills: its report has no MFU
  } catch (const c10::OutOfMemoryError&) {
    product_speed_ = 0;  // the same, of a device
  }
}

std::unique_ptr<FlopsProfiler> Trainer::profiler_of(int64_t step) const {
  const auto& settings = options_.flops_profiler;
  const bool is_it = settings.enabled && group_->rank() == 0 &&
                     step == std::min(first_step_ + settings.profile_step, options_.steps);
  return is_it ? std::make_unique<FlopsProfiler>(model_->module()) : nullptr;
}

FlopsReport Trainer::flops_of(const StepReport& report, const FlopsProfiler& profiler) const {
  const auto& settings = options_.flops_profiler;
  return {.step = {.step = report.step,
                   .ranks = group_->size(),
                   .recompute_factor = settings.recompute_fwd_factor,
                   .step_ms = report.step_ms,
                   .tokens_per_s = report.tokens_per_s,
                   .peak = product_speed_,
                   .model = profiler.profile()},
          .options = {.module_depth = settings.module_depth,
                      .top_modules = settings.top_modules,
                      .detailed = settings.detailed},
          .file = settings.output_file};
}

void Trainer::seed_dropout(int64_t step) const {
  at::manual_seed(dropout_seed(options_.seed, step, group_->rank()));
}

// Note [A step that is not finite]
// Where a loss is infinite or NaN, or a gradient that no loss scale accounts for, nothing was
// updated. So the step can be run again with every operator watched: the same tokens, random
// numbers and weights, and backward with the same collectives; then its gradients are dropped.
// Where no rank's operators, losses and gradients show anything, what is left is the sum over
// ranks and micro-batches. `detect_anomaly` watches from the start, for what does not come twice
// and for steps that cannot be run again.
std::string Trainer::find_anomaly(int64_t step) {
  const bool watches = watch_.has_value();
  if (watches) {
    if (auto found = watch_->agree(); !found.empty()) return found;
  }
  const auto& config = engine_->config();
  const char* changes = config.update_in_backward                           ? "update_in_backward"
                        : config.offload_optimizer.delayed_update_after > 0 ? "delayed_update_after"
                                                                            : nullptr;
  if (changes != nullptr) {
    return fmt::format("With {} the step cannot be run again to find what made it{}.", changes,
                       watches ? ", and no operator of it has" : "; --detect-anomaly watches it");
  }
  engine_->zero_grad();
  train_loader_->restore(step_data_);
  seed_dropout(step);
  if (!watches) watch_.emplace(*engine_, named_tensors(model_->module()));
  pass_micro_batches();
  auto found = watch_->agree();
  if (found.empty()) found = watch_->check_sums();
  engine_->zero_grad();
  if (!watches) watch_.reset();
  if (!found.empty()) return found;
  return "The step was run again to find what made it, and everything was finite: it does not "
         "come "
         "every time. --detect-anomaly watches from the start.";
}

void Trainer::fail_not_finite(const std::string& what, const std::string& advice) {
  const auto found = find_anomaly(step_ + 1);
  comm::agree_on_rank_zero<NotFinite>(*group_, "The step", [&] {
    throw NotFinite(fmt::format("{} {} {}{}", what, found,
                                last_update_ > 0
                                    ? fmt::format("The last good step was {}.", last_update_)
                                    : "No step before it has updated the weights.",
                                advice.empty() ? "" : " " + advice));
  });
  throw NotFinite(what);  // not reached: rank 0 has thrown
}

// The copy runs beside what the device still does.
at::Tensor Trainer::on_device(const at::Tensor& tokens) const {
  const auto device = group_->device();
  return device.is_cpu() ? tokens : tokens.pin_memory().to(device, /*non_blocking=*/true);
}

TokenLoader::Batch Trainer::next_batch() {
  const auto batch = train_loader_->next();
  return {on_device(batch.tokens), on_device(batch.targets)};
}

// A device that is full says what would help.
template <class Pass>
auto Trainer::explained(const Pass& pass) const {
  try {
    return pass();
  } catch (const c10::OutOfMemoryError& error) {
    throw engine_->explained(error);
  }
}

void Trainer::pass_micro_batches() {
  if (watch_) watch_->begin_step();
  if (engine_->config().layer_major_accumulation) {
    std::vector<at::Tensor> tokens;
    std::vector<at::Tensor> targets;
    for (size_t i = 0; i < losses_.size(); ++i) {
      auto batch = next_batch();
      tokens.push_back(std::move(batch.tokens));
      targets.push_back(std::move(batch.targets));
    }
    const auto model = cast(model_->layers(std::move(tokens), std::move(targets)),
                            engine_->config().autocast_dtype(), group_->device().type());
    if (watch_) watch_->begin_micro_batch(0);
    const auto losses =
        explained([&] { return backward_layer_major(*engine_, model, {.store = activations_}); });
    for (size_t i = 0; i < losses_.size(); ++i) {
      losses_[i] = losses[i].item<float>();
      if (watch_) watch_->add_loss(static_cast<int64_t>(i) + 1, losses_[i]);
    }
    return;
  }
  std::vector<at::Tensor> losses;
  for (size_t i = 0; i < losses_.size(); ++i) {
    const auto batch = next_batch();
    const auto number = static_cast<int64_t>(i) + 1;
    if (watch_) watch_->begin_micro_batch(number);
    const auto loss = explained([&] {
      const Autocast casts(engine_->config().autocast_dtype(), group_->device().type());
      const Timeline::Scope forward(*group_->accounts().timeline, Activity::forward);
      return model_->loss(batch.tokens, batch.targets);
    });
    engine_->backward(loss);
    losses.push_back(loss.detach());
    if (watch_) watch_->add_loss(number, loss.item<float>());
    if (i + 1 < losses_.size()) engine_->step();  // counts the micro-batch
  }
  // When all are enqueued: a device works on while the host waits for the first.
  for (size_t i = 0; i < losses_.size(); ++i) losses_[i] = losses[i].item<float>();
}

Trainer::Exchange Trainer::exchange(const std::vector<float>& losses, double lr) {
  // Each rank's numbers: the losses of its micro-batches, the signal it received, whether its
  // monitors failed, and its time in the step before.
  const auto k = static_cast<int64_t>(losses.size());
  float* mine = exchange_mine_.data_ptr<float>();
  std::copy(losses.begin(), losses.end(), mine);
  mine[k] = signals_ != nullptr ? static_cast<float>(signals_->received()) : 0;
  mine[k + 1] = monitor_failure_ ? 1 : 0;
  mine[k + 2] = last_time_.busy_ms;
  mine[k + 3] = last_time_.disk_ms;
  group_->all_gather_control(exchange_all_, exchange_mine_, "losses");

  const float* all = exchange_all_.data_ptr<float>();
  const auto of_rank = [&](int rank) { return all + rank * (k + kOthers); };
  Exchange result;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (of_rank(rank)[k + 1] != 0) comm::share_failure(*group_, "Reporting", monitor_failure_);
    if (result.stop_signal == 0) result.stop_signal = static_cast<int>(of_rank(rank)[k]);
    rank_times_[static_cast<size_t>(rank)] = {of_rank(rank)[k + 2], of_rank(rank)[k + 3]};
  }
  if (rank_times_.front().busy_ms > 0) {
    if (auto slow = stragglers_.add(rank_times_); !slow.empty())
      result.notices.push_back(std::move(slow));
  }
  // The same order at every stage, so that the mean is the same bit for bit.
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    for (int rank = 0; rank < group_->size(); ++rank) {
      sum += of_rank(rank)[i];
      all_losses_[static_cast<size_t>(i * group_->size() + rank)] = of_rank(rank)[i];
    }
  }
  result.mean_loss = static_cast<float>(sum / static_cast<double>(k * group_->size()));
  if (!std::isfinite(result.mean_loss)) {
    comm::agree_on_rank_zero(*group_, "The step", [&] {
      for (auto& monitor : monitors_)
        monitor->step({.step = step_ + 1, .loss = result.mean_loss, .grad_norm = NAN});
    });
    fail_not_finite(fmt::format("The loss of step {} is {}: the run has diverged{}.", step_ + 1,
                                result.mean_loss,
                                engine_->config().update_in_backward
                                    ? ", and update_in_backward may have updated weights in it"
                                    : ", and nothing was updated in it"),
                    "A lower --lr, a longer --warmup or --clip may help.");
  }
  watch_loss(result, lr);
  return result;
}

void Trainer::watch_loss(Exchange& exchange, double lr) {
  const LossSample sample{.loss = exchange.mean_loss,
                          .grad_norm = last_norm_,
                          .loss_scale = engine_->config().scales_loss() ? engine_->loss_scale() : 0,
                          .lr = lr};
  auto spike = spikes_.add(sample, all_losses_, group_->size());
  if (spike.empty()) return;
  exchange.leaves_out = options_.skip_spikes || options_.rewind_spikes;
  if (options_.rewind_spikes) exchange.rewinds_to = rewind_target();
  if (exchange.rewinds_to) {
    spike += fmt::format(
        " Training goes back to the checkpoint of step {}, and on with the data that follow.",
        *exchange.rewinds_to);
  } else if (exchange.leaves_out) {
    spike += " The step is left out.";
    if (options_.rewind_spikes)
      spike += fmt::format(" No checkpoint is at least {} steps old.", *options_.rewind_spikes);
  }
  exchange.notices.push_back(std::move(spike));
}

// Rank 0 looks, as it alone removes checkpoints.
std::optional<int64_t> Trainer::rewind_target() {
  const int64_t spike = step_ + 1;
  int64_t found = -1;
  if (group_->rank() == 0)
    found = folder_.last_checkpoint(spike - *options_.rewind_spikes).value_or(-1);
  const int64_t step = comm::gather_records(*group_, found, "checkpoint to go back to").front();
  if (step < 0) return std::nullopt;
  constexpr int64_t kMost = 3;
  rewinds_ = {.count = spike > rewinds_.until ? 1 : rewinds_.count + 1,
              .until = std::max(rewinds_.until, spike)};
  if (rewinds_.count > kMost) {
    comm::agree_on_rank_zero(*group_, "Going back", [&] {
      throw Error(fmt::format(
          "The loss has become a spike {} times up to step {}, each time with other data: going "
          "back does not help. A lower --lr, a longer --warmup or --clip may. The newest "
          "checkpoint, for --resume, is of step {}.",
          rewinds_.count, rewinds_.until, folder_.last_checkpoint().value()));
    });
  }
  return step;
}

// Note [Going back]
// Weights, states, the schedule and what is known of losses are the checkpoint's; the data go on.
// The checkpoint's record then says so too, in one piece, before anything newer is removed: a run
// that is killed and resumed does not meet the same data again.
RewindReport Trainer::rewind(int64_t step) {
  RewindReport report{.from = step_, .to = step, .sample = train_loader_->state().sample};
  auto then = progress_at(folder_, step);
  report.sample_then = then.sample;
  engine_->load(folder_.checkpoint(step));
  step_ = step;
  last_update_ = step;
  last_norm_ = then.grad_norm;
  spikes_.restore(then.losses);
  then.loader = train_loader_->state();
  then.rewinds = rewinds_;
  comm::agree_on_rank_zero(*group_, "Going back", [&] {
    write_record(then);
    folder_.keep_checkpoints(0, step);
  });
  return report;
}

void Trainer::write_record(const Progress& progress) {
  OutputFile marker(folder_.checkpoint(progress.step) / RunFolder::kMarker, fail<CheckpointError>);
  const auto text = checkpoint_record(settings_, progress);
  marker.write(text.data(), text.size());
  marker.commit();
}

void Trainer::check_replicas() {
  const auto diverged = engine_->diverged_parameters();
  if (diverged.empty()) return;
  comm::agree_on_rank_zero(*group_, "The check of replicas", [&] {
    throw Error(fmt::format(
        "Before the update of step {} ranks do not hold the same parameters: {}. Either memory "
        "of "
        "theirs is faulty, or a program writes to parameters on one rank alone. {} Resume from a "
        "checkpoint of before; --check-replicas {} narrows down when it happens.",
        step_ + 1, text_of(diverged),
        step_ >= options_.check_replicas
            ? fmt::format("Before the update of step {} they were the same.",
                          step_ + 1 - options_.check_replicas)
            : "This was the first check of this run.",
        std::max<int64_t>(1, options_.check_replicas / 10)));
  });
}

void Trainer::report_validation() {
  if (options_.eval_tokens == 0 || stop_signal_ != 0) return;
  if (const auto validation = validate())
    report([&](Monitor& monitor) { monitor.validation(*validation); });
}

bool Trainer::agree_to_stop() {
  if (signals_ == nullptr) return false;
  const auto mine = at::empty({1}, at::kInt);
  const auto all = at::empty({group_->size()}, at::kInt);
  *mine.mutable_data_ptr<int32_t>() = signals_->received();
  group_->all_gather_control(all, mine, "signals");
  for (int rank = 0; rank < group_->size() && stop_signal_ == 0; ++rank) {
    stop_signal_ = all.const_data_ptr<int32_t>()[rank];
  }
  return stop_signal_ != 0;
}

std::optional<ValidationReport> Trainer::validate() {
  // Else it would pass uncounted. A delayed one is not for these weights.
  if (engine_->config().offload_optimizer.delayed_update_after == 0) traffic_->complete_update();
  const EvaluationMode evaluation(model_->module());
  const int64_t count = validation_->sequences();
  const int64_t ranks = group_->size();
  double sum = 0;
  for (int64_t done = 0; done < count;) {
    if (agree_to_stop()) return std::nullopt;
    const int64_t rows = std::min(micro_batch_of(options_), at::ceil_div(count - done, ranks));
    const auto losses = validate_pass(done + group_->rank() * rows, rows);
    for (int64_t row = 0; row < ranks * rows && done + row < count; ++row)
      sum += losses[static_cast<size_t>(row)];
    done += ranks * rows;
  }
  return ValidationReport{
      .step = step_, .loss = sum / static_cast<double>(count), .tokens = validation_->tokens()};
}

std::vector<float> Trainer::validate_pass(int64_t first, int64_t rows) {
  std::vector<at::Tensor> tokens;
  std::vector<at::Tensor> targets;
  for (int64_t row = first; row < first + rows; ++row) {
    // Every rank passes as many sequences, since parameters are gathered together.
    auto sequence = validation_->read(std::min(row, validation_->sequences() - 1));
    tokens.push_back(on_device(sequence.tokens));
    targets.push_back(on_device(sequence.targets));
  }
  const Autocast casts(engine_->config().autocast_dtype(), group_->device().type());
  const auto model = model_->layers(std::move(tokens), std::move(targets));
  auto values = model.inputs();
  for (const auto& layer : model.layers) {
    for (auto& value : values) value = layer(value);
  }
  const auto mine = at::empty({rows}, at::kFloat);
  for (int64_t i = 0; i < rows; ++i) {
    mine.mutable_data_ptr<float>()[i] =
        model.loss(std::exchange(values[static_cast<size_t>(i)], {}), i).item<float>();
  }
  const auto all = at::empty({group_->size() * rows}, at::kFloat);
  group_->all_gather_control(all, mine, "validation losses");
  const auto* begin = all.const_data_ptr<float>();
  return {begin, begin + all.numel()};
}

int Trainer::finish(double seconds) {
  traffic_->complete_update();  // a delayed one too: the weights that are saved are validated
  if (profile_) write_profile();
  report_validation();
  const auto memory = collect_memory(*engine_);
  const auto traffic = traffic_->collect();
  auto& calls = *group_->accounts().calls;
  calls.stop();
  report([&](Monitor& monitor) {
    monitor.memory(memory);
    monitor.traffic(traffic, traffic_->steps());
    if (options_.comms_logger.enabled) monitor.calls(calls.times());
  });
  save_weights();
  if (stop_signal_ == 0 && options_.sample_tokens > 0) sample();
  const EndReport end{.steps = step_,
                      .seconds = seconds,
                      .reason = stop_signal_ != 0
                                    ? fmt::format("stopped by SIG{}", sigabbrev_np(stop_signal_))
                                    : "finished",
                      .model_file = folder_.model()};
  report([&](Monitor& monitor) { monitor.end(end); });
  comm::share_failure(*group_, "Reporting", monitor_failure_);
  return stop_signal_;
}

void Trainer::report(const std::function<void(Monitor&)>& what) {
  if (monitor_failure_) return;
  try {
    for (auto& monitor : monitors_) what(*monitor);
  } catch (...) {
    monitor_failure_ = std::current_exception();  // the others learn of it at the next exchange
  }
}

void Trainer::report_run() {
  const auto run = describe();
  const auto memory = collect_memory(*engine_);
  // Nothing refuses the run any more: the earlier one may go, and its log does with the first
  // line.
  comm::agree_on_rank_zero(*group_, "Making room in the run folder", [&] {
    if (options_.overwrite) folder_.keep_checkpoints(0, -1);
    folder_.remove_left_overs();
    if (options_.resume) folder_.cut_log(step_);
  });
  report([&](Monitor& monitor) {
    monitor.begin(run);
    monitor.initial_memory(memory);
  });
  comm::share_failure(*group_, "Reporting", monitor_failure_);
}

int64_t Trainer::tokens_per_step() const {
  return group_->size() * engine_->config().gradient_accumulation_steps * micro_batch_of(options_) *
         options_.seq;
}

RunInfo Trainer::describe() const {
  const auto& config = engine_->config();
  const auto& sizes = model_->config();
  RunInfo run;
  run.model_name = options_.model;
  run.parameters = engine_->parameter_count();
  run.model_description = sizes.description();
  run.vocabulary = sizes.vocab_size();
  run.dtype = config.fp16 ? "fp16" : config.bf16 ? "bf16" : "fp32";
  if (config.autocast.enabled)
    run.dtype += config.scales_loss() ? ", autocast fp16" : ", autocast bf16";
  run.stage = config.stage;
  run.ranks = group_->size();
  run.threads = at::get_num_threads();
  run.micro_batch = micro_batch_of(options_);
  run.sequence = options_.seq;
  run.accumulate = config.gradient_accumulation_steps;
  run.steps = options_.steps;
  run.first_step = first_step_;
  run.first_sample = train_loader_->state().sample;
  run.changes = changes_;
  run.tiers = tiers_reason_;
  run.optimizer = describe_optimizer(model_->module(), *settings_.settings.engine.optimizer,
                                     options_.decay_all);
  run.data = options_.data;
  run.train_tokens = data_.train.size();
  run.validation_tokens = data_.validation.size();
  using Json = nlohmann::ordered_json;
  auto settings = settings_.settings;
  settings.engine = config;  // with the tiers that a budget chose
  auto engine = Json::parse(settings.dump());
  auto train = engine.at("train");
  engine.erase("train");
  run.config_json = Json{{"engine", std::move(engine)},
                         {"train", std::move(train)},
                         {"model", Json::parse(sizes.to_json())}}
                        .dump();
  return run;
}

void Trainer::sample() {
  const bool as_text = data_.by_bytes || !data_.tokenizer.empty();
  const auto tokenizer =
      data_.tokenizer.empty() ? Tokenizer::bytes() : Tokenizer::load(data_.tokenizer);
  const auto prompt = as_text ? tokenizer.encode(options_.prompt) : std::vector<int64_t>{0};
  const EvaluationMode evaluation(model_->module());
  // The model's vocabulary may be larger than the text's: what has no text is never drawn.
  const int64_t drawn = as_text ? tokenizer.vocab_size() : model_->config().vocab_size();
  const auto tokens = generate(
      prompt,
      [&](const at::Tensor& seen) {
        const Autocast casts(engine_->config().autocast_dtype(), group_->device().type());
        return model_->logits_last(on_device(seen)).to(at::kCPU, at::kFloat).narrow(1, 0, drawn);
      },
      {.tokens = options_.sample_tokens,
       .context = options_.seq,
       .temperature = options_.temperature,
       .top_k = options_.top_k.value_or(0),
       .seed = static_cast<uint64_t>(options_.seed),
       .stop = [&] { return agree_to_stop(); }});
  report([&](Monitor& monitor) {
    if (as_text) {
      monitor.sample(options_.prompt, tokenizer.decode(tokens));
    } else {
      monitor.sample("tokens 0", fmt::format(" {}", fmt::join(tokens, " ")));
    }
  });
}

void Trainer::save_weights() { write_weights(*engine_, *model_, folder_); }

void Trainer::save_checkpoint() {
  const auto path = folder_.checkpoint(step_);
  traffic_->complete_update();  // as saving does, uncounted
  engine_->save(path);
  comm::agree_on_rank_zero(*group_, "Writing a checkpoint", [&] {
    write_record({.step = step_,
                  .loader = train_loader_->state(),
                  .sample = train_loader_->state().sample,
                  .losses = spikes_.samples(),
                  .grad_norm = last_norm_,
                  .rewinds = rewinds_});
    // The newest; where training may go back, those that are not old enough yet, and one that is.
    const auto oldest = options_.rewind_spikes
                            ? folder_.last_checkpoint(step_ + 1 - *options_.rewind_spikes)
                            : step_;
    folder_.keep_checkpoints(oldest.value_or(0), step_);
  });
}

void Trainer::resume() {
  auto point = resume_point(folder_, settings_);
  const auto& progress = point.progress;
  engine_->load(folder_.checkpoint(progress.step));
  train_loader_->restore(progress.loader);
  step_ = progress.step;
  spikes_.restore(progress.losses);
  last_norm_ = progress.grad_norm;
  rewinds_ = progress.rewinds;
  first_step_ = step_ + 1;
  last_update_ = step_;
  changes_ = std::move(point.changes);
}

}  // namespace zero::train
