#include "zero/train/run_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include "zero/base/error.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kCheckpoint = "checkpoint-";

/// The steps of all checkpoints in `folder`, whole or not.
std::vector<int64_t> checkpoint_steps(const fs::path& folder) {
  std::vector<int64_t> steps;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(kCheckpoint)) continue;
    int64_t step = 0;
    const char* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + kCheckpoint.size(), end, step);
    if (error == std::errc{} && stop == end) steps.push_back(step);
  }
  return steps;
}

/// The folder itself, or the nearest one above it that exists.
fs::path nearest_existing(fs::path path) {
  path = fs::absolute(path);
  while (!fs::exists(path) && path.has_relative_path()) path = path.parent_path();
  return path;
}

}  // namespace

fs::path RunFolder::checkpoint(int64_t step) const {
  return path_ / fmt::format("{}{}", kCheckpoint, step);
}

void RunFolder::check(bool overwrite, bool resume) const {
  std::error_code error;
  const auto existing = nearest_existing(path_);
  if (!fs::is_directory(existing, error)) {
    throw ConfigError(
        fmt::format("The option 'out' is {}, but {} is not a folder. Give another --out.",
                    path_.string(), existing.string()));
  }
  if (access(existing.c_str(), W_OK | X_OK) != 0) {
    throw ConfigError(
        fmt::format("The option 'out' is {}, but {} cannot be written: {}. Give another --out.",
                    path_.string(), existing.string(), std::strerror(errno)));
  }
  // An empty log is of a run that was refused.
  const bool holds_run =
      (fs::exists(log(), error) && !fs::is_empty(log(), error)) || fs::exists(model(), error);
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

std::optional<int64_t> RunFolder::last_checkpoint() const {
  std::optional<int64_t> last;
  for (const int64_t step : checkpoint_steps(path_)) {
    std::error_code error;
    if (fs::exists(checkpoint(step) / kMarker, error) && (!last || step > *last)) last = step;
  }
  return last;
}

void RunFolder::remove_other_checkpoints(int64_t step) const {
  for (const int64_t other : checkpoint_steps(path_)) {
    std::error_code ignored;
    if (other != step) fs::remove_all(checkpoint(other), ignored);
  }
}

}  // namespace zero::train
