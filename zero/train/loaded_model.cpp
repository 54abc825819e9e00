#include "zero/train/loaded_model.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/data/read_chat_template.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/initial_values.h"
#include "zero/train/adapter_files.h"
#include "zero/train/tuning.h"
#include "zero/train/weights.h"

namespace zero::train {

namespace {

std::unique_ptr<LanguageModelConfig> sizes_of(const Options& options) {
  auto sizes =
      language_model_config((std::filesystem::path(options.from) / "config.json").string());
  choose_head_of_adapter(*sizes, options);
  return sizes;
}

}  // namespace

Options options_of_model(const std::string& folder, const std::string& adapter, BaseFormat format) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) {
    throw ConfigError(
        fmt::format("There is no folder {}. Give one that has config.json and weights, or that of "
                    "an adapter.",
                    folder));
  }
  Options options;
  options.from = folder;
  options.lora.adapter = adapter;
  if (adapter.empty() &&
      std::filesystem::exists(std::filesystem::path(folder) / kAdapterConfig, ignored)) {
    options.from = base_model_of(folder);
    options.lora.adapter = folder;
  }
  options.lora.quantize_base = format;
  if (format != BaseFormat::as_they_are && !options.lora.on()) {
    throw ConfigError(
        fmt::format("--lora-quantize-base says what an adapter was trained on, and {} is no folder "
                    "of an adapter. Give one (--adapter), or leave the option out.",
                    folder));
  }
  return options;
}

LoadedModel::LoadedModel(const std::filesystem::path& folder, const Config& config,
                         const std::shared_ptr<comm::Group>& group)
    : LoadedModel(options_of_model(folder.string()), config, group) {}

LoadedModel::LoadedModel(const Options& options, const Config& config,
                         const std::shared_ptr<comm::Group>& group)
    : LoadedModel(*sizes_of(options), options, config, group) {}

LoadedModel::LoadedModel(const LanguageModelConfig& sizes, const Options& options,
                         const Config& config, const std::shared_ptr<comm::Group>& group) {
  {
    const WithoutValues none;
    model_ = sizes.build();
  }
  lora_ = choose_trained(*model_, options);
  auto tensors = named_tensors(model_->module());
  tensors.values_follow = true;
  // Nothing is trained, so the optimizer is one without states.
  engine_ = std::make_unique<Engine>(
      std::move(tensors),
      std::vector<ParameterGroup>{ParameterGroup{.optimizer = Sgd{}, .rest = true}}, config, group);
  report_ = load_weights(*engine_, *model_, lora_, options.from);
  if (lora_) load_adapter(*engine_, *lora_, options.lora.adapter);
}

std::vector<int64_t> end_tokens(const std::filesystem::path& folder, const Tokenizer& tokenizer) {
  std::vector<int64_t> tokens;
  const auto add = [&](const nlohmann::json& token) {
    if (token.is_number_integer()) tokens.push_back(token.get<int64_t>());
  };
  for (const char* name : {"generation_config.json", "config.json"}) {
    const auto config = read_object(folder / name);
    const auto found = config.find("eos_token_id");
    if (found == config.end()) continue;
    if (!found->is_array()) add(*found);
    for (const auto& each : found->is_array() ? *found : nlohmann::json::array()) add(each);
  }
  const auto end = special_token(tokenizer.file().parent_path(), "eos_token");
  if (const auto token = end.empty() ? std::nullopt : tokenizer.token(end))
    tokens.push_back(*token);
  return tokens;
}

}  // namespace zero::train
