// Reads DeepSpeed's folders (0.19.8; docs/zero-ckpt.md has the facts of the layout) as views.
#include "zero/checkpoint/foreign/deepspeed.h"

#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <nlohmann/json.hpp>

#include "zero/base/error.h"
#include "zero/base/json.h"

namespace zero::foreign {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::string_view kModelFile = "model_states.pt";
constexpr std::string_view kOptimizerFile = "optim_states.pt";

bool has_model_files(const fs::path& folder) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename().string().ends_with(kModelFile)) return true;
  }
  return false;
}

// Returns the folder of a step: `path` itself, or the folder that its file `latest` names.
std::optional<fs::path> step_folder(const fs::path& path) {
  if (!fs::is_directory(path)) return {};
  if (has_model_files(path)) return path;
  for (const auto* name : {"latest", "latest_universal"}) {
    std::ifstream file(path / name);
    std::string tag;
    if (!std::getline(file, tag) || tag.empty() || tag.find('/') != std::string::npos) continue;
    if (!fs::is_directory(path / tag))
      throw CheckpointError(fmt::format("'{}' names the folder '{}', which is not there.",
                                        (path / name).string(), excerpt(tag)));
    return path / tag;
  }
  return {};
}

// Returns the file of each data-parallel rank: its number stands behind "zero_pp_rank_". A file
// without one ("mp_rank_00_model_states.pt") is rank 0's.
std::vector<fs::path> files_by_rank(const fs::path& folder, std::string_view tail) {
  std::map<int64_t, fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (!name.ends_with(tail)) continue;
    if (name.starts_with("expp_rank") || name.starts_with("layer_") ||
        name.find("mp_rank_00") == std::string::npos)
      throw CheckpointError(
          fmt::format("'{}' is a file of experts, pipeline or tensor parallelism, which this "
                      "program does not read. Save the model without them.",
                      entry.path().string()));
    constexpr std::string_view kRank = "zero_pp_rank_";
    const auto at = name.find(kRank);
    int64_t rank = -1;
    if (at != std::string::npos)
      std::from_chars(name.data() + at + kRank.size(), name.data() + name.size(), rank);
    found[rank] = entry.path();
  }
  // A folder that serves every stage has the model file of rank 0 in both forms.
  if (found.contains(-1) && found.size() > 1) found.erase(-1);
  std::vector<fs::path> files;
  for (const auto& [rank, path] : found) {
    if (rank > static_cast<int64_t>(files.size()))
      throw CheckpointError(
          fmt::format("'{}' has a file of rank {} and none of rank {} ({}). Copy "
                      "the files of all ranks.",
                      folder.string(), rank, files.size(), tail));
    files.push_back(path);
  }
  return files;
}

json json_or_empty(const Value* value) {
  const auto text = value == nullptr ? std::nullopt : value->as_json();
  return text ? parse_json(*text) : json::object();
}

}  // namespace

json hyper_parameters(const Value& group) {
  auto made = json::object();
  for (size_t i = 0; i + 1 < group.items.size(); i += 2) {
    const auto key = group.items[i]->as_text();
    if (key && *key != "params") made[*key] = json_or_empty(group.items[i + 1]);
  }
  return made;
}

std::optional<int64_t> steps_of(const PtFile& file, const Value* step) {
  if (step == nullptr) return {};
  if (const auto number = step->as_integer()) return number;
  const auto tensor = file.tensor(*step);
  if (!tensor || tensor->numel() != 1) return {};
  return static_cast<int64_t>(tensor->read().reshape({}).to(at::kDouble).item<double>());
}
std::optional<LossScaleState> loss_scale_of(const Value& scaler) {
  const auto number = [&](const char* key, double otherwise) {
    const auto* value = scaler.find(key);
    return value == nullptr ? otherwise : value->as_number().value_or(otherwise);
  };
  const double scale = number("cur_scale", 1);
  const bool dynamic = number("dynamic", number("dynamic_loss_scale", 0)) != 0;
  if (!dynamic && scale == 1) return {};
  // DeepSpeed does not count the first step without an overflow.
  const double clean = number("cur_iter", 0) - number("last_overflow_iter", -1) - 2;
  return LossScaleState{.scale = scale,
                        .clean = static_cast<int64_t>(std::max(clean, 0.0)),
                        .hysteresis = static_cast<int64_t>(number("cur_hysteresis", 1))};
}

bool is_deepspeed(const fs::path& path) { return step_folder(path).has_value(); }

CheckpointView view_deepspeed(const fs::path& path, bool weights_only) {
  // If a message does not name a file, it gets the folder's name.
  const auto folder = step_folder(path).value();
  CheckpointView view;
  try {
    std::vector<PtFile> models;
    for (const auto& file : files_by_rank(folder, kModelFile)) {
      models.emplace_back(file);
      models.back().verify();
    }
    const DeepspeedModel model(models.front());
    model.describe(view);
    if (fs::is_directory(folder / "zero")) {
      view_universal(folder / "zero", model, view);
      const auto first = files_by_rank(folder, kModelFile).front().filename().string();
      model.add_rest(view, models, first.starts_with("zero_pp_rank_"));
    } else if (const auto files = files_by_rank(folder, kOptimizerFile); files.empty()) {
      if (!weights_only) view_unsharded(model, view);
      model.add_rest(view, models, false);
    } else {
      view_sharded(files, models, view);
    }
  } catch (const CheckpointError& error) {
    const std::string message = error.what();
    if (message.starts_with("'")) throw;
    throw CheckpointError(fmt::format("'{}': {}.", folder.string(), message));
  }
  return view;
}

}  // namespace zero::foreign
