#include "zero/engine/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/json.h"

namespace zero {

namespace {

using Json = nlohmann::json;

// One object of the file: reads keys with a type, remembers which were read, and refuses the rest
// by name.
class Section {
 public:
  Section(const Json& json, std::string path) : json_(json), path_(std::move(path)) {
    if (!json.is_object())
      throw ConfigError(fmt::format("{} is {}; it must be an object {{...}}.",
                                    path_.empty() ? "The configuration" : path_, json.dump()));
  }

  std::string path(std::string_view key) const {
    return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  }

  /// The value of `key`, or null if it is absent or "auto", which means the default.
  const Json* find(const std::string& key) {
    known_.push_back(key);
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null() ||
        (found->is_string() && found->get<std::string>() == "auto"))
      return nullptr;
    return &*found;
  }

  bool boolean(const std::string& key, bool fallback) {
    const auto* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->get<bool>();
  }
  double number(const std::string& key, double fallback) {
    const auto* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number()) refuse(key, *value, "a number");
    return value->get<double>();
  }
  int64_t integer(const std::string& key, int64_t fallback, int64_t least = 0) {
    const auto* value = find(key);
    if (value == nullptr) return fallback;
    // 5e8 is a whole number to whoever writes it.
    const double real = value->is_number() ? value->get<double>() : std::nan("");
    if (!(std::floor(real) == real) || real < static_cast<double>(least))
      refuse(key, *value, fmt::format("a whole number, at least {}", least));
    return real >= 9.2e18               ? std::numeric_limits<int64_t>::max()
           : value->is_number_integer() ? value->get<int64_t>()
                                        : static_cast<int64_t>(real);
  }
  /// A whole number, or text as "6GB".
  int64_t bytes(const std::string& key, int64_t fallback) {
    const auto* value = find(key);
    if (value == nullptr || !value->is_string()) return integer(key, fallback);
    const auto parsed = parse_bytes(value->get<std::string>());
    if (!parsed) refuse(key, *value, "a number of bytes, as 6000000000 or \"6GB\"");
    return *parsed;
  }
  std::string string(const std::string& key, const std::string& fallback) {
    const auto* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) refuse(key, *value, "a string");
    return value->get<std::string>();
  }
  std::optional<Section> section(const std::string& key) {
    const auto* value = find(key);
    if (value == nullptr) return std::nullopt;
    return Section(*value, path(key));
  }
  void pass_over(const std::string& key) { known_.push_back(key); }

  [[noreturn]] void refuse(const std::string& key, const Json& value,
                           std::string_view wanted) const {
    throw ConfigError(fmt::format("{} is {}; it must be {}.", path(key), value.dump(), wanted));
  }

  /// Throws for a key that nothing has read.
  void finish() const {
    for (const auto& item : json_.items()) {
      if (std::find(known_.begin(), known_.end(), item.key()) != known_.end()) continue;
      throw ConfigError(fmt::format("Unknown key '{}' in the configuration.{}", path(item.key()),
                                    did_you_mean(item.key(), known_)));
    }
  }

 private:
  const Json& json_;
  std::string path_;
  std::vector<std::string> known_;
};

std::pair<double, double> betas(Section& params, std::pair<double, double> fallback) {
  const auto* value = params.find("betas");
  if (value == nullptr) return fallback;
  if (!value->is_array() || value->size() != 2 || !(*value)[0].is_number() ||
      !(*value)[1].is_number())
    params.refuse("betas", *value, "an array of two numbers");
  return {(*value)[0].get<double>(), (*value)[1].get<double>()};
}

Optimizer read_optimizer(Section section) {
  const auto type = section.string("type", "AdamW");
  static const Json kEmpty = Json::object();
  auto given = section.section("params");
  Section params = given ? *given : Section(kEmpty, section.path("params"));
  Optimizer result;
  if (type == "Adam" || type == "AdamW") {
    AdamW adam;
    adam.lr = params.number("lr", adam.lr);
    std::tie(adam.beta1, adam.beta2) = betas(params, {adam.beta1, adam.beta2});
    adam.eps = params.number("eps", adam.eps);
    // As in DeepSpeed: "Adam" decays like AdamW unless adam_w_mode is false, and without a default
    // decay.
    adam.weight_decay = params.number("weight_decay", type == "AdamW" ? adam.weight_decay : 0.0);
    adam.decoupled = params.boolean("adam_w_mode", true);
    adam.bias_correction = params.boolean("bias_correction", true);
    params.pass_over("torch_adam");
    result = adam;
  } else if (type == "SGD") {
    Sgd sgd;
    sgd.lr = params.number("lr", sgd.lr);
    sgd.momentum = params.number("momentum", sgd.momentum);
    sgd.dampening = params.number("dampening", sgd.dampening);
    sgd.weight_decay = params.number("weight_decay", sgd.weight_decay);
    sgd.nesterov = params.boolean("nesterov", sgd.nesterov);
    result = sgd;
  } else {
    const std::vector<std::string> known{"Adam", "AdamW", "SGD"};
    throw ConfigError(fmt::format("{} is \"{}\"; it must be one of {}.{}", section.path("type"),
                                  type, fmt::join(known, ", "), did_you_mean(type, known)));
  }
  params.finish();
  section.finish();
  return result;
}

Json write_optimizer(const Optimizer& optimizer) {
  if (const auto* adam = std::get_if<AdamW>(&optimizer)) {
    return {{"type", "AdamW"},
            {"params",
             {{"lr", adam->lr},
              {"betas", {adam->beta1, adam->beta2}},
              {"eps", adam->eps},
              {"weight_decay", adam->weight_decay},
              {"adam_w_mode", adam->decoupled},
              {"bias_correction", adam->bias_correction}}}};
  }
  const auto& sgd = std::get<Sgd>(optimizer);
  return {{"type", "SGD"},
          {"params",
           {{"lr", sgd.lr},
            {"momentum", sgd.momentum},
            {"dampening", sgd.dampening},
            {"weight_decay", sgd.weight_decay},
            {"nesterov", sgd.nesterov}}}};
}

// train_batch_size == train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size:
// any two give the third.
void apply_batch_rule(Config& config, int64_t train, int64_t micro, int64_t steps, int64_t world) {
  if (train == 0 && micro == 0 && steps == 0) return;
  if (train > 0 && micro > 0 && steps == 0) {
    steps = train / (micro * world);
  } else if (train > 0 && micro == 0) {
    if (steps == 0) steps = 1;
    micro = train / (steps * world);
  } else if (steps == 0) {
    steps = 1;
  }
  if (train > 0 && train != micro * steps * world) {
    throw ConfigError(fmt::format(
        "train_batch_size is {}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps "
        "x ranks is {} x {} x {} = {}. Change one of them; any two determine the third.",
        train, micro, steps, world, micro * steps * world));
  }
  config.micro_batch_size = micro;
  config.gradient_accumulation_steps = steps;
}

constexpr std::string_view kDevices[] = {"none", "cpu", "nvme"};

OffloadDevice read_device(Section& section) {
  const auto device = section.string("device", "none");
  const auto* found = std::find(std::begin(kDevices), std::end(kDevices), device);
  if (found == std::end(kDevices)) {
    const std::vector<std::string> known(std::begin(kDevices), std::end(kDevices));
    throw ConfigError(fmt::format("{} is \"{}\"; it must be \"none\", \"cpu\" or \"nvme\".{}",
                                  section.path("device"), device, did_you_mean(device, known)));
  }
  return static_cast<OffloadDevice>(found - std::begin(kDevices));
}

OffloadParam read_offload_param(Section& section) {
  OffloadParam offload;
  offload.device = read_device(section);
  offload.nvme_path = section.string("nvme_path", "");
  offload.buffer_count = section.integer("buffer_count", offload.buffer_count, 1);
  offload.max_in_cpu = section.integer("max_in_cpu", offload.max_in_cpu);
  // A buffer here is as large as the slice that it holds; memory is pinned for GPUs only.
  section.integer("buffer_size", 0);
  section.boolean("pin_memory", false);
  section.finish();
  return offload;
}

OffloadOptimizer read_offload_optimizer(Section& section) {
  OffloadOptimizer offload;
  offload.device = read_device(section);
  offload.nvme_path = section.string("nvme_path", "");
  offload.buffer_count = section.integer("buffer_count", offload.buffer_count, 1);
  offload.pipeline_read = section.boolean("pipeline_read", offload.pipeline_read);
  offload.pipeline_write = section.boolean("pipeline_write", offload.pipeline_write);
  offload.gradients = section.boolean("gradients", offload.gradients);
  offload.delayed_update_after =
      section.integer("delayed_update_after", offload.delayed_update_after);
  // Of transfers to a GPU and of DeepSpeed's start; they change nothing here.
  for (const auto* key : {"pin_memory", "fast_init", "super_offload"}) section.boolean(key, false);
  section.number("cpuadam_cores_perc", 0.8);
  offload.ratio = section.number("ratio", offload.ratio);
  section.finish();
  return offload;
}

Aio read_aio(Section& section) {
  Aio aio;
  aio.block_size = section.bytes("block_size", aio.block_size);
  aio.queue_depth = section.integer("queue_depth", aio.queue_depth, 1);
  aio.use_io_uring = section.boolean("use_io_uring", aio.use_io_uring);
  aio.checksums = section.boolean("checksums", aio.checksums);
  // Of DeepSpeed's own engine; ours submits and completes all that there is at once.
  for (const auto* key : {"single_submit", "overlap_events", "use_gds"})
    section.boolean(key, false);
  for (const auto* key : {"intra_op_parallelism", "thread_count"}) section.integer(key, 1);
  section.finish();
  return aio;
}

Json write_aio(const Aio& aio) {
  return {{"block_size", aio.block_size},
          {"queue_depth", aio.queue_depth},
          {"use_io_uring", aio.use_io_uring},
          {"checksums", aio.checksums}};
}

ActivationCheckpointing read_activation_checkpointing(Section& section) {
  ActivationCheckpointing result;
  result.every = section.integer("every", result.every);
  result.contiguous_memory_optimization = section.boolean("contiguous_memory_optimization", false);
  result.nvme = section.boolean("nvme", result.nvme);
  result.nvme_path = section.string("nvme_path", "");
  // Without tensor parallelism there is nothing to partition; on a CPU all activations are in host
  // memory; the others are of GPUs, of a profile, and of a buffer that is measured here.
  for (const auto* key :
       {"partition_activations", "cpu_checkpointing", "synchronize_checkpoint_boundary", "profile"})
    section.boolean(key, false);
  section.integer("number_checkpoints", 0);
  section.finish();
  return result;
}

// DeepSpeed's other keys of zero_optimization.
void read_the_rest_of_zero(Section& zero) {
  // Without effect: what they choose is decided otherwise here (the plan knows every later use of a
  // unit; reductions and gathers always overlap; gradients always lie side by side), or is of its
  // checkpoints and of GPUs.
  for (const auto* key : {"contiguous_gradients",
                          "reduce_scatter",
                          "use_multi_rank_bucket_allreduce",
                          "allgather_partitions",
                          "overlap_comm",
                          "load_from_fp32_weights",
                          "elastic_checkpoint",
                          "gather_16bit_weights_on_model_save",
                          "stage3_gather_16bit_weights_on_model_save",
                          "stage3_gather_fp16_weights_on_model_save",
                          "stage3_use_all_reduce_for_fetch_params",
                          "stage3_allgather_sequential",
                          "ignore_unused_parameters",
                          "legacy_stage1",
                          "round_robin_gradients",
                          "memory_efficient_linear",
                          "pipeline_loading_checkpoint",
                          "override_module_apply",
                          "log_trace_cache_warnings",
                          "enable_sanity_checks"})
    zero.boolean(key, false);
  for (const auto* key :
       {"reduce_bucket_size", "allgather_bucket_size", "sub_group_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_reuse_distance", "stage3_module_granularity_threshold"})
    zero.integer(key, 0);
  // Of these only the default is known.
  for (const auto* key : {"zero_quantized_weights", "zero_quantized_nontrainable_weights",
                          "zero_quantized_gradients", "mics_hierarchical_params_gather"}) {
    if (zero.boolean(key, false)) zero.refuse(key, true, "false: libzero has no such mode yet");
  }
  if (const auto size = zero.integer("zero_hpz_partition_size", 1); size != 1)
    zero.refuse("zero_hpz_partition_size", size, "1: libzero has no secondary partition yet");
  if (const auto size = zero.integer("mics_shard_size", -1, -1); size != -1)
    zero.refuse("mics_shard_size", size, "-1: libzero shards over all ranks");
}

}  // namespace

Config Config::load(const std::string& path, int world_size, std::span<const std::string> foreign) {
  std::ifstream file(path);
  if (!file)
    throw ConfigError(fmt::format(
        "The configuration file '{}' cannot be opened. Check the path and its permissions.", path));
  std::stringstream text;
  text << file.rdbuf();
  return parse(text.str(), world_size, path, foreign);
}

Config Config::parse(std::string_view text, int world_size, std::string_view origin,
                     std::span<const std::string> foreign) {
  Json json;
  try {
    // A key that stands twice in one object is an error, not a silent choice of the last.
    std::vector<std::vector<std::string>> keys;
    const auto no_duplicates = [&](int depth, Json::parse_event_t event, Json& value) {
      if (depth >= kMaxJsonDepth)  // printing and copying what is deeper recurses
        throw ConfigError(fmt::format("{} nests more than {} deep.", origin, kMaxJsonDepth));
      if (event == Json::parse_event_t::object_start) keys.emplace_back();
      if (event == Json::parse_event_t::object_end) keys.pop_back();
      if (event == Json::parse_event_t::key) {
        auto& seen = keys.back();
        auto key = value.get<std::string>();
        if (std::find(seen.begin(), seen.end(), key) != seen.end())
          throw ConfigError(
              fmt::format("{}: the key '{}' stands twice in one object.", origin, key));
        seen.push_back(std::move(key));
      }
      return true;
    };
    json = Json::parse(text, no_duplicates, true, true);
  } catch (const Json::exception& error) {
    throw ConfigError(fmt::format("{} is not valid JSON: {}", origin, error.what()));
  }
  Config config;
  Section top(json, "");
  for (const auto& key : foreign) top.pass_over(key);
  apply_batch_rule(config, top.integer("train_batch_size", 0),
                   top.integer("train_micro_batch_size_per_gpu", 0),
                   top.integer("gradient_accumulation_steps", 0), world_size);
  config.gradient_clipping = top.number("gradient_clipping", config.gradient_clipping);
  config.one_sided_gather = top.boolean("one_sided_gather", config.one_sided_gather);
  config.seed_by_rank = top.boolean("seed_by_rank", config.seed_by_rank);
  config.update_in_backward = top.boolean("update_in_backward", config.update_in_backward);
  config.update_in_forward = top.boolean("update_in_forward", config.update_in_forward);
  config.layer_major_accumulation =
      top.boolean("layer_major_accumulation", config.layer_major_accumulation);
  if (auto bf16 = top.section("bf16")) {
    config.bf16 = bf16->boolean("enabled", false);
    config.split_master_weights = bf16->boolean("split_master_weights", false);
    bf16->finish();
  }
  if (auto types = top.section("data_types")) {
    const auto dtype = types->string("grad_accum_dtype", "fp32");
    const std::vector<std::string> known{"fp32", "bf16", "model"};
    if (dtype != "fp32" && dtype != "model" && !(dtype == "bf16" && config.bf16)) {
      throw ConfigError(
          fmt::format("data_types.grad_accum_dtype is \"{}\"; it must be \"fp32\", or \"model\" "
                      "(or \"bf16\" where bf16 is enabled) for the parameter's own dtype.{}",
                      dtype, did_you_mean(dtype, known)));
    }
    config.accumulation_dtype =
        dtype == "fp32" ? AccumulationDtype::fp32 : AccumulationDtype::model;
    types->finish();
  }
  if (auto zero = top.section("zero_optimization")) {
    config.stage = static_cast<int>(zero->integer("stage", config.stage));
    config.unit_bytes = zero->integer("unit_bytes", config.unit_bytes, 1);
    config.max_live_parameters =
        zero->integer("stage3_max_live_parameters", config.max_live_parameters);
    config.prefetch_bucket_size =
        zero->integer("stage3_prefetch_bucket_size", config.prefetch_bucket_size);
    if (auto offload = zero->section("offload_param"))
      config.offload_param = read_offload_param(*offload);
    if (auto offload = zero->section("offload_optimizer"))
      config.offload_optimizer = read_offload_optimizer(*offload);
    read_the_rest_of_zero(*zero);
    zero->finish();
  }
  if (auto aio = top.section("aio")) config.aio = read_aio(*aio);
  if (auto section = top.section("activation_checkpointing"))
    config.activation_checkpointing = read_activation_checkpointing(*section);
  if (auto tiling = top.section("tiling")) {
    config.tile_elements = tiling->integer("max_elements", config.tile_elements);
    tiling->finish();
  }
  config.memory_budget = top.bytes("memory_budget", config.memory_budget);
  config.device_memory = top.bytes("device_memory", config.device_memory);
  if (auto section = top.section("optimizer")) config.optimizer = read_optimizer(*section);
  top.finish();
  config.validate();
  return config;
}

std::string Config::dump() const {
  Json json{
      {"gradient_accumulation_steps", gradient_accumulation_steps},
      {"gradient_clipping", gradient_clipping},
      {"layer_major_accumulation", layer_major_accumulation},
      {"memory_budget", memory_budget},
      {"device_memory", device_memory},
      {"one_sided_gather", one_sided_gather},
      {"seed_by_rank", seed_by_rank},
      {"update_in_backward", update_in_backward},
      {"update_in_forward", update_in_forward},
      {"bf16", {{"enabled", bf16}, {"split_master_weights", split_master_weights}}},
      {"data_types",
       {{"grad_accum_dtype", accumulation_dtype == AccumulationDtype::fp32 ? "fp32" : "model"}}},
      {"zero_optimization",
       {{"stage", stage},
        {"unit_bytes", unit_bytes},
        {"stage3_max_live_parameters", max_live_parameters},
        {"stage3_prefetch_bucket_size", prefetch_bucket_size}}}};
  // A section that differs from its defaults says all that it has, also what nothing uses yet: a
  // budget may.
  if (offload_param != OffloadParam()) {
    json["zero_optimization"]["offload_param"] = {
        {"device", kDevices[static_cast<size_t>(offload_param.device)]},
        {"nvme_path", offload_param.nvme_path},
        {"buffer_count", offload_param.buffer_count},
        {"max_in_cpu", offload_param.max_in_cpu}};
  }
  if (offload_optimizer != OffloadOptimizer()) {
    json["zero_optimization"]["offload_optimizer"] = {
        {"device", kDevices[static_cast<size_t>(offload_optimizer.device)]},
        {"nvme_path", offload_optimizer.nvme_path},
        {"buffer_count", offload_optimizer.buffer_count},
        {"pipeline_read", offload_optimizer.pipeline_read},
        {"pipeline_write", offload_optimizer.pipeline_write},
        {"ratio", offload_optimizer.ratio},
        {"gradients", offload_optimizer.gradients},
        {"delayed_update_after", offload_optimizer.delayed_update_after}};
  }
  if (aio != Aio()) json["aio"] = write_aio(aio);
  if (const auto& chosen = activation_checkpointing; chosen != ActivationCheckpointing()) {
    json["activation_checkpointing"] = {
        {"every", chosen.every},
        {"contiguous_memory_optimization", chosen.contiguous_memory_optimization},
        {"nvme", chosen.nvme},
        {"nvme_path", chosen.nvme_path}};
  }
  if (tile_elements > 0) json["tiling"] = {{"max_elements", tile_elements}};
  if (micro_batch_size > 0) json["train_micro_batch_size_per_gpu"] = micro_batch_size;
  if (optimizer) json["optimizer"] = write_optimizer(*optimizer);
  return json.dump(2);
}

std::string dump(const Optimizer& optimizer) { return write_optimizer(optimizer).dump(2); }

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

void Config::validate() const {
  if (stage < 0 || stage > 3)
    throw ConfigError(
        fmt::format("zero_optimization.stage is {}; it must be 0, 1, 2 or 3.", stage));
  if (gradient_accumulation_steps < 1)
    throw ConfigError(fmt::format("gradient_accumulation_steps is {}; it must be at least 1.",
                                  gradient_accumulation_steps));
  if (!(gradient_clipping >= 0) || std::isinf(gradient_clipping))
    throw ConfigError(fmt::format("gradient_clipping is {}; it must be 0 (off) or a positive norm.",
                                  gradient_clipping));
  if (split_master_weights && !bf16) {
    throw ConfigError(
        "bf16.split_master_weights is true, but bf16.enabled is false: a master weight is split "
        "between a bf16 parameter and its optimizer state. Enable bf16, or switch it off.");
  }
  if (update_in_backward) {
    const auto refuse = [](std::string_view why) {
      throw ConfigError(fmt::format("update_in_backward is true, but {}", why));
    };
    if (gradient_clipping > 0) {
      refuse(
          fmt::format("gradient_clipping is {}: clipping needs all gradients before the first "
                      "update. Set gradient_clipping to 0, or use "
                      "offload_optimizer.delayed_update_after.",
                      gradient_clipping));
    }
    if (stage < 2) {
      refuse(
          fmt::format("the stage is {}: only stages 2 and 3 reduce gradients in backward.", stage));
    }
    if (offload_optimizer.delayed_update_after > 0)
      refuse("offload_optimizer.delayed_update_after is set: choose one of the two.");
    if (gradient_accumulation_steps > 1 && !layer_major_accumulation) {
      refuse(
          fmt::format("gradient_accumulation_steps is {}: set layer_major_accumulation too, "
                      "which brings all gradients of a unit at once.",
                      gradient_accumulation_steps));
    }
  }
  if (unit_bytes < 1)
    throw ConfigError(
        fmt::format("zero_optimization.unit_bytes is {}; it must be at least 1.", unit_bytes));
  if (max_live_parameters < 0)
    throw ConfigError(
        fmt::format("zero_optimization.stage3_max_live_parameters is {}; it must not be negative.",
                    max_live_parameters));
  if (prefetch_bucket_size < 0)
    throw ConfigError(
        fmt::format("zero_optimization.stage3_prefetch_bucket_size is {}; it must not be negative.",
                    prefetch_bucket_size));
  const bool param_on_disk = offload_param.device == OffloadDevice::nvme;
  const bool optimizer_on_disk = offload_optimizer.device == OffloadDevice::nvme;
  const auto check_section = [](std::string_view name, const std::string& path, int64_t buffers) {
    if (path.empty()) {
      throw ConfigError(
          fmt::format("zero_optimization.{}.device is \"nvme\", but nvme_path is missing: name a "
                      "folder on a local disk.",
                      name));
    }
    if (buffers < 1) {
      throw ConfigError(fmt::format(
          "zero_optimization.{}.buffer_count is {}; it must be at least 1 (the default lets "
          "reading, computing and writing overlap).",
          name, buffers));
    }
  };
  if (param_on_disk)
    check_section("offload_param", offload_param.nvme_path, offload_param.buffer_count);
  if (optimizer_on_disk)
    check_section("offload_optimizer", offload_optimizer.nvme_path, offload_optimizer.buffer_count);
  if (offload_param.device != OffloadDevice::none && stage != 3) {
    throw ConfigError(fmt::format(
        "zero_optimization.offload_param.device is \"{}\", but the stage is {}: only stage 3 "
        "takes parameters away between their uses. Set the stage to 3.",
        kDevices[static_cast<size_t>(offload_param.device)], stage));
  }
  if (offload_optimizer.gradients && (!optimizer_on_disk || stage < 2)) {
    throw ConfigError(fmt::format(
        "zero_optimization.offload_optimizer.gradients is true, but the device is \"{}\" and the "
        "stage {}: gradients lie on disk beside the optimizer's states, from stage 2 on. Set the "
        "device to \"nvme\" and the stage to 2 or 3.",
        kDevices[static_cast<size_t>(offload_optimizer.device)], stage));
  }
  if (!(offload_optimizer.ratio >= 0 && offload_optimizer.ratio <= 1)) {
    throw ConfigError(
        fmt::format("zero_optimization.offload_optimizer.ratio is {}; it must be from 0 to 1.",
                    offload_optimizer.ratio));
  }
  if (param_on_disk && offload_param.max_in_cpu < 0) {
    throw ConfigError(
        fmt::format("zero_optimization.offload_param.max_in_cpu is {}; it must not be negative.",
                    offload_param.max_in_cpu));
  }
  if (param_on_disk || optimizer_on_disk) {
    if (aio.block_size < 4096 || aio.block_size % 4096 != 0)
      throw ConfigError(fmt::format("aio.block_size is {}; it must be a multiple of 4096 bytes.",
                                    aio.block_size));
    if (aio.queue_depth < 1 || aio.queue_depth > 4096)
      throw ConfigError(
          fmt::format("aio.queue_depth is {}; it must be from 1 to 4096.", aio.queue_depth));
  }
  if (activation_checkpointing.every < 0)
    throw ConfigError(
        fmt::format("activation_checkpointing.every is {}; it must be 0 (no recomputation) or a "
                    "number of blocks.",
                    activation_checkpointing.every));
  if (activation_checkpointing.nvme && activation_checkpointing.nvme_path.empty())
    throw ConfigError(
        "activation_checkpointing.nvme is true, but nvme_path is missing: name a folder on a local "
        "disk.");
  if (activation_checkpointing.nvme && activation_checkpointing.every == 0 &&
      !layer_major_accumulation)
    throw ConfigError(
        "activation_checkpointing.nvme is true, but every is 0: nothing is recomputed, so no "
        "block's input needs a place. Set every to 1, or layer_major_accumulation.");
  if (tile_elements < 0)
    throw ConfigError(
        fmt::format("tiling.max_elements is {}; it must be 0 (no tiling) or a number of elements.",
                    tile_elements));
  if (memory_budget < 0)
    throw ConfigError(fmt::format(
        "memory_budget is {}; it must be 0 (no limit) or a number of bytes.", memory_budget));
  if (device_memory < 0)
    throw ConfigError(fmt::format(
        "device_memory is {}; it must be 0 (no limit) or a number of bytes.", device_memory));
  if (optimizer) optim::check(*optimizer);
  if (micro_batch_size < 0)
    throw ConfigError(fmt::format("train_micro_batch_size_per_gpu is {}; it must not be negative.",
                                  micro_batch_size));
}

}  // namespace zero
