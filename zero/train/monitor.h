// The reports of a training run, and the monitors that take them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "zero/base/ledger.h"
#include "zero/base/timeline.h"
#include "zero/comm/call_log.h"
#include "zero/comm/link_speed.h"
#include "zero/comm/link_times.h"
#include "zero/comm/traffic.h"
#include "zero/engine/engine.h"
#include "zero/engine/flops_report.h"

namespace zero::train {

/// The facts of a run that are known before its first step.
struct RunInfo {
  std::string model_name;
  int64_t parameters = 0;
  std::string model_description;  ///< "12 layers, 768 wide"
  int64_t vocabulary = 0;
  std::string dtype;
  int stage = 0;
  int ranks = 1;
  int threads = 1;
  int64_t micro_batch = 0;
  int64_t sequence = 0;
  int64_t accumulate = 1;
  int64_t steps = 0;
  int64_t first_step = 1;               ///< more than 1 if a run is resumed
  int64_t first_sample = 0;             ///< sequences that all ranks have taken before that
  std::string weights;                  ///< the source of the first weights; empty: random ones
  std::vector<std::string> changes;     ///< changed settings of a resumed run: "steps 4 -> 8"
  std::vector<std::string> damaged;     ///< newer checkpoints that were skipped, and their damage
  bool from_memory = false;             ///< it goes on from a copy in the memory of the hosts
  std::optional<comm::LinkSpeed> link;  ///< between hosts, as the engine measured it
  std::string tiers;      ///< which states a memory budget puts on disk, and why; empty without one
  std::string optimizer;  ///< with the parameters on which its weight decay acts
  std::string data;
  int64_t train_tokens = 0;
  int64_t validation_tokens = 0;
  /// The resolved configuration as a JSON object: the keys of `zero train --config`, and the
  /// model's own.
  std::string config_json;

  int64_t samples_per_step() const { return ranks * accumulate * micro_batch; }
  int64_t tokens_per_step() const { return samples_per_step() * sequence; }
};

/// The bytes of one rank by category, and the formula's bytes for the categories that it covers.
struct RankMemory {
  std::array<Usage, kCategories> usage{};
  std::array<std::optional<int64_t>, kCategories> formula{};
  Usage total;          ///< all categories except activations, which LibTorch's allocator counts
  int64_t padding = 0;  ///< bytes of the formula that are padding
  Usage device;         ///< the part of `total` that is not in the host tier
  /// The memory that LibTorch's allocator holds for `activations`, and the number of its requests
  /// to the system. The part above `activations` is fragmentation.
  Usage reserved;
  int64_t system_requests = 0;
  DiskUse disk;
};

/// The calls and bytes that one rank sent during the training steps, and the formula's bytes for as
/// many steps.
struct RankTraffic {
  std::array<comm::TrafficCount, comm::kCollectives> counts{};
  std::array<std::optional<int64_t>, comm::kCollectives> formula{};
  /// The formula's bytes for the counts' `link_bytes`, on several hosts.
  int64_t hosts = 1;
  std::array<std::optional<int64_t>, comm::kCollectives> link_formula{};
  /// Bytes from and to its disk; `wait_ms` has no formula.
  DiskUse disk;
  int64_t disk_read_formula = 0;
  int64_t disk_written_formula = 0;
  /// Bytes between its device and its host.
  DeviceTraffic host;
  DeviceTraffic host_formula;
  /// The milliseconds of its link to other hosts in all these steps, where there are several.
  std::optional<comm::LinkTimes> link;
};

/// Returns the bytes that a rank's link carried in a second of its busy time: those that it sent,
/// all collectives together. 0 without a link.
double busy_speed(const RankTraffic& traffic);

/// Training has gone back to a checkpoint (train.rewind_spikes).
struct RewindReport {
  int64_t from = 0;         ///< the step whose loss was a spike
  int64_t to = 0;           ///< the checkpoint's step: the next step is `to` + 1
  int64_t sample_then = 0;  ///< sequences that the run had taken at the checkpoint
  int64_t sample = 0;       ///< sequences that it has taken, with those that led to the spike
  std::string reason = {};  ///< the notice of that step
};

/// The FLOPs that `flops_profiler` counts in a step, and how they are reported.
struct FlopsReport {
  StepFlops step;
  FlopsReportOptions options;
  std::string file;  ///< the file that gets the report; empty: the console
};

struct StepReport {
  int64_t step = 0;  ///< from 1
  float loss = 0;    ///< nats per token: the mean over ranks and micro-batches
  double grad_norm = 0;
  bool skipped = false;      ///< nothing was updated: a gradient was not finite, or
  bool left_out = false;     ///< the loss was a spike (train.skip_spikes)
  std::string anomaly = {};  ///< the cause of a number that is not finite, if it was looked for
  /// Sentences about unusual events: a loss, a slow rank.
  std::vector<std::string> notices = {};
  std::optional<RewindReport> rewound = {};  ///< if training has gone back: how
  std::vector<double> group_norms = {};  ///< of gradients, where train.group_norms asks for them
  double loss_scale = 0;  ///< this step's and the next one's; 0 if losses are not scaled
  double next_loss_scale = 0;
  double lr = 0;
  double step_ms = 0;
  double tokens_per_s = 0;
  double comm_ms = 0;                       ///< the time that rank 0 waited for other ranks
  double disk_ms = 0;                       ///< the time that rank 0 waited for its disk
  int64_t memory_peak = 0;                  ///< rank 0's, all categories together
  std::optional<Breakdown> breakdown = {};  ///< rank 0's (wall_clock_breakdown)
  /// Rank 0's link to other hosts; the parts add up to step_ms. Null on one host.
  std::optional<comm::LinkTimes> link = {};
  std::optional<FlopsReport> flops = {};  ///< if this step's are counted
};

/// How many texts are classified rightly.
struct Accuracy {
  int64_t correct = 0;
  int64_t texts = 0;

  double share() const { return static_cast<double>(correct) / static_cast<double>(texts); }
};

/// Says it for people: "accuracy 0.8750 (7 of 8 texts)".
std::string to_text(const Accuracy& accuracy);

struct ValidationReport {
  int64_t step = 0;
  double loss = 0;
  int64_t tokens = 0;
  std::optional<Accuracy> accuracy{};  ///< of a task that tells classes apart
};

/// A checkpoint is complete, or could not be written.
struct SaveReport {
  int64_t step = 0;
  std::string path;
  std::string failure{};   ///< what was wrong, and that the run goes on; empty: it is complete
  int64_t bytes = 0;       ///< of all its files; of a copy in memory, those on rank 0's host
  bool in_memory = false;  ///< it is a copy in the memory of the hosts (train.memory_copies)
  double held_ms = 0;      ///< that rank 0 spent in the save before its next step
  double seconds = 0;      ///< from the save's begin until it was complete
};

/// The file that `profile` asks for has been written.
struct ProfileReport {
  int64_t step = 0;  ///< the step that it shows
  std::string file;
  int64_t spans = 0;
  int64_t dropped = 0;  ///< spans that did not fit
};

struct EndReport {
  int64_t steps = 0;
  double seconds = 0;
  std::string reason;  ///< "finished", or "stopped by SIGINT"
  std::string model_file;
};

/// A sink of reports, on rank 0. Its functions may throw zero::Error (a full disk): the run then
/// stops on every rank.
class Monitor {
 public:
  virtual ~Monitor() = default;
  virtual void begin(const RunInfo&) {}
  /// Called before the first step; indexed by rank.
  virtual void initial_memory(const std::vector<RankMemory>&) {}
  virtual void step(const StepReport&) {}
  /// Called after the step that led to it. The reports of the steps after `to` are void: files
  /// forget them.
  virtual void rewound(const RewindReport&) {}
  virtual void validation(const ValidationReport&) {}
  virtual void saved(const SaveReport&) {}
  virtual void profile(const ProfileReport&) {}
  /// Called after the last step; indexed by rank.
  virtual void memory(const std::vector<RankMemory>&) {}
  virtual void traffic(const std::vector<RankTraffic>&, int64_t /*steps*/) {}
  /// With comms_logger, `call` gets each call of rank 0 as it ends (verbose), and `calls` gets all
  /// calls after the last step.
  virtual void call(const comm::CallTime&) {}
  virtual void calls(const std::vector<comm::CallTimes>&) {}
  virtual void sample(const std::string& /*prompt*/, const std::string& /*text*/) {}
  virtual void end(const EndReport&) {}
};

/// Writes tables, one line a step (every `log_every` of them), and a progress bar if stdout is a
/// terminal. Output that stdout does not take is lost, and the run goes on.
std::unique_ptr<Monitor> console_monitor(int64_t log_every);

/// Writes one JSON object a line to `file`: {"step": ...} for each step, {"event": ...} for the
/// rest. `append` continues an earlier log; else the first line replaces the log. Numbers read back
/// bit-exactly; numbers that JSON cannot hold (NaN, infinity) are null. Each line is written at
/// once. Throws ConfigError if the file cannot be opened, Error if the disk is full.
std::unique_ptr<Monitor> jsonl_monitor(const std::string& file, bool append);

/// Writes an event file for TensorBoard to `folder`, which exists: the curves of
/// zero/train/metrics.h, and the configuration and samples as texts. Each step is written at once.
/// `append` continues an earlier run: its files are cut after the step from which this run goes on,
/// and a new file is begun. Without it, the first event removes the earlier run's files. Throws
/// Error that names the file.
std::unique_ptr<Monitor> tensorboard_monitor(const std::string& folder, bool append);

/// Writes the FLOPs of a step to `file`, in place of its contents. Throws ConfigError if it cannot
/// be opened.
std::unique_ptr<Monitor> flops_monitor(const std::string& file);

/// Writes a file for each metric to `folder`, which exists, as DeepSpeed's csv_monitor does:
/// Train_Samples_lr.csv begins with "step,lr", and has a line "SAMPLES,LR" for each step. `append`
/// is as for TensorBoard.
std::unique_ptr<Monitor> csv_monitor(const std::string& folder, bool append);

}  // namespace zero::train
