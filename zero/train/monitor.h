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
  int64_t first_step = 1;            ///< more than 1 where a run is resumed
  int64_t first_sample = 0;          ///< sequences that all ranks have taken before that
  std::string weights;               ///< where the first weights come from; empty: random ones
  std::vector<std::string> changes;  ///< of a resumed run's settings: "steps 4 -> 8"
  std::vector<std::string> damaged;  ///< what is wrong with newer checkpoints, passed over
  std::string tiers;      ///< which states a memory budget puts on disk, and why; empty without one
  std::string optimizer;  ///< and what its weight decay acts on
  std::string data;
  int64_t train_tokens = 0;
  int64_t validation_tokens = 0;
  /// The resolved configuration, as a JSON object: what `zero train --config` takes, and the
  /// model's own.
  std::string config_json;

  int64_t samples_per_step() const { return ranks * accumulate * micro_batch; }
  int64_t tokens_per_step() const { return samples_per_step() * sequence; }
};

/// Bytes of one rank by category, and what the formula says of those that it covers.
struct RankMemory {
  std::array<Usage, kCategories> usage{};
  std::array<std::optional<int64_t>, kCategories> formula{};
  Usage total;  ///< of all categories but activations, which LibTorch's allocator counts by itself
  int64_t padding = 0;  ///< bytes of the formula that are padding
  Usage device;         ///< of `total`, what is not in the host tier
  /// Memory that LibTorch's allocator holds for `activations`, and the requests by which it got it
  /// from the system. The part above `activations` is fragmentation.
  Usage reserved;
  int64_t system_requests = 0;
  DiskUse disk;
};

/// Calls and bytes that one rank sent during the training steps, and what the formula says of as
/// many steps.
struct RankTraffic {
  std::array<comm::TrafficCount, comm::kCollectives> counts{};
  std::array<std::optional<int64_t>, comm::kCollectives> formula{};
  /// On several hosts, the formula's bytes of the counts' `link_bytes`.
  int64_t hosts = 1;
  std::array<std::optional<int64_t>, comm::kCollectives> link_formula{};
  /// Bytes from and to its disk; `wait_ms` has no formula.
  DiskUse disk;
  int64_t disk_read_formula = 0;
  int64_t disk_written_formula = 0;
  /// Bytes between its device and its host.
  HostTraffic host;
  HostTraffic host_formula;
};

/// Training has gone back to a checkpoint (train.rewind_spikes).
struct RewindReport {
  int64_t from = 0;         ///< the step whose loss was a spike
  int64_t to = 0;           ///< of the checkpoint: the next step is `to` + 1
  int64_t sample_then = 0;  ///< sequences that the run had taken at the checkpoint
  int64_t sample = 0;       ///< those that it has taken, those that led to the spike included
  std::string reason = {};  ///< the notice of that step
};

/// The FLOPs that `flops_profiler` counts of a step, and how they are to be told.
struct FlopsReport {
  StepFlops step;
  FlopsReportOptions options;
  std::string file;  ///< that gets it; empty: the console
};

struct StepReport {
  int64_t step = 0;  ///< from 1
  float loss = 0;    ///< nats per token: the mean over ranks and micro-batches
  double grad_norm = 0;
  bool skipped = false;      ///< nothing was updated: a gradient was not finite, or
  bool left_out = false;     ///< the loss was a spike (train.skip_spikes)
  std::string anomaly = {};  ///< what made it so, where that was looked for
  /// Sentences about what is unusual: a loss, a slow rank.
  std::vector<std::string> notices = {};
  std::optional<RewindReport> rewound = {};  ///< from where it goes on
  std::vector<double> group_norms = {};  ///< of gradients, where train.group_norms asks for them
  double loss_scale = 0;  ///< of this step, and of the next; 0 where losses are not scaled
  double next_loss_scale = 0;
  double lr = 0;
  double step_ms = 0;
  double tokens_per_s = 0;
  double comm_ms = 0;                       ///< that rank 0 spent waiting for other ranks
  double disk_ms = 0;                       ///< that rank 0 spent waiting for its disk
  int64_t memory_peak = 0;                  ///< of rank 0, all categories together
  std::optional<Breakdown> breakdown = {};  ///< of rank 0 (wall_clock_breakdown)
  std::optional<FlopsReport> flops = {};    ///< of the step that they are counted of
};

struct ValidationReport {
  int64_t step = 0;
  double loss = 0;
  int64_t tokens = 0;
};

/// A file that `profile` has asked for is there.
struct ProfileReport {
  int64_t step = 0;  ///< that it shows
  std::string file;
  int64_t spans = 0;
  int64_t dropped = 0;  ///< that did not fit
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
  /// Before the first step; indexed by rank.
  virtual void initial_memory(const std::vector<RankMemory>&) {}
  virtual void step(const StepReport&) {}
  /// After the step that led to it. What was told of the steps behind `to` is void: files forget
  /// it.
  virtual void rewound(const RewindReport&) {}
  virtual void validation(const ValidationReport&) {}
  virtual void profile(const ProfileReport&) {}
  /// After the last step; indexed by rank.
  virtual void memory(const std::vector<RankMemory>&) {}
  virtual void traffic(const std::vector<RankTraffic>&, int64_t /*steps*/) {}
  /// With comms_logger, `call` gets each call of rank 0 as it ends (verbose), and `calls` all after
  /// the last step.
  virtual void call(const comm::CallTime&) {}
  virtual void calls(const std::vector<comm::CallTimes>&) {}
  virtual void sample(const std::string& /*prompt*/, const std::string& /*text*/) {}
  virtual void end(const EndReport&) {}
};

/// Tables, one line a step (every `log_every` of them), and a progress bar where stdout is a
/// terminal. What stdout does not take is lost, and the run goes on.
std::unique_ptr<Monitor> console_monitor(int64_t log_every);

/// One JSON object a line in `file`: {"step": ...} for each step, {"event": ...} for the rest.
/// `append` continues an earlier log; else the first line takes its place. Numbers read back
/// bit-exactly; what JSON cannot hold (NaN, infinity) is null. Each line is written at once.
/// Throws ConfigError where the file cannot be opened, Error where the disk is full.
std::unique_ptr<Monitor> jsonl_monitor(const std::string& file, bool append);

/// An event file for TensorBoard in `folder`, which exists: the curves of zero/train/metrics.h,
/// the configuration and samples as texts. Each step is written at once. `append` continues an
/// earlier run: what it wrote beyond the step from which this one goes on is cut off its files,
/// and a new one is begun. Else its files go, with the first event. Throws Error that names the
/// file.
std::unique_ptr<Monitor> tensorboard_monitor(const std::string& folder, bool append);

/// Writes the FLOPs of a step to `file`, in place of its contents. Throws ConfigError where it
/// cannot be opened.
std::unique_ptr<Monitor> flops_monitor(const std::string& file);

/// A file for each metric in `folder`, which exists, as DeepSpeed's csv_monitor writes them:
/// Train_Samples_lr.csv begins with "step,lr", and has a line "SAMPLES,LR" for each step.
/// Likewise.
std::unique_ptr<Monitor> csv_monitor(const std::string& folder, bool append);

}  // namespace zero::train
