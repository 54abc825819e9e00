#include "zero/train/monitors.h"

#include <fmt/format.h>

#include <string>
#include <system_error>

#include "zero/base/error.h"
#include "zero/train/resume.h"
#include "zero/train/run_folder.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;

/// A monitor that writes files into a folder.
struct FileMonitor {
  const char* section;
  fs::path folder;
  std::string remedy;
  std::vector<fs::path> (*files)(const fs::path& folder);
  std::unique_ptr<Monitor> (*make)(const std::string& folder, bool append);
};

std::vector<FileMonitor> chosen(const Options& options) {
  std::vector<FileMonitor> all;
  const auto add = [&](const MonitorSettings& settings, const char* section, const char* option,
                       auto files, auto make) {
    if (!settings.enabled) return;
    const fs::path base = settings.output_path.empty() ? options.out : settings.output_path;
    all.push_back(
        {section, settings.job_name.empty() ? base : base / settings.job_name,
         fmt::format("Give another {0} DIR, or {1}.output_path and {1}.job_name.", option, section),
         files, make});
  };
  add(options.tensorboard, "tensorboard", "--tensorboard", event_files, tensorboard_monitor);
  add(options.csv_monitor, "csv_monitor", "--csv", csv_files, csv_monitor);
  return all;
}

}  // namespace

void check_monitors(const Options& options) {
  for (const auto& monitor : chosen(options)) {
    const auto& folder = monitor.folder;
    check_folder(folder, fmt::format("The folder of {}", monitor.section), monitor.remedy);
    const auto files = monitor.files(folder);
    if (files.empty() || options.overwrite || continues(options)) continue;
    throw ConfigError(fmt::format(
        "The folder of {} is {}, which holds an earlier run's {}. Give --overwrite to replace that "
        "run, or --resume to continue it. {}",
        monitor.section, folder.string(), files.front().filename().string(), monitor.remedy));
  }
}

std::vector<std::unique_ptr<Monitor>> make_monitors(const Options& options) {
  std::vector<std::unique_ptr<Monitor>> monitors;
  for (const auto& monitor : chosen(options)) {
    const auto& folder = monitor.folder;
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) {
      throw ConfigError(fmt::format("Cannot make the folder {} of {}: {}. {}", folder.string(),
                                    monitor.section, error.message(), monitor.remedy));
    }
    monitors.push_back(monitor.make(folder, continues(options)));
  }
  const auto& flops = options.flops_profiler;
  if (flops.enabled && !flops.output_file.empty())
    monitors.push_back(flops_monitor(flops.output_file));
  return monitors;
}

}  // namespace zero::train
