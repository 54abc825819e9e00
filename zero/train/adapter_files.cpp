#include "zero/train/adapter_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/comm/agreement.h"
#include "zero/models/language/config_reader.h"
#include "zero/models/layers/low_rank.h"
#include "zero/models/layers/packed_weight.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kPeftPrefix = "base_model.model.";
constexpr std::string_view kHead = "lm_head";  // stands beside the part that a prefix names

// Keys that say how an adapter began, where its model came from, or who wrote it.
constexpr std::array<std::string_view, 16> kWithoutEffect{
    "auto_mapping",      "base_model_name_or_path",
    "corda_config",      "eva_config",
    "fan_in_fan_out",    "inference_mode",
    "layers_pattern",    "loftq_config",
    "lora_ga_config",    "megatron_config",
    "megatron_core",     "peft_version",
    "qalora_group_size", "revision",
    "runtime_config",    "task_type"};
// Values of init_lora_weights that leave the weights beneath as they are. The others (PiSSA, OLoRA,
// CorDA, LoftQ, LoRA-GA) change them when an adapter is made.
constexpr std::array<std::string_view, 3> kInitialValues{"gaussian", "eva", "orthogonal"};

// Keys that are read below.
constexpr std::array<std::string_view, 9> kRead{"peft_type",       "r",          "lora_alpha",
                                                "lora_dropout",    "use_rslora", "target_modules",
                                                "modules_to_save", "bias",       "use_dora"};

template <class Keys>
bool is_among(const Keys& keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

void check_keys(const ConfigReader& config) {
  for (const auto& [key, value] : config.object().items()) {
    if (!has_value(value) || is_among(kRead, key) || is_among(kWithoutEffect, key)) continue;
    if (key == "init_lora_weights" &&
        (value == true ||
         (value.is_string() && is_among(kInitialValues, value.get<std::string>()))))
      continue;
    throw ConfigError(fmt::format("{}: key '{}' is {}, which libzero does not compute.",
                                  config.source(), key, excerpt(value.dump())));
  }
  if (!config.has("peft_type")) throw ConfigError("It has no peft_type; only LORA is supported.");
  config.require<std::string>("peft_type", "LORA");
  config.require<std::string>("bias", "none");  // biases are not trained
}

LoraSettings settings_of(const ConfigReader& config) {
  check_keys(config);
  LoraSettings settings{
      .rank = config.get<int64_t>("r", 8),
      .alpha = config.get<double>("lora_alpha", 8),
      .rslora = config.get<bool>("use_rslora", false),
      .dropout = config.get<double>("lora_dropout", 0),
      .dora = config.get<bool>("use_dora", false),
      .modules_to_save = config.get<std::vector<std::string>>("modules_to_save", {}),
      .names_may_miss = true};
  const auto targets = config.object().find("target_modules");
  if (targets != config.object().end() && targets->is_string()) {
    const auto text = targets->get<std::string>();
    settings.targets.all_linear = text == "all-linear";
    if (!settings.targets.all_linear) settings.targets.expression = text;
  } else {
    settings.targets.names = config.get<std::vector<std::string>>("target_modules", {});
    std::sort(settings.targets.names.begin(), settings.targets.names.end());
  }
  config.validate(settings);
  if (settings.rank > 1 << 20)
    throw ConfigError(fmt::format("Its rank of {} is too large.", settings.rank));
  return settings;
}

std::string published(const LoraSettings& settings, const std::string& path) {
  return path.starts_with(kHead) ? path : settings.prefix + path;
}

/// Returns the names of the parameters that an adapter's file has.
std::vector<std::string> parameters_of(const Lora& lora) {
  std::vector<std::string> names;
  for (const auto& layer : lora.layers) {
    const auto added = lora.added(layer);
    names.insert(names.end(), added.begin(), added.end());
  }
  names.insert(names.end(), lora.saved_parameters.begin(), lora.saved_parameters.end());
  return names;
}

Json target_modules(const Lora& lora) {
  const auto& targets = lora.settings.targets;
  if (!targets.expression.empty()) return targets.expression;
  if (!targets.all_linear) return targets.names;
  auto paths = Json::array();  // peft's word may mean other layers there
  for (const auto& layer : lora.layers) paths.push_back(published(lora.settings, layer.path));
  return paths;
}

bool ends_with_name(std::string_view path, std::string_view name) {
  return path == name || path.ends_with(fmt::format(".{}", name));
}

/// Returns the names by which peft finds the modules that are trained whole. It takes every module
/// whose path ends with the letters of a name: "norm" would be "input_layernorm" too. A name that
/// means others there is replaced by the shortest ends of paths that mean none.
std::vector<std::string> saved_modules(const Lora& lora, const std::vector<std::string>& names) {
  std::set<std::string> modules;
  for (const auto& name : names) {
    const auto path = published(lora.settings, name);
    for (auto dot = path.rfind('.'); dot != std::string::npos && dot > 0;
         dot = path.rfind('.', dot - 1))
      modules.insert(path.substr(0, dot));
  }
  std::set<std::string> saved;
  for (const auto& name : lora.settings.modules_to_save) {
    for (const auto& path : modules) {
      if (ends_with_name(path, name)) saved.insert(path);
    }
  }
  const auto means_others = [&](std::string_view end) {
    return std::any_of(modules.begin(), modules.end(), [&](const std::string& path) {
      return path.ends_with(end) && !saved.contains(path);
    });
  };
  std::vector<std::string> ends;
  const auto add = [&](std::string_view end) {
    if (std::find(ends.begin(), ends.end(), end) == ends.end()) ends.emplace_back(end);
  };
  for (const auto& name : lora.settings.modules_to_save) {
    const bool fits = std::any_of(saved.begin(), saved.end(), [&](const std::string& path) {
      return ends_with_name(path, name);
    });
    if (!fits) continue;  // LoraSettings::names_may_miss
    if (!means_others(name)) {
      add(name);
      continue;
    }
    for (const auto& path : saved) {
      if (!ends_with_name(path, name)) continue;
      auto begin = path.size();
      do {
        const auto dot = begin == 0 ? std::string::npos : path.rfind('.', begin - 1);
        begin = dot == std::string::npos ? 0 : dot;
      } while (begin > 0 && means_others(std::string_view(path).substr(begin + 1)));
      add(std::string_view(path).substr(begin == 0 ? 0 : begin + 1));
    }
  }
  return ends;
}

Json whole_if_it_is(double value) {
  return value == std::floor(value) && std::abs(value) < 1e15 ? Json(static_cast<int64_t>(value))
                                                              : Json(value);
}

/// `names` are those of the model's parameters.
std::string config_of(const Lora& lora, const std::vector<std::string>& names,
                      const SaveAdapterOptions& options) {
  const auto& settings = lora.settings;
  const Json json{
      {"peft_type", "LORA"},
      {"task_type", options.task.empty() ? Json() : Json(options.task)},
      {"base_model_name_or_path", options.base_model.empty() ? Json() : Json(options.base_model)},
      {"inference_mode", true},
      {"r", settings.rank},
      {"lora_alpha", whole_if_it_is(settings.alpha)},
      {"lora_dropout", settings.dropout},
      {"use_rslora", settings.rslora},
      {"use_dora", settings.dora},
      {"target_modules", target_modules(lora)},
      {"modules_to_save",
       settings.modules_to_save.empty() ? Json() : Json(saved_modules(lora, names))},
      {"fan_in_fan_out", lora.in_out},
      {"bias", "none"}};
  // A path need not be UTF-8.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

namespace {

// Calls `read` with the reader of an adapter's settings. Its errors name the file.
template <class Read>
auto from_config(const std::string& folder, const Read& read) {
  const auto path = fs::path(folder) / kAdapterConfig;
  const auto text = read_file(path, fail<CheckpointError>);
  try {
    return read(ConfigReader(std::string_view(text), kAdapterConfig));
  } catch (const ConfigError& error) {
    throw CheckpointError(
        fmt::format("{} cannot be used as an adapter. {}", path.string(), error.what()));
  }
}

}  // namespace

std::string base_model_of(const std::string& folder) {
  return from_config(folder, [](const ConfigReader& config) {
    const auto base = config.get<std::string>("base_model_name_or_path", "");
    std::error_code ignored;
    if (!base.empty() && fs::exists(fs::path(base) / "config.json", ignored)) return base;
    throw ConfigError(
        fmt::format("Its base_model_name_or_path is {}, which is no folder with a config.json. "
                    "Give the model's folder beside the adapter's.",
                    excerpt('"' + base + '"')));
  });
}

LoraSettings read_adapter_config(const std::string& folder) {
  return from_config(folder, settings_of);
}

std::vector<std::string> read_adapter_labels(const std::string& folder) {
  const auto path = fs::path(folder) / kAdapterLabels;
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return {};
  try {
    return parse_json(read_file(path, fail<CheckpointError>)).get<std::vector<std::string>>();
  } catch (const nlohmann::json::exception&) {
    throw CheckpointError(fmt::format("{} is no list of names of classes.", path.string()));
  } catch (const CheckpointError&) {
    throw;
  } catch (const Error& error) {
    throw CheckpointError(fmt::format("{} {}", path.string(), error.what()));
  }
}

bool has_adapter_labels(const std::string& folder) {
  const auto path = fs::path(folder) / kAdapterConfig;
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return false;
  try {
    const auto config = parse_json(read_file(path, fail<CheckpointError>));
    return config.is_object() && config.value("task_type", nlohmann::json()) == kClassesTask;
  } catch (const Error&) {
    return false;
  }
}

int64_t read_adapter_classes(const std::string& folder) {
  if (!has_adapter_labels(folder)) return 0;
  const SafetensorsReader file(fs::path(folder) / kAdapterWeights);
  for (const auto& info : file.tensors()) {
    if (ends_with_name(info.name, "classifier.weight") && info.shape.size() == 2)
      return info.shape.front();
  }
  return 0;
}

void save_adapter(Engine& engine, const Lora& lora, const std::string& folder,
                  const SaveAdapterOptions& options) {
  std::vector<TensorInfo> infos;
  std::map<std::string, std::vector<int64_t>> shapes;
  std::vector<std::string> all;
  for (auto& info : engine.parameter_infos()) {
    all.push_back(info.name);
    shapes[info.name] = std::move(info.shape);
  }
  const auto names = parameters_of(lora);
  const auto key = [&](const std::string& name) {
    return std::string(kPeftPrefix) + published(lora.settings, name);
  };
  for (const auto& name : names) infos.push_back({key(name), at::kFloat, shapes[name]});
  std::exception_ptr failure;
  std::optional<SafetensorsWriter> file;
  const auto attempt = [&](const auto& body) {
    if (engine.group().rank() != 0 || failure) return;
    try {
      body();
    } catch (const Error&) {
      failure = std::current_exception();  // the walk over the parameters is collective: it goes on
    }
  };
  attempt([&] {
    file.emplace(fs::path(folder) / kAdapterWeights, infos,
                 std::map<std::string, std::string>{{"format", "pt"}});
  });
  for (const auto& name : names) {
    const auto value = engine.parameter(name);
    attempt([&] { file->write(key(name), value); });
  }
  attempt([&] {
    file->commit();
    const fs::path place(folder);
    const bool had_labels = has_adapter_labels(folder);
    write_file(place / kAdapterConfig, config_of(lora, all, options), fail<CheckpointError>);
    std::error_code ignored;
    if (options.labels.empty()) {
      if (had_labels) fs::remove(place / kAdapterLabels, ignored);
    } else {
      write_file(place / kAdapterLabels, Json(options.labels).dump() + "\n", fail<CheckpointError>);
    }
  });
  comm::share_failure<CheckpointError>(engine.group(), "Writing the adapter", failure);
}

void load_adapter(Engine& engine, const Lora& lora, const std::string& folder) {
  const auto path = fs::path(folder) / kAdapterWeights;
  std::map<std::string, std::string> keys;  // by parameter
  const auto open = [&] {
    auto reader = std::make_unique<SafetensorsReader>(path);
    const auto& file = *reader;
    std::map<std::string, std::vector<int64_t>> shapes;
    for (auto& info : engine.parameter_infos()) shapes[info.name] = std::move(info.shape);
    std::set<std::string> left;
    for (const auto& info : file.tensors()) left.insert(info.name);
    for (const auto& name : parameters_of(lora)) {
      auto key = std::string(kPeftPrefix) + published(lora.settings, name);
      if (!left.contains(key)) key = std::string(kPeftPrefix) + name;
      if (left.erase(key) == 0) {
        throw CheckpointError(fmt::format(
            "{} has no tensor '{}', which the model's adapter needs. Give the settings that the "
            "adapter was made with.",
            path.string(), std::string(kPeftPrefix) + published(lora.settings, name)));
      }
      const auto& info = file.info(key);
      if (info.shape != shapes[name] || !at::isFloatingType(info.dtype)) {
        throw CheckpointError(fmt::format(
            "{} holds the tensor '{}' in {} of shape ({}), but the model's adapter takes any "
            "floating-point dtype of shape ({}).",
            path.string(), key, c10::toString(info.dtype), fmt::join(info.shape, ", "),
            fmt::join(shapes[name], ", ")));
      }
      keys[name] = key;
    }
    if (!left.empty()) {
      throw CheckpointError(
          fmt::format("{} holds {} tensors that the model's adapter does not have: '{}'. Give the "
                      "settings that "
                      "the adapter was made with.",
                      path.string(), left.size(), fmt::join(left, "', '")));
    }
    return reader;
  };
  auto& group = engine.group();
  const auto file = comm::agree<CheckpointError>(group, "Reading the adapter", open);
  for (const auto& name : parameters_of(lora)) {
    const auto value = comm::agree<CheckpointError>(
        group, "Reading the adapter", [&] { return file->read(keys.at(name)).to(at::kFloat); });
    engine.set_parameter(name, value);
  }
}

void begin_magnitudes(Engine& engine, const Lora& lora,
                      const std::map<std::string, PackedMatrix>& packed) {
  if (!lora.settings.dora) return;
  for (const auto& layer : lora.layers) {
    const auto& weight = layer.weights.front();
    auto values = engine.parameter(weight.parameter);
    if (values.scalar_type() == at::kByte) {
      const auto matrix = packed.find(weight.parameter);
      if (matrix == packed.end()) {
        throw ConfigError(fmt::format(
            "begin_magnitudes was not told the format of '{}', which is kept in bytes. Give it "
            "what zero::quantised_weights returns for the model.",
            weight.parameter));
      }
      const auto& sizes = matrix->second.sizes;
      values = unpacked_weight(values, matrix->second.format, sizes[0], sizes[1], at::kFloat);
    }
    engine.set_parameter(layer.magnitude(), row_lengths(weight.in_out ? values.t() : values));
  }
}

std::map<std::string, MergedProduct> merged_products(const Lora& lora) {
  std::map<std::string, MergedProduct> products;
  for (const auto& layer : lora.layers) {
    for (const auto& weight : layer.weights) {
      products[weight.parameter] = {.a = layer.a(),
                                    .b = layer.b(),
                                    .scale = lora.settings.scale(),
                                    .out_begin = weight.out_begin,
                                    .in_begin = weight.in_begin,
                                    .in_out = weight.in_out,
                                    .magnitude = lora.settings.dora ? layer.magnitude() : ""};
    }
  }
  return products;
}

std::set<std::string> added_parameters(const Lora& lora) {
  std::set<std::string> names;
  for (const auto& layer : lora.layers) {
    const auto added = lora.added(layer);
    names.insert(added.begin(), added.end());
  }
  return names;
}

}  // namespace zero
