#include "zero/train/parts.h"

#include <ATen/ceil_div.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "zero/base/error.h"
#include "zero/models/architectures.h"
#include "zero/models/recompute/activation_store.h"
#include "zero/optim/sweeps.h"
#include "zero/train/make_task.h"
#include "zero/train/run.h"
#include "zero/train/tuning.h"

namespace zero::train {
namespace {

int64_t micro_batch_of(const Options& options) {
  return options.micro_batch_size.value_or(kDefaultMicroBatch);
}

int64_t warmup_of(const Options& options) {
  return options.warmup.value_or(std::min<int64_t>(200, options.steps / 10));
}

/// Returns whether the optimizer warms up by itself, and takes no schedule. Throws ConfigError for
/// a schedule in the settings.
bool is_schedule_free(const Settings& settings) {
  const auto& options = settings.program;
  const auto& chosen = settings.engine.optimizer;
  if (!chosen || !std::holds_alternative<ScheduleFreeAdamW>(*chosen)) return false;
  const auto refuse = [](bool asked, std::string_view what) {
    if (!asked) return;
    throw ConfigError(fmt::format(
        "{}, and the optimizer is ScheduleFreeAdamW, whose mean of all iterates takes the place of "
        "a schedule. Leave it out; --warmup N warms up.",
        what));
  };
  refuse(settings.scheduler.has_value(), "There is a section `scheduler`");
  refuse(options.min_lr.has_value(), "train.min_lr is set");
  refuse(options.schedule == optim::Decay::linear || options.schedule == optim::Decay::wsd,
         "train.schedule is one that lowers the rate");
  return true;
}

}  // namespace

Settings completed(Settings settings) {
  settings.program.validate();
  settings.validate();
  settings.program.micro_batch_size = micro_batch_of(settings.program);
  if (!settings.engine.optimizer) settings.engine.optimizer = kDefaultOptimizer;
  if (auto* chosen = std::get_if<ScheduleFreeAdamW>(&*settings.engine.optimizer);
      chosen != nullptr && (settings.program.warmup || !chosen->warmup_steps))
    chosen->warmup_steps = warmup_of(settings.program);
  return settings;
}

Dataset open_data(const Options& options) {
  const bool validates = options.eval_tokens > 0;
  const bool splits = validates && options.val_data.empty();
  auto data =
      open_mixture({options.data.begin(), options.data.end()}, options.data_weights,
                   {.validation_fraction = splits ? SplitOptions{}.validation_fraction : 0.0});
  if (validates && !options.val_data.empty()) {
    const auto validation = open_dataset(options.val_data, {.validation_fraction = 0.0});
    check_same_tokens(data, validation, {names_of(options), options.val_data},
                      "a loss would say nothing. Prepare both with the same --tokenizer.");
    if (data.labels != validation.labels) {
      throw DataError(
          fmt::format("The validation data {} have other labels than {}. Prepare both together, or "
                      "with the same "
                      "labels.",
                      options.val_data, names_of(options)));
    }
    data.validation =
        std::filesystem::is_directory(options.val_data) ? validation.validation : validation.train;
  }
  return data;
}

std::string names_of(const Options& options) {
  return fmt::format("{}", fmt::join(options.data, ", "));
}

const std::string& model_name(const Options& options) {
  return options.from.empty() ? options.model : options.from;
}

std::unique_ptr<LanguageModelConfig> model_config(const Options& options, const Dataset& data) {
  const auto& name = model_name(options);
  auto sizes = options.from.empty()
                   ? language_model_config(name)
                   : language_model_config((std::filesystem::path(name) / "config.json").string());
  const int64_t own_vocabulary = sizes->vocab_size();
  if (options.vocab_size) {
    if (!options.from.empty() && *options.vocab_size != own_vocabulary) {
      throw ConfigError(fmt::format(
          "--vocab-size is {}, but the model of --from {} has weights for {} tokens. Leave it out.",
          *options.vocab_size, name, own_vocabulary));
    }
    sizes->set_vocab_size(*options.vocab_size);
  } else if (sizes->takes_vocabulary_of_data() && data.vocab_size > 0) {
    sizes->set_vocab_size(data.vocab_size);
  }
  if (options.dropout) sizes->set_dropout(*options.dropout);
  choose_head_of_adapter(*sizes, options);
  choose_head(*sizes, options, data);
  if (options.seq > sizes->context()) {
    throw ConfigError(
        fmt::format("The option 'seq' is {}, but the model {} takes at most {} tokens.",
                    options.seq, name, sizes->context()));
  }
  if (data.vocab_size > sizes->vocab_size()) {
    const auto remedy =
        options.from.empty()
            ? fmt::format("Set --vocab-size {}.", data.vocab_size)
            : fmt::format(
                  "Its weights are for the tokens of its own tokenizer: encode the text by that "
                  "(zero data prepare --tokenizer {}).",
                  name);
    throw ConfigError(
        fmt::format("The data {} has a vocabulary of {} tokens, but the model {} has {}. {}",
                    names_of(options), data.vocab_size, name, sizes->vocab_size(), remedy));
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

StepSize step_size(const Settings& settings, const LanguageModelConfig& sizes, int ranks) {
  const auto& config = settings.engine;
  const auto& options = settings.program;
  const auto bytes =
      sizes.activation_bytes(micro_batch_of(options) * options.seq, config.parameter_bytes());
  // A recomputed layer keeps only its input; the layer that is computed again has all of its own.
  const auto& recompute = settings.model.activation_checkpointing;
  const int64_t every = config.layer_major_accumulation ? 1 : recompute.every.value_or(0);
  const int64_t again = every > 0 ? at::ceil_div(sizes.layers(), every) : 0;
  const int64_t kept =
      config.layer_major_accumulation ? again * config.gradient_accumulation_steps : again;
  const int64_t inputs =
      recompute.nvme ? std::min<int64_t>(kept, DiskActivationOptions{}.buffers) : kept;
  const int64_t whole = sizes.layers() - again + (again > 0 ? 1 : 0);
  int64_t matrix_elements = 0;
  int64_t factored_numel = 0;
  const Optimizer optimizer = settings.engine.optimizer.value_or(Optimizer(kDefaultOptimizer));
  for (const auto [rows, columns] : sizes.matrices()) {
    if (optim::beside_matrices(optimizer)) break;  // it does not train all of them
    matrix_elements += rows * columns;
    for (const auto& state : optim::factored_states(optimizer, {rows, columns}, {columns, 1}))
      factored_numel += c10::multiply_integers(state.sizes);
  }
  const auto counts = count_parameters(options, sizes).by_memory(config.parameter_bytes());
  return {.parameters = counts.all,
          .frozen = counts.frozen,
          .largest_parameter = sizes.largest_parameter(),
          .matrix_elements = matrix_elements,
          .factored_numel = factored_numel,
          .ranks = shard_ranks(config, ranks),
          .activations = whole * bytes.layer + inputs * bytes.layer_input + bytes.loss};
}

optim::Schedule schedule_of(const Settings& settings) {
  const auto& options = settings.program;
  const Optimizer optimizer = settings.engine.optimizer.value_or(Optimizer(kDefaultOptimizer));
  const double lr = optim::lr(optimizer);
  const int64_t warmup = warmup_of(options);
  const optim::RunLength run{.lr = lr, .steps = options.steps, .warmup_steps = warmup};
  if (is_schedule_free(settings))
    return optim::complete(optim::WarmupDecay{.decay = optim::Decay::constant}, run);
  if (!settings.scheduler) {
    return optim::complete(optim::WarmupDecay{.min_lr = options.min_lr.value_or(lr / 10),
                                              .warmup_steps = warmup,
                                              .decay = options.schedule,
                                              .decay_steps = options.decay_steps},
                           run);
  }
  auto schedule = optim::complete(*settings.scheduler, run);
  // An optimizer without betas keeps its momentum, as in DeepSpeed.
  auto* cycle = std::get_if<optim::DeepSpeedOneCycle>(&schedule);
  if (cycle != nullptr && !has_betas(optimizer)) cycle->cycle_momentum = false;
  return schedule;
}

}  // namespace zero::train
