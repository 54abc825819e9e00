#include "zero/train/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <filesystem>
#include <system_error>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/agreement.h"
#include "zero/engine/pretrained.h"

namespace zero::train {

namespace {

/// Files of Hugging Face's folders that belong to a model and not to its weights.
constexpr std::array kCompanions{
    "added_tokens.json", "chat_template.jinja",     "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json",
    "vocab.txt"};

void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to) {
  for (const char* name : kCompanions) {
    std::error_code error;
    if (!std::filesystem::exists(from / name, error)) continue;
    std::filesystem::copy_file(from / name, to / name,
                               std::filesystem::copy_options::overwrite_existing, error);
    if (!error) continue;
    throw CheckpointError(fmt::format("{} cannot be copied to {}: {}.", (from / name).string(),
                                      (to / name).string(), error.message()));
  }
}

}  // namespace

void write_weights(Engine& engine, LanguageModel& model, const RunFolder& folder,
                   const std::string& from) {
  save_pretrained(engine, folder.path().string(),
                  {.places = model.export_places(), .config_json = model.config().to_json()});
  if (from.empty()) return;
  comm::agree_on_rank_zero<CheckpointError>(engine.group(), "Copying the tokenizer",
                                            [&] { copy_companions(from, folder.path()); });
}

std::string load_weights(Engine& engine, LanguageModel& model, const std::string& path) {
  const auto report =
      load_pretrained(engine, path, {.places = model.export_places(), .tied = model.tied_names()});
  auto text = fmt::format("weights of {}", path);
  const auto& others = report.left_over;
  if (others.empty()) return text;
  constexpr size_t kShown = 4;
  auto first = others;
  if (first.size() > kShown) first.resize(kShown);
  return text + fmt::format(", in which no parameter takes {} tensors: {}{}", others.size(),
                            fmt::join(first, ", "), others.size() > kShown ? ", ..." : "");
}

}  // namespace zero::train
