#include "zero/config/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/config/fields.h"

namespace zero {

namespace {

using fields::Json;
using fields::Part;

int64_t or_zero(const Json& file, const char* key) {
  const auto found = file.find(key);
  if (found == file.end() || !found->is_number()) return 0;  // "auto"
  const double number = found->get<double>();
  constexpr double kTwoTo63 = 9223372036854775808.0;
  return number >= 1 && number < kTwoTo63 ? static_cast<int64_t>(number) : 0;  // else refused
}

// Applies train_batch_size == train_micro_batch_size_per_gpu x gradient_accumulation_steps x world
// size: any two give the third.
void apply_batch_rule(Settings& settings, const Json& file, int64_t world) {
  const int64_t train = or_zero(file, "train_batch_size");
  int64_t micro = settings.program.micro_batch_size.value_or(0);
  int64_t steps = or_zero(file, "gradient_accumulation_steps");
  if (train == 0 && micro == 0 && steps == 0) return;
  if (train > 0 && micro > 0 && steps == 0) {
    steps = train / micro / world;
  } else if (train > 0 && micro == 0) {
    if (steps == 0) steps = 1;
    micro = train / steps / world;
  } else if (steps == 0) {
    steps = 1;
  }
  // The product of two numbers of a file may exceed 64 bits, so it is computed in double.
  const double product =
      static_cast<double>(micro) * static_cast<double>(steps) * static_cast<double>(world);
  if (train > 0 && static_cast<double>(train) != product) {
    throw ConfigError(fmt::format(
        "train_batch_size is {}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps "
        "x ranks is {} x {} x {} = {}. Change one of them; any two determine the third.",
        train, micro, steps, world, product));
  }
  if (micro > 0) settings.program.micro_batch_size = micro;
  settings.engine.gradient_accumulation_steps = steps;
}

void check_ranges(const Settings& settings, std::initializer_list<Part> parts) {
  for (const auto& row : fields::settings()) {
    if (std::find(parts.begin(), parts.end(), row.part) != parts.end()) row.check(settings);
  }
}

std::string name_of(OffloadDevice device) {
  return device == OffloadDevice::none ? "none" : device == OffloadDevice::cpu ? "cpu" : "nvme";
}

void check_update_in_backward(const Config& engine) {
  const auto refuse = [](std::string_view why) {
    throw ConfigError(fmt::format("update_in_backward is true, but {}", why));
  };
  if (engine.gradient_clipping > 0 && !engine.clip_by_previous_norm) {
    refuse(
        fmt::format("gradient_clipping is {}: clipping needs all gradients before the first "
                    "update. Set gradient_clipping to 0, clip by the norm of the step before "
                    "(clip_by_previous_norm, inexact), or use "
                    "offload_optimizer.delayed_update_after.",
                    engine.gradient_clipping));
  }
  const auto& states = engine.offload_optimizer;
  if (engine.scales_loss() && (states.device != OffloadDevice::nvme || states.ratio < 1)) {
    refuse(fmt::format(
        "{}, and not all optimizer states are on disk: whether a step overflows "
        "and is left out is known when all gradients are there, and to take updates back costs "
        "more memory than update_in_backward saves. On disk it costs a second copy there: set "
        "offload_optimizer.device to \"nvme\" with ratio 1. Or switch update_in_backward off, or "
        "use bf16.",
        engine.fp16 ? "fp16.enabled is true" : "torch_autocast.dtype is fp16"));
  }
  if (engine.stage < 2) {
    refuse(fmt::format("the stage is {}: only stages 2 and 3 reduce gradients in backward.",
                       engine.stage));
  }
  if (engine.offload_optimizer.delayed_update_after > 0)
    refuse("offload_optimizer.delayed_update_after is set: choose one of the two.");
  if (engine.gradient_accumulation_steps > 1 && !engine.layer_major_accumulation) {
    refuse(
        fmt::format("gradient_accumulation_steps is {}: set layer_major_accumulation too, "
                    "which brings all gradients of a unit at once.",
                    engine.gradient_accumulation_steps));
  }
}

void check_offload(const Config& engine) {
  const auto& param = engine.offload_param;
  const auto& optimizer = engine.offload_optimizer;
  const auto check_path = [](std::string_view name, OffloadDevice device, const std::string& path) {
    if (device != OffloadDevice::nvme || !path.empty()) return;
    throw ConfigError(
        fmt::format("zero_optimization.{}.device is \"nvme\", but nvme_path is missing: name a "
                    "folder on a local disk.",
                    name));
  };
  check_path("offload_param", param.device, param.nvme_path);
  check_path("offload_optimizer", optimizer.device, optimizer.nvme_path);
  if (param.device != OffloadDevice::none && engine.stage != 3) {
    throw ConfigError(fmt::format(
        "zero_optimization.offload_param.device is \"{}\", but the stage is {}: only stage 3 "
        "takes parameters away between their uses. Set the stage to 3.",
        name_of(param.device), engine.stage));
  }
  if (optimizer.gradients && (optimizer.device != OffloadDevice::nvme || engine.stage < 2)) {
    throw ConfigError(fmt::format(
        "zero_optimization.offload_optimizer.gradients is true, but the device is \"{}\" and the "
        "stage {}: gradients lie on disk beside the optimizer's states, from stage 2 on. Set the "
        "device to \"nvme\" and the stage to 2 or 3.",
        name_of(optimizer.device), engine.stage));
  }
}

/// Checks the keys that concern several hosts.
void check_hosts(const Config& engine) {
  const auto& quantised = engine.quantised;
  const auto of_stage3 = [&](bool chosen, std::string_view key, std::string_view value) {
    if (!chosen || engine.stage == 3) return;
    throw ConfigError(
        fmt::format("zero_optimization.{} is {}, but the stage is {}: only stage 3 shards "
                    "parameters. Set the stage to 3.",
                    key, value, engine.stage));
  };
  of_stage3(engine.hpz_partition_size > 1, "zero_hpz_partition_size",
            fmt::format("{}", engine.hpz_partition_size));
  of_stage3(quantised.weights, "zero_quantized_weights", "true");
  of_stage3(quantised.frozen_weights, "zero_quantized_nontrainable_weights", "true");
  of_stage3(quantised.gradients, "zero_quantized_gradients", "true");
  if (engine.mics_shard_size != -1 && engine.stage == 0) {
    throw ConfigError(
        fmt::format("zero_optimization.mics_shard_size is {}, but the stage is 0, which shards "
                    "nothing. Set the stage to 1, 2 or 3.",
                    engine.mics_shard_size));
  }
  if (engine.mics_shard_size == 0) {
    throw ConfigError(
        "zero_optimization.mics_shard_size is 0; it must be a number of ranks, or -1 for all.");
  }
  if (engine.mics_shard_size > 0 && engine.hpz_partition_size > 1) {
    throw ConfigError(fmt::format(
        "zero_optimization.mics_shard_size is {} and zero_hpz_partition_size {}: where all states "
        "are sharded inside a host, no parameter comes from another one. Leave one of them out.",
        engine.mics_shard_size, engine.hpz_partition_size));
  }
  if (engine.mics_shard_size > 0 && quantised.any()) {
    throw ConfigError(fmt::format(
        "zero_optimization.mics_shard_size is {}, and a zero_quantized_... key is true: the sums "
        "of replicas are not quantised, and no parameter comes from another host where all states "
        "are sharded inside one. Leave one of them out.",
        engine.mics_shard_size));
  }
  if (engine.packed_exponents && (engine.stage == 0 || engine.mics_shard_size > 0)) {
    throw ConfigError(fmt::format(
        "zero_optimization.zero_packed_exponents is true, but {}: sums that replicas need whole "
        "are not packed. Set it to false, or shard over all ranks at stage 1, 2 or 3.",
        engine.stage == 0 ? std::string("the stage is 0")
                          : fmt::format("mics_shard_size is {}", engine.mics_shard_size)));
  }
  if (!quantised.feedback) return;
  for (const auto& row : fields::error_feedback()) row.check(*quantised.feedback);
  if (!quantised.gradients) {
    throw ConfigError(
        "zero_optimization.zeropp_loco_param is given, but zero_quantized_gradients is false: it "
        "makes up for what quantised gradients lose. Set zero_quantized_gradients to true, or "
        "leave it out.");
  }
}

void check_narrow_states(const Config& engine) {
  if (engine.bf16_master_weights_and_grads && !engine.bf16) {
    throw ConfigError(
        "bf16.bf16_master_weights_and_grads is true, but bf16.enabled is false: it is of bf16 "
        "parameters. Enable bf16, or switch it off.");
  }
  if (engine.bf16_master_weights_and_grads && engine.split_master_weights) {
    throw ConfigError(
        "bf16.bf16_master_weights_and_grads and bf16.split_master_weights are both true: there is "
        "no fp32 master weight to split. Switch one of them off.");
  }
  if (engine.bf16_optimizer_states && !engine.bf16_master_weights_and_grads) {
    throw ConfigError(
        "bf16.bf16_optimizer_states is true, but bf16.bf16_master_weights_and_grads is false; as "
        "in DeepSpeed it needs that too.");
  }
  if (engine.bf16_optimizer_states && engine.optimizer_states == optim::StateFormat::eight_bit) {
    throw ConfigError(
        "bf16.bf16_optimizer_states is true, and data_types.optimizer_state_dtype is \"8bit\": "
        "they are kept in one format. Leave one of the keys out.");
  }
}

void check_autocast(const Config& engine) {
  const auto& autocast = engine.autocast;
  if (!autocast.enabled) return;
  const bool half = autocast.dtype == AutocastDtype::fp16;
  if ((engine.bf16 && half) || (engine.fp16 && !half)) {
    throw ConfigError(fmt::format(
        "torch_autocast.dtype is {}, but {}.enabled is true: weights in one format of 16 bits "
        "would be cast to the other. Use {} for both, or fp32 parameters.",
        half ? "fp16" : "bf16", engine.bf16 ? "bf16" : "fp16", engine.bf16 ? "bf16" : "fp16"));
  }
}

void check_loss_scaling(const Config& engine) {
  if (!engine.scales_loss()) return;
  if (engine.bf16) {
    throw ConfigError(
        "fp16.enabled and bf16.enabled are both true: parameters have one dtype. Switch one of "
        "them off.");
  }
  try {
    (void)LossScale(engine.loss_scaling);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("fp16: {}", error.what()));
  }
  if (engine.loss_scaling.fixed == 0 && engine.loss_scaling.minimum == 0) {
    throw ConfigError(
        "fp16.min_loss_scale is 0; it must be above 0 with a dynamic loss scale (fp16.loss_scale "
        "0): of a loss times 0 nothing is learnt.");
  }
}

void check_reduction(const Config& engine) {
  if (engine.gradient_predivide_factor == 0) {
    throw ConfigError(
        "gradient_predivide_factor is 0; it must be above 0. Leave it out to divide sums alone.");
  }
  if (!engine.communication_dtype) return;
  const auto sent = dtype_of(*engine.communication_dtype);
  const auto refuse = [](std::string_view sent, std::string_view dtype) {
    throw ConfigError(fmt::format(
        "communication_data_type is \"{0}\", but {1}.enabled is true: gradients would be rounded "
        "to one format of 16 bits and then to the other. Use \"{1}\" or \"fp32\", or leave it out.",
        sent, dtype));
  };
  if (engine.bf16 && sent == c10::ScalarType::Half) refuse("fp16", "bf16");
  if (engine.fp16 && sent == c10::ScalarType::BFloat16) refuse("bf16", "fp16");
  if (engine.quantised.gradients) {
    throw ConfigError(
        "communication_data_type is given, and zero_optimization.zero_quantized_gradients is true: "
        "each says in what gradients are sent. Leave one of them out.");
  }
}

/// Checks rules between keys, which ranges cannot express.
void check_rules(const Config& engine) {
  if (engine.split_master_weights && !engine.bf16) {
    throw ConfigError(
        "bf16.split_master_weights is true, but bf16.enabled is false: a master weight is split "
        "between a bf16 parameter and its optimizer state. Enable bf16, or switch it off.");
  }
  check_narrow_states(engine);
  check_autocast(engine);
  check_loss_scaling(engine);
  check_reduction(engine);
  if (engine.clip_by_previous_norm && engine.gradient_clipping == 0) {
    throw ConfigError(
        "clip_by_previous_norm is true, but gradient_clipping is 0: nothing is clipped. Set "
        "gradient_clipping, or leave clip_by_previous_norm out.");
  }
  if (engine.update_in_backward) check_update_in_backward(engine);
  check_offload(engine);
  check_hosts(engine);
  if (engine.optimizer) optim::check(*engine.optimizer);
}

void check_rules(const ModelSettings& model, const Config& engine) {
  const auto& recompute = model.activation_checkpointing;
  if (!recompute.nvme) return;
  if (recompute.nvme_path.empty()) {
    throw ConfigError(
        "activation_checkpointing.nvme is true, but nvme_path is missing: name a folder on a local "
        "disk.");
  }
  if (!recompute.every && !engine.layer_major_accumulation) {
    throw ConfigError(
        "activation_checkpointing.nvme is true, but every is 0: nothing is recomputed, so no "
        "block's input needs a place. Set every to 1, or layer_major_accumulation.");
  }
}

[[noreturn]] void refuse_option(std::string_view key, std::string_view value,
                                std::string_view wanted) {
  throw ConfigError(fmt::format("The option '{}' is {}; it should be {}.", key, value, wanted));
}

void check_rules(const ProgramSettings& program) {
  const auto& weights = program.data_weights;
  const bool counted = weights.empty() || program.data.empty();  // data may be given later
  if (!counted && weights.size() != program.data.size()) {
    refuse_option("data_weights", fmt::format("{}", fmt::join(weights, ", ")),
                  fmt::format("a number for each data set, of which there are {}, or left out",
                              program.data.size()));
  }
  for (const double weight : weights) {
    if (std::isfinite(weight) && weight > 0) continue;
    refuse_option("data_weights", fmt::format("{}", fmt::join(weights, ", ")),
                  "a list of numbers above 0, without the data that are not to be used");
  }
  if (program.warmup.value_or(0) > program.steps) {
    refuse_option("warmup", fmt::format("{}", *program.warmup),
                  fmt::format("at most the number of steps, {}", program.steps));
  }
  if (program.prompt.empty() && program.sample_tokens != 0)
    refuse_option("prompt", "empty", "a text to continue, or 'sample_tokens' 0");
  const auto& limit = program.stop_after;
  if (!limit.empty() && parse_duration(limit).value_or(0) <= 0)
    refuse_option("stop_after", fmt::format("'{}'", limit),
                  "a time above 0, as \"3h50m\" or \"90s\"");
  const auto& lora = program.lora;
  if (!lora.adapter.empty() &&
      (lora.rank || !lora.targets.empty() || !lora.modules_to_save.empty()))
    refuse_option("lora.adapter", "given together with lora.rank, targets or modules_to_save",
                  "alone: the adapter's folder has the others");
  const bool quantised = lora.quantize_base != BaseFormat::as_they_are;
  if (!lora.on() && (!lora.targets.empty() || !lora.modules_to_save.empty() || lora.merge ||
                     lora.dora || quantised))
    refuse_option("lora.rank", "not given", "given with the other settings of LoRA (--lora-rank)");
  if (lora.on() && !program.freeze.empty())
    refuse_option("freeze", "given together with LoRA",
                  "left out: LoRA freezes all weights of the model");
  if (program.overwrite && program.resume)
    refuse_option("overwrite", "given together with resume", "one of the two");
}

/// Refuses keys of the program's shorter form if there is a section `scheduler`.
void check_scheduler(const Settings& settings) {
  if (!settings.scheduler) return;
  optim::check(*settings.scheduler);
  const auto refuse = [](std::string_view key, const auto& value) {
    throw ConfigError(fmt::format(
        "train.{} is {}, but the section scheduler decides the rate. Leave one of them out.", key,
        value));
  };
  const auto& program = settings.program;
  if (program.min_lr) refuse("min_lr", *program.min_lr);
  if (program.decay_steps) refuse("decay_steps", *program.decay_steps);
}

void check_quantised(const Settings& settings) {
  const auto& tiles = settings.model.tile_elements;
  const auto format = settings.program.lora.quantize_base;
  if (format == BaseFormat::as_they_are || !tiles) return;
  throw ConfigError(
      fmt::format("train.lora.quantize_base is \"{}\" and tile_elements is {}: tiles are not "
                  "quantised. Leave one of them out (--lora-quantize-base, --tile-elements).",
                  name_of(format), *tiles));
}

void check_best(const ProgramSettings& program) {
  if (!program.keep_best) return;
  const auto saves = program.save_every.value_or(0);
  const auto validates = program.eval_every.value_or(0);
  if (program.eval_tokens == 0) {
    throw ConfigError(
        "train.keep_best is true and train.eval_tokens is 0: there is no validation to choose by. "
        "Set --eval-tokens, or leave --keep-best out.");
  }
  if (saves > 0 && validates > 0 && saves % validates == 0) return;
  throw ConfigError(
      fmt::format("train.keep_best is true, train.save_every is {} and train.eval_every is {}: a "
                  "checkpoint has a validation loss only if there is a validation at its step. Set "
                  "both, save_every as a multiple of eval_every.",
                  saves, validates));
}

void check_spikes(const Settings& settings) {
  const auto& program = settings.program;
  if (program.rewind_spikes && !program.save_every) {
    throw ConfigError(
        fmt::format("train.rewind_spikes is {}, but there are no checkpoints to go back to. Set "
                    "train.save_every (--save-every).",
                    *program.rewind_spikes));
  }
  if (!settings.engine.update_in_backward) return;
  if (program.group_norms) {
    throw ConfigError(
        "train.group_norms and update_in_backward are both true: gradients are used up in "
        "backward. Switch one of them off.");
  }
  const auto refuse = [](std::string_view what) {
    throw ConfigError(fmt::format(
        "{} and update_in_backward is true: a step cannot be left out once backward has updated "
        "weights. Leave one of them out.",
        what));
  };
  if (program.skip_spikes) refuse("train.skip_spikes is true,");
  if (program.rewind_spikes)
    refuse(fmt::format("train.rewind_spikes is {},", *program.rewind_spikes));
}

Json to_json(const Settings& settings) { return fields::write(settings, fields::settings()); }

/// A section that differs from its defaults keeps all its keys, even those that nothing uses yet,
/// since a budget may use them. A section that does not differ is left out.
void leave_out_defaults(Json& file, std::initializer_list<const char*> sections) {
  const auto defaults = to_json(Settings());
  for (const char* name : sections) {
    const Json::json_pointer section(name);
    if (file.contains(section) && file.at(section) == defaults.at(section))
      file.at(section.parent_pointer()).erase(section.back());
  }
}

std::string text_of(Json file) {
  leave_out_defaults(
      file, {"/zero_optimization/offload_param", "/zero_optimization/offload_optimizer", "/aio",
             "/activation_checkpointing", "/tensorboard", "/csv_monitor", "/flops_profiler"});
  // A path need not be UTF-8.
  return file.dump(2, ' ', false, Json::error_handler_t::replace);
}

/// Runs `body`, whose errors are about `origin`.
void naming(std::string_view origin, const std::function<void()>& body) {
  try {
    body();
  } catch (const ConfigError& error) {
    if (origin.empty()) throw;  // no file, but options
    throw ConfigError(fmt::format("{}: {}", origin, error.what()));
  }
}

}  // namespace

// --- Reading ---

namespace {

/// Turns forms of DeepSpeed's first releases into the present ones: "zero_optimization": true, and
/// a section "bfloat16".
Json with_present_forms(Json file) {
  if (!file.is_object()) return file;
  const auto zero = file.find("zero_optimization");
  if (zero != file.end() && zero->is_boolean()) *zero = Json{{"stage", zero->get<bool>() ? 1 : 0}};
  const auto old = file.find("bfloat16");
  if (old == file.end()) return file;
  if (file.contains("bf16"))
    throw ConfigError("bfloat16 and bf16 are two names of one section: leave one out.");
  Json section = std::move(*old);
  file.erase(old);
  file["bf16"] = std::move(section);
  return file;
}

std::vector<const fields::Spec*> all_rows() {
  std::vector<const fields::Spec*> rows;
  for (const auto& row : fields::settings()) rows.push_back(&row);
  return rows;
}

/// Reports keys that are of no use with the rest of a file, as DeepSpeed does, and lets them have
/// no effect.
void pass_over_useless(Settings& settings, fields::Report& report) {
  auto& engine = settings.engine;
  auto& param = engine.offload_param;
  if (param.device != OffloadDevice::none && engine.stage != 3) {
    report.pass_over(
        "zero_optimization.offload_param", Effect::none,
        fmt::format("Only stage 3 takes parameters away between their uses; the stage is {}.",
                    engine.stage));
    param.device = OffloadDevice::none;
  }
  if (!engine.bf16) engine.bf16_master_weights_and_grads = engine.bf16_optimizer_states = false;
  if (engine.quantised.feedback && !engine.quantised.gradients) {
    report.pass_over("zero_optimization.zeropp_loco_param", Effect::off, "");
    engine.quantised.feedback.reset();
  }
  auto& recompute = settings.model.activation_checkpointing;
  if (recompute.contiguous_memory_optimization && !recompute.every &&
      !engine.layer_major_accumulation) {
    report.pass_over("activation_checkpointing.contiguous_memory_optimization", Effect::none,
                     "`every` is 0, so no input of a block is kept.");
  }
}

Settings parse_with(std::string_view text, int world_size, std::string_view origin,
                    const ReadOptions& options, fields::Report& report) {
  const auto file = fields::parse_json(text, origin);
  auto settings =
      fields::read_settings(file, origin, report, {options.foreign.begin(), options.foreign.end()});
  pass_over_useless(settings, report);
  naming(origin, [&] {
    report.guard("", [&] { apply_batch_rule(settings, file, world_size); });
    report.guard("", [&] { settings.validate(); });
  });
  return settings;
}

/// Returns whether this process prints for its job: no launcher says that it is another rank than
/// the first. (comm/job.h reads more of what launchers say; it is for joining a job.)
bool is_first_rank() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"}) {
    if (const char* rank = std::getenv(name); rank != nullptr) return std::string_view(rank) == "0";
  }
  return true;
}

void warn(const ReadOptions& options, const std::vector<Finding>& findings,
          std::string_view origin) {
  for (const auto& warning : warnings_of(findings, origin)) {
    if (options.warn) {
      options.warn(warning);
    } else if (is_first_rank()) {
      // fmt::print would throw if nobody reads any more.
      std::fputs(fmt::format("zero: warning: {}\n", warning).c_str(), stderr);
    }
  }
}

}  // namespace

Json fields::with_present_names(Json file, std::string_view origin) {
  naming(origin, [&] {
    Report report;
    file = with_present_names(with_present_forms(std::move(file)), all_rows(), "", report);
  });
  return file;
}

Json fields::without_defaults(Json file) {
  const auto rows = all_rows();
  const std::function<void(Json&, const std::string&)> clear = [&](Json& object,
                                                                   const std::string& path) {
    for (auto at = object.begin(); at != object.end();) {
      const auto name = path + at.key();
      const bool is_schedule = name == "scheduler" && at->is_object();  // its "auto" is the run's
      if (at->is_object() && !at->empty() && !is_schedule) {
        clear(*at, name + ".");
        at = at->empty() ? object.erase(at) : std::next(at);
        continue;
      }
      const auto row = std::find_if(rows.begin(), rows.end(),
                                    [&](const Spec* each) { return each->key == name; });
      // Unknown keys stay, to be refused; the optimizers have rows of their own.
      const bool known = row != rows.end() || name.starts_with("optimizer.");
      const bool is_text = row != rows.end() && (*row)->kind == Kind::text;
      at = known && is_default(*at) && (at->is_null() || !is_text) ? object.erase(at)
                                                                   : std::next(at);
    }
  };
  if (file.is_object()) clear(file, "");
  return file;
}

Settings fields::read_settings(const Json& given, std::string_view origin, Report& report,
                               const std::vector<std::string>& foreign) {
  Settings settings;
  naming(origin, [&] {
    Json file = given;
    report.guard("", [&] { file = with_present_forms(given); });
    read(settings, fields::settings(), file, "", report, foreign);
    const auto types = file.is_object() ? file.value("data_types", Json()) : Json();
    const auto all = all_rows();
    const auto row = std::find_if(all.begin(), all.end(), [](const Spec* each) {
      return each->key == "data_types.grad_accum_dtype";
    });
    const auto accumulation = with_present_word(
        **row, types.is_object() ? types.value("grad_accum_dtype", Json()) : Json());
    report.guard("data_types.grad_accum_dtype", [&] {
      for (const auto& [name, enabled] :
           {std::pair("bf16", settings.engine.bf16), std::pair("fp16", settings.engine.fp16)}) {
        if (accumulation != name || enabled) continue;
        throw ConfigError(fmt::format(
            "data_types.grad_accum_dtype is \"{0}\", but {0}.enabled is false; it must be "
            "\"fp32\", or \"model\" for the parameter's own dtype.",
            name));
      }
    });
  });
  return settings;
}

Settings fields::read_settings(const Json& file, std::string_view origin) {
  Report report;
  auto settings = read_settings(file, origin, report);
  naming(origin, [&] { report.throw_refused(); });
  return settings;
}

Settings Settings::load(const std::string& path, int world_size, const ReadOptions& options) {
  return parse(fields::read_text(path), world_size, path, options);
}

Settings Settings::parse(std::string_view text, int world_size, std::string_view origin,
                         const ReadOptions& options) {
  fields::Report report(options.lenient);
  auto settings = parse_with(text, world_size, origin, options, report);
  naming(origin, [&] { report.throw_refused(); });
  warn(options, report.findings(), origin);
  return settings;
}

std::vector<Finding> Settings::check(std::string_view text, int world_size, std::string_view origin,
                                     const ReadOptions& options) {
  fields::Report report(options.lenient, true);
  (void)parse_with(text, world_size, origin, options, report);
  return report.findings();
}

Config Config::load(const std::string& path, int world_size, const ReadOptions& options) {
  return Settings::load(path, world_size, options).engine;
}

Config Config::parse(std::string_view text, int world_size, std::string_view origin,
                     const ReadOptions& options) {
  return Settings::parse(text, world_size, origin, options).engine;
}

// --- Writing ---

std::string Settings::dump() const { return text_of(to_json(*this)); }

std::string Config::dump() const {
  Json file = Json::object();
  const Settings settings{.engine = *this};
  for (const auto& row : fields::settings()) {
    if (row.part != Part::engine || !row.get) continue;
    if (auto value = row.get(settings); !value.is_null()) fields::put(file, row.key, value);
  }
  return text_of(std::move(file));
}

std::string dump(const Optimizer& optimizer) { return fields::write_optimizer(optimizer).dump(2); }

// --- Checking ---

void Settings::validate() const {
  check_ranges(*this, {Part::engine, Part::model, Part::program});
  check_rules(engine);
  check_rules(model, engine);
  check_rules(program);
  check_scheduler(*this);
  check_quantised(*this);
  check_best(program);
  check_spikes(*this);
}

void Config::validate() const {
  check_ranges({.engine = *this}, {Part::engine});
  check_rules(*this);
}

void ProgramSettings::validate() const {
  check_ranges({.program = *this}, {Part::program});
  if (data.empty()) {
    refuse_option("data", "empty", "a text or token file, or a folder made by `zero data prepare`");
  }
  check_rules(*this);
}

std::vector<std::string> Config::nvme_folders() const {
  std::vector<std::string> folders;
  const auto add = [&](OffloadDevice device, const std::string& path) {
    if (device != OffloadDevice::nvme) return;
    std::stringstream names(path);
    for (std::string name; std::getline(names, name, ',');) {
      if (!name.empty() && std::find(folders.begin(), folders.end(), name) == folders.end())
        folders.push_back(name);
    }
  };
  add(offload_param.device, offload_param.nvme_path);
  add(offload_optimizer.device, offload_optimizer.nvme_path);
  return folders;
}

}  // namespace zero
