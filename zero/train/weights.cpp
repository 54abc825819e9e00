#include "zero/train/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <initializer_list>
#include <set>
#include <string_view>
#include <system_error>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/comm/agreement.h"
#include "zero/engine/pretrained.h"
#include "zero/models/lora/quantised_base.h"
#include "zero/train/adapter_files.h"

namespace zero::train {

namespace {

/// Files of Hugging Face's folders that belong to a model and not to its weights.
constexpr std::string_view kBesideWeights[] = {
    "added_tokens.json", "chat_template.jinja",     "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json",
    "vocab.txt"};

void copy_beside_weights(Engine& engine, const std::filesystem::path& from,
                         const std::filesystem::path& to) {
  if (from.empty()) return;
  comm::agree_on_rank_zero<CheckpointError>(engine.group(), "Copying the tokenizer", [&] {
    copy_files(from, to, kBesideWeights, fail<CheckpointError>);
  });
}

/// Returns some of the names for people.
std::string first_of(std::vector<std::string> names) {
  constexpr size_t kShown = 4;
  const bool more = names.size() > kShown;
  if (more) names.resize(kShown);
  return fmt::format("{}{}", fmt::join(names, ", "), more ? ", ..." : "");
}

/// Rank 0 removes files, as far as they are there.
void remove(Engine& engine, const std::filesystem::path& folder,
            std::initializer_list<const char*> names) {
  if (engine.group().rank() != 0) return;
  std::error_code ignored;
  for (const char* name : names) std::filesystem::remove(folder / name, ignored);
}

}  // namespace

void write_weights(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                   const std::filesystem::path& folder, const std::string& from) {
  SavePretrainedOptions options{.places = model.export_places(),
                                .nf4 = quantised_weights(model.module()),
                                .config_json = model.config().to_json()};
  if (lora) options.merged = merged_products(*lora);
  save_pretrained(engine, folder.string(), options);
  copy_beside_weights(engine, from, folder);
}

void write_trained(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                   const std::filesystem::path& folder, const std::string& from) {
  if (lora) {
    save_adapter(engine, *lora, folder.string(), from);
    copy_beside_weights(engine, from, folder);
    remove(engine, folder, {kWeightsFile, kWeightsIndex, "config.json"});
  } else {
    write_weights(engine, model, lora, folder, from);
    remove(engine, folder, {kAdapterConfig, kAdapterWeights});
  }
}

std::string load_weights(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                         const std::string& path, bool new_head) {
  PretrainedOptions options{.places = model.export_places(),
                            .tied = model.tied_names(),
                            .nf4 = quantised_weights(model.module())};
  const auto head = new_head ? model.head_parameters() : std::set<std::string>();
  options.added = head;
  if (lora) options.added.merge(added_parameters(*lora));
  const auto report = load_pretrained(engine, path, options);
  auto text = fmt::format("weights of {}", path);
  std::vector<std::string> fresh;
  for (const auto& name : report.kept) {
    if (head.contains(name)) fresh.push_back(name);
  }
  if (!fresh.empty()) text += fmt::format(", which has not {}: random ones", first_of(fresh));
  if (const auto& others = report.left_over; !others.empty()) {
    text += fmt::format(", in which no parameter takes {} tensors: {}", others.size(),
                        first_of(others));
  }
  return text;
}

}  // namespace zero::train
