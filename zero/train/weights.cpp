#include "zero/train/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <set>
#include <span>
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

namespace fs = std::filesystem;

/// Copies the tokenizer and its like. With `replaces` the others of these names there are an
/// earlier run's, and go.
void copy_beside_weights(Engine& engine, const WeightsOrigin& origin, const fs::path& to,
                         bool replaces) {
  comm::agree_on_rank_zero<CheckpointError>(engine.group(), "Copying the tokenizer", [&] {
    std::error_code ignored;
    std::set<std::string_view> kept;
    const auto copy_from = [&](const fs::path& folder, std::span<const std::string_view> names) {
      copy_files(folder, to, names, fail<CheckpointError>);
      for (const auto name : names) {
        if (fs::exists(folder / name, ignored)) kept.insert(name);
      }
    };
    const fs::path from = origin.from;
    if (!from.empty()) copy_from(from, kBesideWeights);
    if (!kept.contains("tokenizer.json")) {
      constexpr std::string_view kModel[] = {"tokenizer.model"};
      const auto folder = origin.tokenizer.parent_path();
      if (origin.tokenizer.filename() == "tokenizer.json") {
        copy_from(folder, kBesideWeights);
      } else if (from.empty() && origin.tokenizer.filename() == kModel[0]) {
        copy_from(folder, kModel);
      }
    }
    for (const auto name : kBesideWeights) {
      if (replaces && !kept.contains(name)) fs::remove(to / name, ignored);
    }
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
                   const std::filesystem::path& folder, const WeightsOrigin& origin,
                   bool replaces) {
  SavePretrainedOptions options{.places = model.export_places(),
                                .packed = quantised_weights(model.module()),
                                .config_json = model.config().to_json()};
  if (lora) options.merged = merged_products(*lora);
  save_pretrained(engine, folder.string(), options);
  copy_beside_weights(engine, origin, folder, replaces);
}

void write_trained(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                   const std::filesystem::path& folder, const WeightsOrigin& origin,
                   const RunFiles& earlier) {
  const bool replaces = earlier.replaced && (earlier.weights || earlier.adapter);
  if (lora) {
    const auto& sizes = model.config();
    const auto task = [&] {
      switch (sizes.head()) {
        case Head::next_token:
          return "CAUSAL_LM";
        case Head::classes:
          return kClassesTask;
        case Head::masked_token:
          break;
      }
      return "";  // peft has no name for it
    }();
    save_adapter(engine, *lora, folder.string(),
                 {.base_model = origin.from, .task = task, .labels = sizes.labels()});
    copy_beside_weights(engine, origin, folder, replaces);
    if (earlier.weights) remove_weights(engine, folder);
  } else {
    write_weights(engine, model, lora, folder, origin, replaces);
    if (!earlier.adapter) return;
    if (has_adapter_labels(folder.string())) remove(engine, folder, {kAdapterLabels});
    remove(engine, folder, {kAdapterConfig, kAdapterWeights});
  }
}

void remove_weights(Engine& engine, const std::filesystem::path& folder) {
  if (engine.group().rank() != 0) return;
  std::error_code ignored;
  for (const auto& path : own_weights_in(folder)) std::filesystem::remove(path, ignored);
  remove(engine, folder, {"config.json"});
}

void remove_model(Engine& engine, const std::filesystem::path& folder) {
  remove_weights(engine, folder);
  if (engine.group().rank() != 0) return;
  std::error_code ignored;
  for (const auto name : kBesideWeights) fs::remove(folder / name, ignored);
  fs::remove(folder, ignored);  // if it is empty
}

std::string load_weights(Engine& engine, LanguageModel& model, const std::optional<Lora>& lora,
                         const std::string& path, bool new_head) {
  PretrainedOptions options{.places = model.export_places(),
                            .tied = model.tied_names(),
                            .packed = quantised_weights(model.module())};
  const auto head = new_head ? model.head_parameters() : std::set<std::string>();
  options.added = head;
  if (lora) {
    options.added.merge(added_parameters(*lora));
    // An adapter that is loaded brings what was trained whole.
    if (!new_head)
      options.added.insert(lora->saved_parameters.begin(), lora->saved_parameters.end());
  }
  const auto report = load_pretrained(engine, path, options);
  auto text = fmt::format("weights of {}", path);
  std::vector<std::string> fresh;
  for (const auto& name : report.kept) {
    if (!head.contains(name)) continue;
    const auto saved = [&] { return std::ranges::count(lora->saved_parameters, name) > 0; };
    if (lora && !saved()) {
      throw ConfigError(fmt::format(
          "{} has no '{}', which would keep the random values that it begins with, and be in no "
          "file. Name its module in --lora-modules-to-save.",
          path, name));
    }
    fresh.push_back(name);
  }
  if (!fresh.empty())
    text += fmt::format("; random, since they are not there: {}", first_of(fresh));
  if (const auto& others = report.left_over; !others.empty()) {
    text += fmt::format("; {} tensors there are not used: {}", others.size(), first_of(others));
  }
  return text;
}

}  // namespace zero::train
