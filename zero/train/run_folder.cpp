#include "zero/train/run_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/train/adapter_files.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kCheckpoint = "checkpoint-";
constexpr const char* kJobs = "jobs.txt";
constexpr std::string_view kFirstEvent = R"({"event":)";  // with which the lines of a log begin

std::vector<fs::path> entries(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) paths.push_back(entry.path());
  return paths;
}

/// Returns the number in a file name that consists of `before`, a number and `after`.
std::optional<int64_t> number_between(const fs::path& file, std::string_view before,
                                      std::string_view after = "") {
  const std::string name = file.filename();
  if (name.size() < before.size() + after.size() || !name.starts_with(before) ||
      !name.ends_with(after))
    return std::nullopt;
  int64_t number = 0;
  const char* end = name.data() + name.size() - after.size();
  const auto [stop, error] = std::from_chars(name.data() + before.size(), end, number);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return number;
}

/// Returns the steps of all checkpoints in `folder`, whole or not.
std::vector<int64_t> checkpoint_steps(const fs::path& folder) {
  std::vector<int64_t> steps;
  for (const auto& path : entries(folder)) {
    if (const auto step = number_between(path, kCheckpoint)) steps.push_back(*step);
  }
  return steps;
}

/// Returns a file of a model in `folder`, as write_weights writes them, if there is one.
std::optional<fs::path> file_of_a_model(const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder / "config.json", error)) return folder / "config.json";
  if (auto weights = own_weights_in(folder); !weights.empty()) return std::move(weights.front());
  for (const auto name : kBesideWeights) {
    if (fs::exists(folder / name, error)) return folder / name;
  }
  return std::nullopt;
}

/// Returns the folder itself, or the nearest one above it that exists.
fs::path nearest_existing(fs::path path) {
  std::error_code error;  // a path that cannot be looked at counts as absent
  path = fs::absolute(path, error);
  while (!fs::exists(path, error) && path.has_relative_path()) path = path.parent_path();
  return path;
}

}  // namespace

fs::path RunFolder::checkpoint(int64_t step) const {
  return path_ / fmt::format("{}{}", kCheckpoint, step);
}

void check_folder(const fs::path& path, std::string_view what, std::string_view remedy) {
  std::error_code error;
  const auto existing = nearest_existing(path);
  if (!fs::is_directory(existing, error)) {
    throw ConfigError(fmt::format("{} is {}, but {} is not a folder. {}", what, path.string(),
                                  existing.string(), remedy));
  }
  if (access(existing.c_str(), W_OK | X_OK) != 0) {
    throw ConfigError(fmt::format("{} is {}, but {} cannot be written: {}. {}", what, path.string(),
                                  existing.string(), std::strerror(errno), remedy));
  }
}

bool RunFolder::has_log() const {
  std::error_code error;
  if (!fs::exists(log(), error)) return false;
  if (!fs::is_regular_file(log(), error)) return true;
  std::string begin(kFirstEvent.size(), '\0');
  std::ifstream file(log(), std::ios::binary);
  return file.read(begin.data(), std::ssize(begin)) && begin == kFirstEvent;
}

RunFiles RunFolder::written() const {
  RunFiles all;
  std::error_code error;
  if (!fs::is_regular_file(log(), error)) return all;
  std::ifstream file(log(), std::ios::binary);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kFirstEvent)) continue;
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (object.is_discarded() || object.at("event") != "config") continue;
    const auto option = [&](const char* key) {
      const nlohmann::json::json_pointer place(std::string("/train/lora/") + key);
      return object.contains(place) ? object.at(place) : nlohmann::json();
    };
    const auto rank = option("rank");
    const auto adapter = option("adapter");
    const bool lora = (rank.is_number() && rank > 0) ||
                      (adapter.is_string() && !adapter.get<std::string>().empty());
    all.weights = all.weights || !lora;
    all.adapter = all.adapter || lora;
    all.merged = all.merged || (lora && option("merge") == true);
  }
  return all;
}

std::optional<fs::path> RunFolder::file_in_the_way() const {
  if (auto file = file_of_a_model(path_)) return file;
  if (auto file = file_of_a_model(merged())) return file;
  std::error_code error;
  for (const char* name : {kAdapterConfig, kAdapterWeights, kAdapterLabels}) {
    if (fs::exists(path_ / name, error)) return path_ / name;
  }
  // An empty log belongs to a run that was refused, or ended before it began.
  if (!fs::exists(log(), error)) {
    if (fs::exists(path_ / kJobs, error)) return path_ / kJobs;
  } else if (!fs::is_empty(log(), error)) {
    return log();
  }
  return std::nullopt;
}

bool RunFolder::has_weights() const {
  std::error_code ignored;
  return fs::exists(model(), ignored) || fs::exists(path_ / kWeightsIndex, ignored) ||
         fs::exists(path_ / kAdapterWeights, ignored);
}

void RunFolder::check(bool overwrite, bool resume, bool merges) const {
  check_folder(path_, "The option 'out'", "Give another --out.");
  const auto refuse = [&](const std::optional<fs::path>& file, std::string_view why) {
    if (!file) return;
    throw ConfigError(
        fmt::format("{} is in the way of a run, which would replace or remove it, and {}. Give "
                    "another --out, or move the file away.",
                    file->string(), why));
  };
  if (!has_log() && !resume) {
    refuse(file_in_the_way(), fmt::format("{} has no log.jsonl that a run wrote", path_.string()));
  } else if (merges && has_log() && !written().merged) {
    refuse(file_of_a_model(merged()), fmt::format("no run of {} wrote it", log().string()));
  }
  const bool holds_run = has_log() || last_checkpoint();
  if (holds_run && !overwrite && !resume) {
    throw ConfigError(
        fmt::format("{} holds an earlier run. Give another --out, or --overwrite to replace it, or "
                    "--resume to continue it.",
                    path_.string()));
  }
  if (resume && !last_checkpoint()) {
    throw ConfigError(
        fmt::format("{} holds no checkpoint to resume. Checkpoints are written with --save-every.",
                    path_.string()));
  }
}

void RunFolder::make() const {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error) {
    throw ConfigError(fmt::format("Cannot make the folder {}: {}. Give another --out.",
                                  path_.string(), error.message()));
  }
}

std::set<std::string> RunFolder::jobs() const {
  std::ifstream file(path_ / kJobs);
  std::set<std::string> names;
  for (std::string line; std::getline(file, line);) names.insert(line);
  return names;
}

void RunFolder::write_jobs(const std::set<std::string>& names) const {
  std::string lines;
  for (const auto& name : names) lines += name + "\n";
  write_file(path_ / kJobs, lines, fail<CheckpointError>);
}

std::vector<int64_t> RunFolder::checkpoints() const {
  auto steps = checkpoint_steps(path_);
  std::erase_if(steps, [&](int64_t step) {
    std::error_code error;
    return !has_manifest(checkpoint(step)) && !fs::exists(checkpoint(step) / kEarlierMarker, error);
  });
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<int64_t> RunFolder::last_checkpoint(int64_t most) const {
  const auto all = checkpoints();
  const auto beyond = std::upper_bound(all.begin(), all.end(), most);
  if (beyond == all.begin()) return std::nullopt;
  return *(beyond - 1);
}

int64_t RunFolder::checkpoint_bytes(int64_t step) const {
  int64_t bytes = 0;
  for (const auto& path : entries(checkpoint(step))) {
    std::error_code error;
    const auto size = fs::file_size(path, error);
    if (!error) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

void RunFolder::cut_log(int64_t step) const {
  std::error_code error;
  if (!fs::is_regular_file(log(), error)) return;  // a device or a pipe keeps nothing
  std::ifstream file(log(), std::ios::binary);
  uintmax_t kept = 0;
  bool beyond = false;
  std::string rewinds;  // lines that stay, since they are about the whole run
  for (std::string line; std::getline(file, line) && !file.eof();) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (object.is_object()) {
      const auto found = object.find(object.contains("step") ? "step" : "steps");
      beyond = beyond || (found != object.end() && found->is_number_integer() &&
                          found->get<int64_t>() > step);
      if (beyond && object.value("event", "") == "rewind") rewinds += line + "\n";
    }
    if (!beyond) kept += line.size() + 1;
  }
  fs::resize_file(log(), kept, error);
  if (!error && !rewinds.empty()) std::ofstream(log(), std::ios::app) << rewinds;
  if (error) {
    throw CheckpointError(fmt::format("The log {} cannot be cut back to step {}: {}.",
                                      log().string(), step, error.message()));
  }
}

void RunFolder::remove_left_overs() const {
  for (const auto& path : entries(path_)) {
    std::error_code ignored;
    auto left_by = number_between(path, kCheckpoint, ".partial");
    if (!left_by) left_by = number_between(path, kCheckpoint, ".earlier");
    if (left_by) WholeFolder::remove_left_overs(checkpoint(*left_by));
    if (number_between(path, model().filename().string() + ".", ".tmp") ||
        number_between(path, model_config().filename().string() + ".", ".tmp"))
      fs::remove_all(path, ignored);
  }
}

void RunFolder::keep_checkpoints(const std::function<bool(int64_t step)>& keep) const {
  std::error_code ignored;
  for (const auto& folder : drop_checkpoints(keep)) fs::remove_all(folder, ignored);
}

std::vector<fs::path> RunFolder::drop_checkpoints(
    const std::function<bool(int64_t step)>& keep) const {
  std::vector<fs::path> dropped;
  for (const int64_t step : checkpoint_steps(path_)) {
    if (keep(step)) continue;
    // Folders of other programs may have such names too.
    std::error_code error;
    if (!is_save(checkpoint(step)) && !fs::exists(checkpoint(step) / kEarlierMarker, error))
      continue;
    // The file that marks the checkpoint as whole goes first.
    std::error_code ignored;
    for (const char* marker : {Manifest::kFile, kEarlierMarker})
      fs::remove(checkpoint(step) / marker, ignored);
    dropped.push_back(checkpoint(step));
  }
  return dropped;
}

}  // namespace zero::train
