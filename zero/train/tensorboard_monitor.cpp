// Note [Event files]
// An event file is a sequence of records of TensorFlow's TFRecord format (tensorflow.org, "TFRecord
// and tf.train.Example"): the length of a message in 8 bytes, a masked CRC-32C of the length, the
// message, and a masked CRC-32C of the message. Each message is an Event
// (tensorboard/compat/proto/event.proto and summary.proto, tensor.proto). The first one has the
// version. Each step adds one with the curves by steps, and one with those by samples.
#include <fmt/format.h>
#include <unistd.h>

#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "zero/base/crc.h"
#include "zero/train/metrics.h"
#include "zero/train/monitors.h"
#include "zero/train/report_file.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;
using Writer = protozero::pbf_writer;

constexpr std::string_view kBeforeTime = "events.out.tfevents.";
constexpr std::string_view kBehind = ".zero";
constexpr size_t kHeader = 12;  // a record begins with its length and the length's check
constexpr size_t kFooter = 4;
constexpr uint64_t kLongest = uint64_t{1} << 30;  // a longer message is taken for garbage

// The fields of the messages.
namespace event_fields {
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5;
}
namespace summary_fields {
constexpr int kValue = 1;
constexpr int kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9;  // of a value
constexpr int kPluginData = 1, kPluginName = 1;                        // of its metadata
}  // namespace summary_fields
namespace tensor_fields {
constexpr int kDtype = 1, kShape = 2, kStrings = 8;
constexpr int kDimension = 2, kSize = 1;  // of its shape
constexpr int64_t kString = 7;            // a dtype
}  // namespace tensor_fields

/// A CRC of bytes that hold CRCs is weak, so the format turns it by 15 bits and adds a constant.
uint32_t masked_crc(std::string_view bytes) {
  const uint32_t check = crc32c(bytes);
  return ((check >> 15) | (check << 17)) + 0xa282ead8;
}

/// Appends `value` in `bytes` bytes, the least significant first.
void append_little_endian(std::string& out, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t read_little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes.size(); ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return value;
}

/// Returns the tag of the first value in a summary; an empty text if it has none.
std::string_view first_tag(protozero::pbf_reader summary) {
  if (!summary.next(summary_fields::kValue, protozero::pbf_wire_type::length_delimited)) return {};
  auto value = summary.get_message();
  if (!value.next(summary_fields::kTag, protozero::pbf_wire_type::length_delimited)) return {};
  const auto tag = value.get_view();
  return {tag.data(), tag.size()};
}

/// Returns whether an event lies beyond the step, or, if its curve is drawn by samples, beyond the
/// sample. Throws protozero::exception if the message is malformed.
bool is_beyond(std::string_view message, int64_t step, int64_t sample) {
  int64_t of_event = 0;
  std::string_view tag;
  protozero::pbf_reader event(message.data(), message.size());
  while (event.next()) {
    if (event.tag_and_type() ==
        protozero::tag_and_type(event_fields::kStep, protozero::pbf_wire_type::varint)) {
      of_event = event.get_int64();
    } else if (event.tag_and_type() ==
               protozero::tag_and_type(event_fields::kSummary,
                                       protozero::pbf_wire_type::length_delimited)) {
      tag = first_tag(event.get_message());
    } else {
      event.skip();
    }
  }
  const bool by_samples = std::any_of(kMetrics.begin(), kMetrics.end(), [&](const auto& metric) {
    return metric.name == tag && metric.by_samples;
  });
  return of_event > (by_samples ? sample : step);
}

/// Ends a file before its first event beyond the step, and removes a last record that is not whole.
void cut(const fs::path& path, int64_t step, int64_t sample) {
  std::ifstream file(path, std::ios::binary);
  uintmax_t kept = 0;
  std::string header(kHeader, '\0');
  std::string message;
  const auto checks = [](std::string_view bytes, std::string_view check) {
    return masked_crc(bytes) == read_little_endian(check);
  };
  while (file.read(header.data(), kHeader)) {
    const auto head = std::string_view(header);
    const uint64_t length = read_little_endian(head.substr(0, 8));
    if (!checks(head.substr(0, 8), head.substr(8)) || length > kLongest) break;
    message.resize(length + kFooter);
    if (!file.read(message.data(), static_cast<std::streamsize>(message.size()))) break;
    const auto event = std::string_view(message).substr(0, length);
    if (!checks(event, std::string_view(message).substr(length))) break;
    try {
      if (is_beyond(event, step, sample)) break;
    } catch (const protozero::exception&) {
      break;
    }
    kept += kHeader + message.size();
  }
  cut_file(path, kept, "The event file", fmt::format("step {}", step));
}

/// Returns a name that sorts after those that are there, since readers take files in the order of
/// names.
std::string new_name(const fs::path& folder) {
  auto time = static_cast<int64_t>(seconds_since_1970());
  for (const auto& file : event_files(folder)) {
    const auto name = file.filename().string();
    uint32_t of_file = 0;
    const auto read =
        std::from_chars(name.data() + kBeforeTime.size(), name.data() + name.size(), of_file);
    if (read.ec == std::errc{}) time = std::max<int64_t>(time, int64_t{of_file} + 1);
  }
  return fmt::format("{}{:010}.{}.{}{}", kBeforeTime, time, host_name(), getpid(), kBehind);
}

class TensorboardMonitor final : public Monitor {
 public:
  TensorboardMonitor(fs::path folder, bool append) : folder_(std::move(folder)), append_(append) {}

  void begin(const RunInfo& info) override {
    run_ = info;
    step_ = run_.first_step - 1;
    for (const auto& path : event_files(folder_)) {
      std::error_code ignored;
      if (append_) {
        cut(path, step_, run_.first_sample);
      } else {
        fs::remove(path, ignored);
      }
    }
    open();
    text("configuration", nlohmann::ordered_json::parse(run_.config_json)
                              .dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    flush();
  }
  void step(const StepReport& report) override {
    step_ = report.step;
    const auto values = values_of(report);
    for (const bool by_samples : {false, true}) {
      const auto of_axis = [&](size_t i) {
        return values[i].has_value() && kMetrics[i].by_samples == by_samples;
      };
      event([&](Writer& event) {
        event.add_int64(event_fields::kStep, position({"", by_samples}, run_, report.step));
        Writer summary(event, event_fields::kSummary);
        for (size_t i = 0; i < values.size(); ++i) {
          if (of_axis(i)) add_scalar(summary, kMetrics[i], *values[i]);
        }
      });
    }
    flush();
  }
  void rewound(const RewindReport& report) override {
    for (const auto& path : event_files(folder_)) cut(path, report.to, report.sample_then);
    step_ = report.to;
    run_.first_step = report.to + 1;
    run_.first_sample = report.sample;
    open();
    flush();
  }
  void validation(const ValidationReport& report) override {
    event([&](Writer& event) {
      event.add_int64(event_fields::kStep, report.step);
      Writer summary(event, event_fields::kSummary);
      add_scalar(summary, kMetrics[kValidationLoss], report.loss);
      if (report.accuracy)
        add_scalar(summary, kMetrics[kValidationAccuracy], report.accuracy->share());
    });
    flush();
  }
  void sample(const std::string& prompt, const std::string& text) override {
    // A model may produce bytes that are not UTF-8: they become U+FFFD.
    const auto replaced = nlohmann::json(prompt + text)
                              .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    this->text("sample", nlohmann::json::parse(replaced).get<std::string>());
    flush();
  }

 private:
  /// Begins a new file, which readers take after those that are there.
  void open() {
    file_.emplace(folder_ / new_name(folder_), "the event file");
    event([](Writer& event) { event.add_string(event_fields::kFileVersion, "brain.Event:2"); });
  }
  static void add_scalar(Writer& summary, const Metric& metric, double value) {
    Writer scalar(summary, summary_fields::kValue);
    scalar.add_bytes(summary_fields::kTag, metric.name.data(), metric.name.size());
    scalar.add_float(summary_fields::kSimpleValue, static_cast<float>(value));
  }
  /// Writes a text for TensorBoard's plugin "text", which shows Markdown; four spaces keep the
  /// lines.
  void text(std::string_view tag, const std::string& text) {
    std::string lines = "    ";
    for (const char c : text) lines += c == '\n' ? std::string("\n    ") : std::string(1, c);
    event([&](Writer& event) {
      event.add_int64(event_fields::kStep, step_);
      Writer summary(event, event_fields::kSummary);
      Writer value(summary, summary_fields::kValue);
      value.add_bytes(summary_fields::kTag, tag.data(), tag.size());
      {
        Writer metadata(value, summary_fields::kMetadata);
        Writer plugin(metadata, summary_fields::kPluginData);
        plugin.add_string(summary_fields::kPluginName, "text");
      }
      Writer tensor(value, summary_fields::kTensor);
      tensor.add_int64(tensor_fields::kDtype, tensor_fields::kString);
      {
        Writer shape(tensor, tensor_fields::kShape);
        Writer dimension(shape, tensor_fields::kDimension);
        dimension.add_int64(tensor_fields::kSize, 1);
      }
      tensor.add_bytes(tensor_fields::kStrings, lines);
    });
  }
  /// Appends a record with the event that `body` writes to the records that `flush` will write.
  template <class Body>
  void event(const Body& body) {
    const size_t begin = records_.size();
    records_.append(kHeader, '\0');
    {
      Writer writer(records_);
      writer.add_double(event_fields::kWallTime, seconds_since_1970());
      body(writer);
    }
    const auto message = std::string_view(records_).substr(begin + kHeader);
    const uint32_t check = masked_crc(message);
    std::string header;  // short enough to need no memory
    append_little_endian(header, message.size(), 8);
    append_little_endian(header, masked_crc(header), 4);
    records_.replace(begin, kHeader, header);
    append_little_endian(records_, check, kFooter);
  }
  void flush() {
    file_->write(records_);
    records_.clear();
  }

  fs::path folder_;
  bool append_;
  RunInfo run_;
  int64_t step_ = 0;
  std::optional<ReportFile> file_;
  std::string records_;
};

}  // namespace

std::vector<fs::path> event_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(kBeforeTime) && name.ends_with(kBehind)) files.push_back(entry.path());
  }
  return files;
}

std::unique_ptr<Monitor> tensorboard_monitor(const std::string& folder, bool append) {
  return std::make_unique<TensorboardMonitor>(folder, append);
}

}  // namespace zero::train
