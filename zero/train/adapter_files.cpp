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

namespace zero {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kPeftPrefix = "base_model.model.";
constexpr std::string_view kHead = "lm_head";  // stands beside the part that a prefix names

// Keys that say how an adapter began, where its model came from, or who wrote it.
constexpr std::array<std::string_view, 17> kWithoutEffect{
    "auto_mapping",   "base_model_name_or_path", "corda_config",      "eva_config",
    "fan_in_fan_out", "inference_mode",          "init_lora_weights", "layers_pattern",
    "loftq_config",   "lora_ga_config",          "megatron_config",   "megatron_core",
    "peft_version",   "qalora_group_size",       "revision",          "runtime_config",
    "task_type"};

// Keys that are read below.
constexpr std::array<std::string_view, 8> kRead{"peft_type",       "r",          "lora_alpha",
                                                "lora_dropout",    "use_rslora", "target_modules",
                                                "modules_to_save", "bias"};

bool has_value(const nlohmann::json& value) {
  return !value.is_null() && value != false && !(value.is_structured() && value.empty());
}

template <class Keys>
bool is_among(const Keys& keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

/// Reads values of one file, with errors that name it.
class ConfigReader {
 public:
  explicit ConfigReader(fs::path path) : path_(std::move(path)) {
    try {
      json_ = parse_json(read_file(path_, fail<CheckpointError>));
    } catch (const CheckpointError&) {
      throw;
    } catch (const Error& error) {
      refuse(fmt::format("it {}", error.what()));
    }
    if (!json_.is_object()) refuse("it is no JSON object");
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw CheckpointError(fmt::format("{} cannot be used as an adapter: {}.", path_.string(), why));
  }

  void check_keys() const {
    for (const auto& [key, value] : json_.items()) {
      if (!has_value(value) || is_among(kRead, key) || is_among(kWithoutEffect, key)) continue;
      refuse(fmt::format("it has the {} {}, which libzero does not compute", key,
                         excerpt(value.dump())));
    }
    if (const auto& type = at("peft_type"); type != "LORA")
      refuse(fmt::format("its peft_type is {}, not \"LORA\"", excerpt(type.dump())));
    if (const auto& bias = at("bias"); has_value(bias) && bias != "none")
      refuse(fmt::format("it trains biases (bias is {})", excerpt(bias.dump())));
  }

  const nlohmann::json& at(const char* key) const {
    static const nlohmann::json none;
    const auto found = json_.find(key);
    return found == json_.end() ? none : *found;
  }
  double number(const char* key, double otherwise) const {
    const auto& value = at(key);
    if (value.is_null()) return otherwise;
    if (!value.is_number()) wrong(key, "a number");
    return value.get<double>();
  }
  bool flag(const char* key) const {
    const auto& value = at(key);
    if (value.is_null()) return false;
    if (!value.is_boolean()) wrong(key, "true or false");
    return value.get<bool>();
  }
  std::vector<std::string> names(const char* key) const {
    const auto& value = at(key);
    if (value.is_null()) return {};
    const bool texts = value.is_array() && std::all_of(value.begin(), value.end(),
                                                       [](const auto& v) { return v.is_string(); });
    if (!texts) wrong(key, "a list of names");
    return value.get<std::vector<std::string>>();
  }
  [[noreturn]] void wrong(const char* key, std::string_view expected) const {
    refuse(fmt::format("its {} is {}, not {}", key, excerpt(at(key).dump()), expected));
  }

 private:
  fs::path path_;
  nlohmann::json json_;
};

std::string published(const LoraSettings& settings, const std::string& path) {
  return path.starts_with(kHead) ? path : settings.prefix + path;
}

/// Returns the names of the parameters that an adapter's file has.
std::vector<std::string> parameters_of(const Lora& lora) {
  std::vector<std::string> names;
  for (const auto& layer : lora.layers) {
    names.push_back(layer.a());
    names.push_back(layer.b());
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

Json whole_if_it_is(double value) {
  return value == std::floor(value) && std::abs(value) < 1e15 ? Json(static_cast<int64_t>(value))
                                                              : Json(value);
}

std::string config_of(const Lora& lora, const std::string& base_model) {
  const auto& settings = lora.settings;
  const Json json{{"peft_type", "LORA"},
                  {"task_type", "CAUSAL_LM"},
                  {"base_model_name_or_path", base_model.empty() ? Json() : Json(base_model)},
                  {"inference_mode", true},
                  {"r", settings.rank},
                  {"lora_alpha", whole_if_it_is(settings.alpha)},
                  {"lora_dropout", settings.dropout},
                  {"use_rslora", settings.rslora},
                  {"target_modules", target_modules(lora)},
                  {"modules_to_save",
                   settings.modules_to_save.empty() ? Json() : Json(settings.modules_to_save)},
                  {"fan_in_fan_out", lora.in_out},
                  {"bias", "none"}};
  return json.dump(2) + "\n";
}

}  // namespace

std::string base_model_of(const std::string& folder) {
  const ConfigReader config(fs::path(folder) / kAdapterConfig);
  const auto& base = config.at("base_model_name_or_path");
  std::error_code ignored;
  if (!base.is_string() ||
      !fs::exists(fs::path(base.get<std::string>()) / "config.json", ignored)) {
    config.refuse(
        fmt::format("its base_model_name_or_path is {}, which is no folder with a config.json; "
                    "give the model's "
                    "folder beside the adapter's",
                    excerpt(base.dump())));
  }
  return base.get<std::string>();
}

LoraSettings read_adapter_config(const std::string& folder) {
  const ConfigReader config(fs::path(folder) / kAdapterConfig);
  config.check_keys();
  const double rank = config.number("r", 8);
  if (!(rank >= 1 && rank <= 1 << 20 && rank == std::floor(rank)))
    config.wrong("r", "a positive whole number");
  LoraSettings settings{.rank = static_cast<int64_t>(rank),
                        .alpha = config.number("lora_alpha", 8),
                        .rslora = config.flag("use_rslora"),
                        .dropout = config.number("lora_dropout", 0),
                        .modules_to_save = config.names("modules_to_save")};
  const auto& targets = config.at("target_modules");
  try {
    if (targets == "all-linear") {
      settings.targets.all_linear = true;
    } else if (targets.is_string()) {
      settings.targets.expression = targets.get<std::string>();
    } else {
      settings.targets.names = config.names("target_modules");
      std::sort(settings.targets.names.begin(), settings.targets.names.end());
    }
    settings.validate();
  } catch (const ConfigError& error) {
    config.refuse(error.what());
  }
  return settings;
}

void save_adapter(Engine& engine, const Lora& lora, const std::string& folder,
                  const std::string& base_model) {
  std::vector<TensorInfo> infos;
  std::map<std::string, std::vector<int64_t>> shapes;
  for (auto& info : engine.parameter_infos()) shapes[info.name] = std::move(info.shape);
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
    const auto text = config_of(lora, base_model);
    OutputFile config(fs::path(folder) / kAdapterConfig, fail<CheckpointError>);
    config.write(text.data(), text.size());
    config.commit();
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

std::map<std::string, MergedProduct> merged_products(const Lora& lora) {
  std::map<std::string, MergedProduct> products;
  for (const auto& layer : lora.layers) {
    for (const auto& weight : layer.weights) {
      products[weight.parameter] = {.a = layer.a(),
                                    .b = layer.b(),
                                    .scale = lora.settings.scale(),
                                    .out_begin = weight.out_begin,
                                    .in_begin = weight.in_begin,
                                    .in_out = weight.in_out};
    }
  }
  return products;
}

std::set<std::string> added_parameters(const Lora& lora) {
  std::set<std::string> names;
  for (const auto& layer : lora.layers) {
    names.insert(layer.a());
    names.insert(layer.b());
  }
  return names;
}

}  // namespace zero
