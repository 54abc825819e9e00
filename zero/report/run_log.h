// The log of a training run (log.jsonl), read back.
//
//   const auto log = zero::report::read_log("my_run");
//   for (const auto& step : log.steps) std::cout << step.step << ' ' << step.loss << '\n';
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "zero/base/timeline.h"
#include "zero/comm/link_speed.h"
#include "zero/comm/link_times.h"
#include "zero/train/monitor.h"

namespace zero::report {

inline constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

/// The numbers of a step. One that the log does not have, or that was not finite, is NaN.
struct LoggedStep {
  int64_t step = 0;
  double loss = kAbsent;
  double grad_norm = kAbsent;
  double lr = kAbsent;
  double loss_scale = kAbsent;
  double step_ms = kAbsent;
  double tokens_per_s = kAbsent;
  double comm_ms = kAbsent;  ///< rank 0 waited for other ranks
  double disk_ms = kAbsent;  ///< rank 0 waited for its disk
  double memory_peak = kAbsent;
  std::optional<Breakdown> breakdown{};   ///< with wall_clock_breakdown
  std::optional<comm::LinkTimes> link{};  ///< rank 0's link, on several hosts
  bool skipped = false;
};

/// Something besides the numbers of a step.
struct LoggedEvent {
  enum class Kind : uint8_t {
    notice,
    anomaly,
    skipped,
    rewind,
    restart,
    save,
    failed_save,
    profile
  };
  int64_t step = 0;
  Kind kind{};
  std::string text;  ///< a sentence, or several
};
/// Returns the kind in a word or two: "notice", "not finite", "skipped", ...
std::string_view name(LoggedEvent::Kind kind);

/// A value of the configuration in force, and where it came from.
struct LoggedSetting {
  std::string key;  ///< "zero_optimization.stage"
  std::string value;
  /// "command line", "file", "checkpoint" or "default"; "given" if the log does not say.
  std::string origin;
};

/// The calls of one kind that a `comms_logger` timed, by size.
struct LoggedCalls {
  std::string op;
  int64_t ranks = 0;
  int64_t message_bytes = 0;
  int64_t calls = 0;
  double total_ms = kAbsent;
  double bus_gb_per_s = kAbsent;
};

struct RunLog {
  std::filesystem::path path;  ///< of the log
  std::string name;            ///< the run's folder
  /// The configuration in force, after the last restart.
  std::vector<LoggedSetting> settings;
  std::string configuration;  ///< as a file for Settings::parse
  std::string model;          ///< the model's config.json
  int64_t parameters = 0;
  int ranks = 1;
  int64_t tokens_per_step = 0;
  int64_t train_tokens = 0;
  std::string weights;                  ///< the source of the first weights; empty: random ones
  std::optional<comm::LinkSpeed> link;  ///< between hosts, as the last start measured it
  std::string tiers;                    ///< which states a memory budget put on disk, and why

  std::vector<LoggedStep> steps;
  std::vector<train::ValidationReport> validations;
  std::vector<LoggedEvent> events;
  std::vector<train::RankMemory> memory;    ///< at the end, by rank; empty: not there yet
  std::vector<train::RankTraffic> traffic;  ///< of `traffic_steps`, by rank
  int64_t traffic_steps = 0;
  std::vector<LoggedCalls> calls;
  double flops = kAbsent;  ///< of a step's forward and backward, with the profiler of FLOPs
  double mfu = kAbsent;
  std::optional<train::EndReport> end;
  std::string prompt, sample;

  bool cut = false;                               ///< the last line is not whole, and is left out
  std::vector<std::string> unknown;               ///< events that this version does not know
  std::chrono::system_clock::time_point written;  ///< when the log was last written to

  /// Returns the value of a setting; "" if there is none of that key.
  std::string setting(std::string_view key) const;
};

/// Reads the log of a run. `run` is its folder, or the log itself. A last line that is cut off, as
/// a run that was killed leaves it, is left out. Throws ConfigError if there is no log, and
/// DataError, which names the line, if the log is empty or none that this version wrote.
RunLog read_log(const std::filesystem::path& run);

/// Returns a part of a step's time by name, and its milliseconds in `step`. The parts add up to the
/// step's time.
struct TimePart {
  std::string_view name;
  double ms = 0;
};
std::vector<TimePart> time_parts(const LoggedStep& step);
/// The same for the link between hosts; empty without one.
std::vector<TimePart> link_parts(const LoggedStep& step);

}  // namespace zero::report
