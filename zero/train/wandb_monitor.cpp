// Note [Offline runs]
// What the package of Weights & Biases leaves where it sends nothing: a folder
// offline-run-TIME-ID with a file run-ID.wandb, which `wandb sync` reads. The file begins with
// seven bytes that say what it is; then come records (zero/train/record_log.h), each a message
// Record (wandb/proto/wandb_internal.proto): who wrote it, the run, its configuration, the axes of
// its metrics; for each step a row of the history and the summary, which is the last row; at the
// end the exit.
//
// A row's number, "_step", must grow, and a validation comes behind the row of its step. So rows
// are counted, and "step" and "samples" are the axes.
//
// Only folders of runs whose ID begins as ours do are taken for ours: the package may write to the
// same folder.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include "zero/base/error.h"
#include "zero/train/metrics.h"
#include "zero/train/monitors.h"
#include "zero/train/protobuf.h"
#include "zero/train/record_log.h"
#include "zero/train/report_file.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using protobuf::Writer;

constexpr std::string_view kFolder = "offline-run-";
constexpr std::string_view kFile = "run-";
constexpr std::string_view kSuffix = ".wandb";
constexpr std::string_view kOurs = "zero";  // how an ID begins
constexpr size_t kIdLength = 12;
constexpr size_t kTimeLength = 16;  // "20260131_235959-"
constexpr std::string_view kFileHeader(":W&B\xe1\xbe\0", 7);

// The fields of the messages.
namespace record_fields {
constexpr int kNumber = 1, kHistory = 2, kSummary = 3, kConfig = 5, kMetric = 12, kRun = 17,
              kExit = 18, kHeader = 21;
}
namespace header_fields {
constexpr int kVersion = 1;
constexpr int kProducer = 1, kLeastConsumer = 2;  // of the version
}  // namespace header_fields
namespace run_fields {
constexpr int kId = 1, kEntity = 2, kProject = 3, kGroup = 6, kHost = 13, kStart = 17;
constexpr int kSeconds = 1, kNanoseconds = 2;  // of a time
}  // namespace run_fields
namespace metric_fields {
constexpr int kName = 1, kPattern = 2, kAxis = 4, kOptions = 6;
constexpr int kDrawsAxis = 1, kDefined = 3;  // of the options
}  // namespace metric_fields
namespace item_fields {
constexpr int kItem = 1;  // of a history; of a summary and of a configuration: what changes
constexpr int kKey = 1, kPath = 2, kValue = 16;
constexpr int kStep = 2, kStepNumber = 1;  // of a history
}  // namespace item_fields
namespace exit_fields {
constexpr int kCode = 1, kRuntime = 2;
}

/// "run-ID.wandb" in a folder of ours.
std::optional<fs::path> run_file(const fs::path& folder) {
  const auto name = folder.filename().string();
  if (!name.starts_with(kFolder) || name.size() != kFolder.size() + kTimeLength + kIdLength)
    return std::nullopt;
  const auto id = name.substr(kFolder.size() + kTimeLength);
  if (!id.starts_with(kOurs)) return std::nullopt;
  auto file = folder / fmt::format("{}{}{}", kFile, id, kSuffix);
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored)) return std::nullopt;
  return file;
}

std::string new_id() {
  constexpr std::string_view kDigits = "0123456789abcdefghijklmnopqrstuvwxyz";
  std::random_device random;
  std::uniform_int_distribution<size_t> digit(0, kDigits.size() - 1);
  std::string id(kOurs);
  while (id.size() < kIdLength) id.push_back(kDigits[digit(random)]);
  return id;
}

/// What a resumed run goes on from.
struct Earlier {
  uintmax_t bytes = 0;  ///< of the file, that stay
  int64_t records = 0;
  int64_t rows = 0;
  double start = 0;  ///< seconds since 1970; 0: there is no run
};

/// The number of an item of a history, as "step"; none where it is no row of it.
std::optional<int64_t> number_of(std::string_view history, std::string_view key) {
  for (protobuf::Reader items(history); const auto item = items.next();) {
    if (item->number != item_fields::kItem) continue;
    std::string_view name;
    std::string_view value;
    for (protobuf::Reader fields(item->bytes); const auto field = fields.next();) {
      if (field->number == item_fields::kPath) name = field->bytes;
      if (field->number == item_fields::kValue) value = field->bytes;
    }
    if (name != key) continue;
    const auto number = Json::parse(value, nullptr, false);
    if (number.is_number_integer()) return number.get<int64_t>();
  }
  return std::nullopt;
}

double start_of(std::string_view run) {
  double start = 0;
  for (protobuf::Reader fields(run); const auto field = fields.next();) {
    if (field->number != run_fields::kStart) continue;
    for (protobuf::Reader time(field->bytes); const auto part = time.next();) {
      const auto value = static_cast<double>(part->value);
      start += part->number == run_fields::kSeconds ? value : value * 1e-9;
    }
  }
  return start;
}

/// The file up to its first row beyond `step`, or its end as a run.
Earlier read_until(const fs::path& path, int64_t step) {
  std::ifstream stream(path, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  Earlier earlier;
  if (!file.starts_with(kFileHeader)) return earlier;
  earlier.bytes = kFileHeader.size();
  for (RecordReader records(file, kFileHeader.size()); const auto record = records.next();) {
    for (protobuf::Reader fields(*record); const auto field = fields.next();) {
      if (field->number == record_fields::kExit) return earlier;
      if (field->number == record_fields::kRun) earlier.start = start_of(field->bytes);
      if (field->number != record_fields::kHistory) continue;
      if (number_of(field->bytes, "step").value_or(0) > step) return earlier;
      ++earlier.rows;
    }
    earlier.bytes = records.end();
    ++earlier.records;
  }
  return earlier;
}

class WandbMonitor final : public Monitor {
 public:
  WandbMonitor(fs::path folder, bool append, WandbSettings settings)
      : folder_(std::move(folder)), append_(append), settings_(std::move(settings)) {}

  void begin(const RunInfo& info) override {
    run_ = info;
    step_ = run_.first_step - 1;
    if (append_) {
      go_on();
    } else {
      std::error_code ignored;
      for (const auto& file : wandb_files(folder_)) fs::remove_all(file.parent_path(), ignored);
    }
    if (!file_) start();
    configuration();
  }
  void rewound(const RewindReport& report) override {
    step_ = report.to;
    run_.first_step = report.to + 1;
    run_.first_sample = report.sample;
    go_on();
    configuration();  // which the cut may have taken
  }
  void step(const StepReport& report) override {
    step_ = report.step;
    const auto values = values_of(report);
    row([&](Writer& row) {
      for (size_t i = 0; i < values.size(); ++i) {
        if (values[i]) number(row, kMetrics[i].name, *values[i]);
      }
    });
  }
  void validation(const ValidationReport& report) override {
    step_ = report.step;
    row([&](Writer& row) { number(row, kMetrics[kValidationLoss].name, report.loss); });
  }
  void sample(const std::string& prompt, const std::string& text) override {
    record(record_fields::kSummary, [&](Writer& summary) {
      item(summary, item_fields::kPath, "sample", text_of(prompt + text));
    });
    flush();
  }
  void end(const EndReport& report) override {
    constexpr int64_t kInterrupted = 130;
    record(record_fields::kExit, [&](Writer& exit) {
      exit.integer(exit_fields::kCode, report.reason == "finished" ? 0 : kInterrupted);
      exit.integer(exit_fields::kRuntime, static_cast<int64_t>(seconds_since_1970() - start_));
    });
    flush();
  }

 private:
  void configuration() {
    const auto settings = Json::parse(run_.config_json);
    record(record_fields::kConfig, [&](Writer& config) {
      for (const auto& [key, value] : settings.items())
        item(config, item_fields::kKey, key, text_of(value));
    });
    flush();
  }

  /// The newest run, cut back to the step from which this one goes on.
  void go_on() {
    auto files = wandb_files(folder_);
    if (files.empty()) return;
    std::sort(files.begin(), files.end());
    const auto earlier = read_until(files.back(), step_);
    if (earlier.start == 0) return;
    cut_file(files.back(), earlier.bytes, "The W&B run", fmt::format("step {}", step_));
    position_ = earlier.bytes;
    count_ = earlier.records;
    rows_ = earlier.rows;
    start_ = earlier.start;
    file_.emplace(files.back(), kWhat);
  }

  void start() {
    start_ = seconds_since_1970();
    const auto id = new_id();
    const auto folder = folder_ / fmt::format("{}{:%Y%m%d_%H%M%S}-{}", kFolder,
                                              fmt::localtime(static_cast<std::time_t>(start_)), id);
    std::error_code error;
    fs::create_directories(folder / "files", error);  // where the package keeps more
    if (error) {
      throw Error(
          fmt::format("Cannot make the folder {} of wandb: {}.", folder.string(), error.message()));
    }
    file_.emplace(folder / fmt::format("{}{}{}", kFile, id, kSuffix), kWhat);
    records_ = kFileHeader;
    record(record_fields::kHeader, [](Writer& header) {
      header.message(header_fields::kVersion, [](Writer& version) {
        version.bytes(header_fields::kProducer, "libzero");
        version.bytes(header_fields::kLeastConsumer, "0.40.0");
      });
    });
    record(record_fields::kRun, [&](Writer& run) {
      const auto name = [&](int field, std::string_view value) {
        if (!value.empty()) run.bytes(field, value);
      };
      name(run_fields::kId, id);
      name(run_fields::kEntity, settings_.team);
      name(run_fields::kProject, settings_.project);
      name(run_fields::kGroup, settings_.group);
      name(run_fields::kHost, host_name());
      run.message(run_fields::kStart, [&](Writer& time) {
        const double seconds = std::floor(start_);
        time.integer(run_fields::kSeconds, static_cast<int64_t>(seconds));
        time.integer(run_fields::kNanoseconds, static_cast<int64_t>((start_ - seconds) * 1e9));
      });
    });
    for (const std::string_view axis : {"step", "samples"}) metric(metric_fields::kName, axis, {});
    metric(metric_fields::kPattern, "Train/Steps/*", "step");
    metric(metric_fields::kPattern, "Validation/Steps/*", "step");
    metric(metric_fields::kPattern, "Train/Breakdown/*", "step");
    metric(metric_fields::kPattern, "Train/Samples/*", "samples");
  }

  void metric(int field, std::string_view name, std::string_view axis) {
    record(record_fields::kMetric, [&](Writer& metric) {
      metric.bytes(field, name);
      if (!axis.empty()) metric.bytes(metric_fields::kAxis, axis);
      metric.message(metric_fields::kOptions, [&](Writer& options) {
        if (!axis.empty()) options.integer(metric_fields::kDrawsAxis, 1);
        options.integer(metric_fields::kDefined, 1);
      });
    });
  }

  /// A row of the history, and the same in the summary, at once.
  template <class Body>
  void row(const Body& body) {
    const double now = seconds_since_1970();
    const int64_t number_of_row = rows_++;
    const auto items = [&](Writer& row) {
      number(row, "_step", number_of_row);
      number(row, "_timestamp", now);
      number(row, "_runtime", now - start_);
      number(row, "step", step_);
      number(row, "samples", position({"", true}, run_, step_));
      body(row);
    };
    record(record_fields::kHistory, [&](Writer& history) {
      items(history);
      history.message(item_fields::kStep,
                      [&](Writer& step) { step.integer(item_fields::kStepNumber, number_of_row); });
    });
    record(record_fields::kSummary, items);
    flush();
  }

  static void item(Writer& record, int key_field, std::string_view key, std::string_view value) {
    record.message(item_fields::kItem, [&](Writer& item) {
      item.bytes(key_field, key);
      item.bytes(item_fields::kValue, value);
    });
  }
  void number(Writer& record, std::string_view key, int64_t value) {
    value_.clear();
    fmt::format_to(std::back_inserter(value_), "{}", value);
    item(record, item_fields::kPath, key, value_);
  }
  /// As Python's JSON has it: the package writes "NaN" and "Infinity" too.
  void number(Writer& record, std::string_view key, double value) {
    value_.clear();
    if (std::isfinite(value)) {
      fmt::format_to(std::back_inserter(value_), "{}", value);
    } else {
      value_ = std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
    }
    item(record, item_fields::kPath, key, value_);
  }
  static std::string text_of(const Json& value) {
    // A model may produce bytes that are not UTF-8: they become U+FFFD.
    return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  /// A record, behind those that are not written yet.
  template <class Body>
  void record(int kind, const Body& body) {
    message_.clear();
    Writer writer(message_);
    writer.integer(record_fields::kNumber, ++count_);
    writer.message(kind, body);
    append_record(records_, position_, message_);
  }
  void flush() {
    file_->write(records_);
    position_ += records_.size();
    records_.clear();
  }

  static constexpr std::string_view kWhat = "the W&B run";
  fs::path folder_;
  bool append_;
  WandbSettings settings_;
  RunInfo run_;
  int64_t step_ = 0;
  std::optional<ReportFile> file_;
  uint64_t position_ = 0;  // of the file, behind what is written
  int64_t count_ = 0;      // of records
  int64_t rows_ = 0;
  double start_ = 0;  // seconds since 1970
  std::string records_, message_, value_;
};

}  // namespace

std::vector<fs::path> wandb_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (auto file = run_file(entry.path())) files.push_back(std::move(*file));
  }
  return files;
}

std::unique_ptr<Monitor> wandb_monitor(const std::string& folder, bool append,
                                       const WandbSettings& settings) {
  return std::make_unique<WandbMonitor>(folder, append, settings);
}

}  // namespace zero::train
