#include "zero/train/loaded_model.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/data/read_chat_template.h"
#include "zero/engine/pretrained.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/initial_values.h"

namespace zero::train {

LoadedModel::LoadedModel(const std::filesystem::path& folder, const Config& config,
                         std::shared_ptr<comm::Group> group) {
  {
    const WithoutValues none;
    model_ = language_model_config((folder / "config.json").string())->build();
  }
  auto tensors = named_tensors(model_->module());
  tensors.values_follow = true;
  // Nothing is trained, so the optimizer is one without states.
  engine_ = std::make_unique<Engine>(
      std::move(tensors),
      std::vector<ParameterGroup>{ParameterGroup{.optimizer = Sgd{}, .rest = true}}, config,
      std::move(group));
  load_pretrained(*engine_, folder.string(),
                  {.places = model_->export_places(), .tied = model_->tied_names()});
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
