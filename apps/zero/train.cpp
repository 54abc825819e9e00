// `zero train`: GPT-2 on tokens.
#include <fmt/format.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "apps/zero/options.h"
#include "apps/zero/ranks.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/config.h"
#include "zero/train/options.h"
#include "zero/train/resume.h"
#include "zero/train/trainer.h"

namespace zero::app {
namespace {

constexpr const char* kDescription =
    "Trains a GPT-2 with its optimizer states (--stage 1), gradients (2) and parameters (3) "
    "sharded over the ranks.\n\n"
    "  zero train --model gpt2-nano --data bible.txt --out run --nproc 2 --stage 3\n\n"
    "DIR gets log.jsonl (every step), model.safetensors (Hugging Face's names) and config.json. "
    "Ctrl-C stops after the\n"
    "step and keeps the weights; --resume goes on with the options of the run's checkpoint, but "
    "for "
    "those given anew.\n"
    "Under torchrun, mpirun or srun leave --nproc out. Every option may stand in a file "
    "(--config): "
    "DeepSpeed's keys\n"
    "for the engine and a section \"train\" for the rest; the command line comes first.";

OffloadDevice device_of(std::string_view name) {
  return name == "nvme"  ? OffloadDevice::nvme
         : name == "cpu" ? OffloadDevice::cpu
                         : OffloadDevice::none;
}

/// What the command line says of the engine; what it leaves out is the file's.
struct EngineOptions {
  std::optional<int> stage;
  std::optional<std::string> dtype, offload_optimizer, offload_param, nvme_path;
  std::optional<int64_t> micro_batch, accumulate, bucket_size, live_parameters, memory_budget,
      device_memory, delayed_update_after, recompute, tile_elements;
  bool offload_gradients = false, layer_major = false, update_in_backward = false,
       no_update_in_forward = false, split_master_weights = false;
  std::optional<double> lr, clip, weight_decay, beta1, beta2;

  void apply(Config& config) const {
    if (stage) config.stage = *stage;
    if (dtype) config.bf16 = *dtype == "bf16";
    if (split_master_weights) config.split_master_weights = true;
    if (micro_batch) config.micro_batch_size = *micro_batch;
    if (accumulate) config.gradient_accumulation_steps = *accumulate;
    if (bucket_size) config.unit_bytes = *bucket_size;
    if (live_parameters) config.max_live_parameters = *live_parameters;
    if (offload_optimizer) config.offload_optimizer.device = device_of(*offload_optimizer);
    if (offload_param) config.offload_param.device = device_of(*offload_param);
    if (delayed_update_after) config.offload_optimizer.delayed_update_after = *delayed_update_after;
    if (update_in_backward) config.update_in_backward = true;
    if (no_update_in_forward) config.update_in_forward = false;
    if (layer_major) config.layer_major_accumulation = true;
    if (offload_gradients) config.offload_optimizer.gradients = true;
    if (nvme_path) config.offload_optimizer.nvme_path = config.offload_param.nvme_path = *nvme_path;
    if (memory_budget) config.memory_budget = *memory_budget;
    if (device_memory) config.device_memory = *device_memory;
    if (recompute) config.activation_checkpointing.every = *recompute;
    if (tile_elements) config.tile_elements = *tile_elements;
    if (clip) config.gradient_clipping = *clip;
    Optimizer optimizer = config.optimizer.value_or(Optimizer(train::kDefaultOptimizer));
    std::visit(
        [&](auto& chosen) {
          if (lr) chosen.lr = *lr;
          if (weight_decay) chosen.weight_decay = *weight_decay;
        },
        optimizer);
    if (beta1 || beta2) {
      auto* adam = std::get_if<AdamW>(&optimizer);
      if (adam == nullptr)
        throw ConfigError(
            "--beta1 and --beta2 are AdamW's; the configuration names another optimizer.");
      if (beta1) adam->beta1 = *beta1;
      if (beta2) adam->beta2 = *beta2;
    }
    config.optimizer = optimizer;
    config.validate();
  }
};

struct Settings {
  train::Options options;
  EngineOptions engine;
  std::string config_file;
  std::optional<int> nproc;
};

/// "eval_every" as "--eval-every".
std::string option_name(std::string_view key) {
  std::string name = "--" + std::string(key);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

/// Reads the command line over what `settings` holds. Returns an exit status where there is nothing
/// left to do.
std::optional<int> read_command_line(const Arguments& arguments, Settings& settings) {
  OptionParser parser("train", kDescription);
  parser.add_option("--config", settings.config_file, "JSON file with any of these options")
      ->type_name("FILE");
  parser
      .add_option("-n,--nproc", settings.nproc,
                  "Ranks to start on this host; 1 unless a launcher has started some")
      ->type_name("N");
  train::for_each_field(
      settings.options, [&](std::string_view key, auto& member, std::string_view help) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(member)>, bool>) {
          parser.add_flag(option_name(key), member, std::string(help));
        } else {
          auto* option = parser.add_option(option_name(key), member, std::string(help));
          if (key == "prompt") option->default_str("a line's end");
        }
      });
  parser
      .add_option_function<std::string>("--eval-batches",
                                        [](const std::string&) { train::refuse_eval_batches(); })
      ->group("");  // not in the help
  auto& engine = settings.engine;
  const std::string group = "Engine";
  const auto add = [&](const char* name, auto& value, const char* help) {
    return parser.add_option(name, value, help)->group(group);
  };
  add("--stage", engine.stage, "ZeRO stage: 0, 1, 2 or 3 [0]")->check(CLI::Range(0, 3));
  add("--dtype", engine.dtype, "fp32, or bf16 with fp32 master weights [fp32]")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  parser
      .add_flag("--split-master-weights", engine.split_master_weights,
                "bf16: keep of master weights only the half that the parameters lack, 2 bytes a "
                "parameter less")
      ->group(group);
  add("--micro-batch", engine.micro_batch, "Sequences that a rank passes at a time [8]")
      ->check(positive());
  add("--accumulate", engine.accumulate, "Micro-batches of a rank in a step [1]")
      ->check(positive());
  add("--lr", engine.lr, "Peak learning rate [3e-4]")->check(not_negative());
  add("--clip", engine.clip, "Global norm to which gradients are clipped; 0: not at all [1]")
      ->check(not_negative());
  add("--weight-decay", engine.weight_decay, "Of matrices; biases and norms have none [0.1]")
      ->check(not_negative());
  add("--beta1", engine.beta1, "AdamW's [0.9]");
  add("--beta2", engine.beta2, "AdamW's [0.95]");
  add("--bucket-size", engine.bucket_size, "Bytes that are gathered and reduced at once [16777216]")
      ->check(positive());
  add("--live-parameters", engine.live_parameters,
      "Stage 3: parameters that may be gathered at once [1000000000]")
      ->check(not_negative());
  add("--offload-optimizer", engine.offload_optimizer,
      "Where master weights and moments live: none (the device), cpu (host memory) or nvme (files) "
      "[none]")
      ->check(CLI::IsMember({"none", "cpu", "nvme"}));
  add("--offload-param", engine.offload_param,
      "Stage 3: where parameters live between their uses: none, cpu or nvme [none]")
      ->check(CLI::IsMember({"none", "cpu", "nvme"}));
  add("--delayed-update-after", engine.delayed_update_after,
      "Step from which on the update runs beside the next step (ZeRO-Offload's delay of one step); "
      "0: never [0]")
      ->check(not_negative());
  parser
      .add_flag("--offload-gradients", engine.offload_gradients,
                "Gradients on disk too, beside --offload-optimizer nvme")
      ->group(group);
  add("--nvme-path", engine.nvme_path, "Folder on a local disk for what is offloaded to nvme")
      ->type_name("DIR");
  add("--memory-budget", engine.memory_budget,
      "Bytes that a rank may hold, as 6GB; 0: no limit [0]")
      ->transform(CLI::AsSizeValue(false))
      ->check(not_negative())
      ->type_name("BYTES");
  add("--device-memory", engine.device_memory,
      "Bytes of a rank's device, of which a part of memory plays the part here; 0: no limit [0]")
      ->transform(CLI::AsSizeValue(false))
      ->check(not_negative())
      ->type_name("BYTES");
  add("--recompute", engine.recompute,
      "Compute the activations of the first of every so many blocks again in backward; 0: none [0]")
      ->check(not_negative())
      ->type_name("EVERY");
  parser
      .add_flag("--layer-major", engine.layer_major,
                "All micro-batches of a step pass one layer before the next: stage 3 gathers, and "
                "reduces, once a step")
      ->group(group);
  parser
      .add_flag("--update-in-backward", engine.update_in_backward,
                "Update a unit as soon as its gradient is reduced, beside the rest of backward; "
                "without clipping (--clip 0)")
      ->group(group);
  parser
      .add_flag("--no-update-in-forward", engine.no_update_in_forward,
                "End every update within its step, also where parameters are on disk")
      ->group(group);
  add("--tile-elements", engine.tile_elements,
      "Linear layers whose weight has more elements are split into tiles of at most so many, which "
      "stage 3 brings in one at a time; 0: none [0]")
      ->check(not_negative())
      ->type_name("N");
  return parser.read(arguments);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw ConfigError(fmt::format("The configuration file {} cannot be read.", path));
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The file with the command line's batch in it: its train_batch_size holds for both.
std::string with_batch(const std::string& text, const EngineOptions& engine) {
  auto file = nlohmann::json::parse(text, nullptr, true, true);
  if (engine.micro_batch) file["train_micro_batch_size_per_gpu"] = *engine.micro_batch;
  if (engine.accumulate) file["gradient_accumulation_steps"] = *engine.accumulate;
  return file.dump();
}

}  // namespace

int train(const Arguments& arguments) {
  Settings settings;
  if (const auto status = read_command_line(arguments, settings)) return *status;
  const std::vector<std::string> ours{"train"};
  const auto read = [&](const std::string& text, const std::string& origin) {
    Settings with_file;
    train::read_options(with_file.options, text, origin);
    read_command_line(arguments, with_file);
    settings = with_file;
  };
  std::string text;
  std::string origin = settings.config_file;
  if (!origin.empty()) {
    text = read_file(origin);
    read(text, origin);
  }
  // A resumed run goes on as it was: the checkpoint's settings, the file's, the command line's.
  const train::RunFolder folder(settings.options.out);
  const auto saved = settings.options.resume ? train::saved_settings(folder) : std::nullopt;
  const auto ranks = choose_ranks(settings.nproc, saved ? saved->ranks : 1);
  if (!text.empty()) {  // right by itself
    (void)Config::parse(text, ranks.size(), origin, ours);
  }
  if (saved) {
    text = train::override_settings(saved->configuration, text.empty() ? "{}" : text);
    if (origin.empty()) origin = "The checkpoint";
    read(text, origin);
  }
  Config config;
  if (!text.empty()) {
    config = Config::parse(with_batch(text, settings.engine), ranks.size(), origin, ours);
  }
  settings.engine.apply(config);
  // Of `zero train | tee log` a Ctrl-C ends tee too: the weights are saved all the same.
  std::signal(SIGPIPE, SIG_IGN);

  // One process checks, so that a mistake is told once.
  if (ranks.first()) train::check_run(settings.options, config, ranks.size());
  return run_on_ranks(ranks, {"train"}, arguments, [&](const std::shared_ptr<comm::Group>& group) {
    train::Trainer trainer(settings.options, config, group);
    return trainer.train() == 0 ? 0 : kInterrupted;
  });
}

}  // namespace zero::app
