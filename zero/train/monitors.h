// The monitors that a configuration names: `tensorboard` and `csv_monitor`.
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "zero/train/monitor.h"
#include "zero/train/options.h"

namespace zero::train {

/// Throws ConfigError where a monitor's folder cannot be made or written, or where it holds an
/// earlier run's files and neither `overwrite` nor `resume` says what to do with them. Changes
/// nothing.
void check_monitors(const Options& options);

/// Makes their folders, and the monitors. Throws ConfigError.
std::vector<std::unique_ptr<Monitor>> make_monitors(const Options& options);

/// The event files in `folder` that `tensorboard_monitor` wrote, and the files of `csv_monitor`.
std::vector<std::filesystem::path> event_files(const std::filesystem::path& folder);
std::vector<std::filesystem::path> csv_files(const std::filesystem::path& folder);

}  // namespace zero::train
