#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include "zero/train/metrics.h"
#include "zero/train/monitors.h"
#include "zero/train/report_file.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;

/// Returns a file's name in DeepSpeed's form: the metric's name with "_" for "/". The column has
/// the metric's last part.
std::string file_name(const Metric& metric) {
  std::string name(metric.name);
  std::replace(name.begin(), name.end(), '/', '_');
  return name + ".csv";
}
std::string_view column(const Metric& metric) {
  return metric.name.substr(metric.name.rfind('/') + 1);
}

/// Ends a file before its first line of a later position than `last`, and removes a last line that
/// is not whole.
void cut(const fs::path& path, int64_t last) {
  std::ifstream file(path, std::ios::binary);
  uintmax_t kept = 0;
  for (std::string line; std::getline(file, line) && !file.eof(); kept += line.size() + 1) {
    int64_t position = 0;
    const auto read = std::from_chars(line.data(), line.data() + line.size(), position);
    if (read.ec == std::errc{} && position > last) break;
  }
  cut_file(path, kept, "The file", fmt::format("{}", last));
}

class CsvMonitor final : public Monitor {
 public:
  CsvMonitor(fs::path folder, bool append) : folder_(std::move(folder)), append_(append) {}

  void begin(const RunInfo& info) override {
    run_ = info;
    for (const auto& metric : kMetrics) {
      const auto path = folder_ / file_name(metric);
      std::error_code error;
      if (!fs::is_regular_file(path, error)) continue;
      if (append_) {
        cut(path, position(metric, run_, run_.first_step - 1));
      } else {
        fs::remove(path, error);
      }
    }
  }
  void step(const StepReport& report) override {
    const auto values = values_of(report);
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i]) write(i, report.step, *values[i]);
    }
  }
  void rewound(const RewindReport& report) override {
    for (const auto& metric : kMetrics) {
      const auto path = folder_ / file_name(metric);
      std::error_code error;
      if (fs::is_regular_file(path, error))
        cut(path, metric.by_samples ? report.sample_then : report.to);
    }
    run_.first_step = report.to + 1;
    run_.first_sample = report.sample;
  }
  void validation(const ValidationReport& report) override {
    write(kValidationLoss, report.step, report.loss);
    if (report.accuracy) write(kValidationAccuracy, report.step, report.accuracy->share());
  }

 private:
  /// Writes one line at once.
  void write(size_t metric, int64_t step, double value) {
    line_.clear();
    if (!files_[metric]) {
      const auto path = folder_ / file_name(kMetrics[metric]);
      files_[metric].emplace(path, "the file");
      std::error_code error;
      if (fs::is_empty(path, error))
        fmt::format_to(std::back_inserter(line_), "step,{}\n", column(kMetrics[metric]));
    }
    fmt::format_to(std::back_inserter(line_), "{},{}\n", position(kMetrics[metric], run_, step),
                   value);
    files_[metric]->write(line_);
  }

  fs::path folder_;
  bool append_;
  RunInfo run_;
  std::array<std::optional<ReportFile>, kMetrics.size()> files_;
  std::string line_;
};

}  // namespace

std::vector<fs::path> csv_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;
  for (const auto& metric : kMetrics) {
    if (fs::exists(folder / file_name(metric), ignored))
      files.push_back(folder / file_name(metric));
  }
  return files;
}

std::unique_ptr<Monitor> csv_monitor(const std::string& folder, bool append) {
  return std::make_unique<CsvMonitor>(folder, append);
}

}  // namespace zero::train
