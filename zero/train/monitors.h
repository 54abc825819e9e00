// The monitors that a configuration names: `tensorboard`, `csv_monitor`, `wandb`, and the file of
// `flops_profiler`.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
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

/// An offline run for Weights & Biases, in a folder of its own in `folder`, which exists. Each step
/// is written at once. `append` continues the newest run that is there, under its ID: what it wrote
/// beyond the step from which this one goes on is cut off. Else those that are there go, with the
/// first record. Throws Error that names the file.
std::unique_ptr<Monitor> wandb_monitor(const std::string& folder, bool append,
                                       const WandbSettings& settings);

/// The files in `folder` that `tensorboard_monitor`, `csv_monitor` and `wandb_monitor` wrote.
std::vector<std::filesystem::path> event_files(const std::filesystem::path& folder);
std::vector<std::filesystem::path> csv_files(const std::filesystem::path& folder);
std::vector<std::filesystem::path> wandb_files(const std::filesystem::path& folder);

}  // namespace zero::train
