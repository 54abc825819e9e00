// The monitors that a configuration names: `tensorboard`, `csv_monitor`, and the file of
// `flops_profiler`.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "zero/train/monitor.h"
#include "zero/train/options.h"

namespace zero::train {

/// Throws ConfigError if a monitor's folder cannot be made or written, or if it holds an earlier
/// run's files and neither `overwrite` nor `resume` says what to do with them. Changes nothing.
void check_monitors(const Options& options);

/// Makes the monitors and their folders. Throws ConfigError.
std::vector<std::unique_ptr<Monitor>> make_monitors(const Options& options);

/// Return the files in `folder` that `tensorboard_monitor` and `csv_monitor` wrote.
std::vector<std::filesystem::path> event_files(const std::filesystem::path& folder);
std::vector<std::filesystem::path> csv_files(const std::filesystem::path& folder);

}  // namespace zero::train
