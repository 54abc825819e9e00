// Plans a run before a machine is rented: which configurations of ZeRO fit, how fast each is, what
// binds it, and whether ZeRO is needed at all. `zero plan` prints what this computes.
//
//   const auto model = zero::language_model_config("gpt2-xl");
//   const auto answer = zero::plan::plan(
//       {.trace = zero::plan::tracer(*model, 1024), .global_batch = 512, .sequence = 1024,
//        .cluster = zero::plan::cluster_of(zero::plan::device_named("H100"), 4)});
//   std::cout << zero::plan::ds_config(answer.best());
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/config/config.h"
#include "zero/planner/as_ranks.h"
#include "zero/planner/hardware.h"
#include "zero/planner/memory.h"
#include "zero/planner/simulate.h"
#include "zero/planner/trace.h"

namespace zero::plan {

/// Traces a step of `batch` sequences on one rank; `recompute` as in RecomputeSettings::every.
using Tracer = std::function<Trace(int64_t batch, int64_t recompute, const TraceOptions& options)>;

/// Returns the tracer of a language model, which must outlive it.
Tracer tracer(const LanguageModelConfig& model, int64_t sequence);

/// When a configuration updates: Note [When updates run] in engine/update_schedule.h.
enum class Updates : uint8_t {
  in_step,
  in_backward,  ///< update_in_backward: no gradients are kept, and clipping is not exact
  delayed       ///< offload_optimizer.delayed_update_after: weights are one update old
};

struct Question {
  Tracer trace{};
  int64_t global_batch = 256;  ///< sequences of a step, over all ranks; at most 2^40
  int64_t sequence = 1024;     ///< tokens of a sequence
  bool bf16 = true;  ///< with fp32 master weights; fp16 where a device has no bf16; else fp32
  /// The dtype of autocast, kBFloat16 (kHalf where a device has no bf16) or kHalf; none: no
  /// autocast.
  std::optional<at::ScalarType> autocast{};
  Cluster cluster{};
  /// The hosts of `cluster`, where they measure their operators at the same time.
  OfHosts hosts{};
  Optimizer optimizer = AdamW{};
  /// The micro-batches to try are at most this, which is at most 2^20: the powers of two that
  /// divide a rank's batch, and between two of them where the lower does not, the largest that
  /// does.
  int64_t most_micro_batch = 64;
  /// The micro-batches to try are at least this power of two: the model may refuse smaller ones.
  int64_t least_micro_batch = 1;
  /// The times of updates to try beside those in the step, where an engine allows them.
  std::vector<Updates> updates{};
  /// Tries recomputation; a model that cannot recompute says no.
  bool recomputes = true;
  /// Returns the tracer of a like model of so many layers, to find the most that fit. Null: an
  /// answer tells nothing of it.
  std::function<Tracer(int64_t layers)> of_layers{};
};

/// Sets `of_layers` of a question whose `trace` is that of `model`. Set `sequence` before.
void ask_of_depths(Question& question, const LanguageModelConfig& model);

struct Candidate {
  Config config{};
  int64_t ranks = 1;
  int64_t micro_batch = 1;
  int64_t recompute = 0;
  RankMemory memory{};
  double device_lacks = 0;  ///< bytes of a rank beyond its device; 0: it fits
  double host_lacks = 0;    ///< bytes beyond the host's memory
  double disk_lacks = 0;    ///< bytes beyond the host's disk
  StepTime time{};          ///< computed where it fits
  double tokens_per_second = 0;
  double mfu = 0;  ///< FLOPs of the model, without recomputation, of the devices' peak

  bool fits() const { return device_lacks <= 0 && host_lacks <= 0 && disk_lacks <= 0; }
  /// Returns it in a few words: "stage 2, optimizer on the host, micro-batch 4 x 2".
  std::string words() const;
};

struct Answer {
  /// The best one comes first, which is the simplest of those that are within a fiftieth of the
  /// fastest. Then come the others that fit, the fastest first, and those that lack something, the
  /// nearest first.
  std::vector<Candidate> candidates;
  /// The plain case: whether ZeRO is needed.
  std::string zero_or_not;
  std::string binds;           ///< what binds the best candidate's step
  std::string helps;           ///< the change that helps it most
  std::string largest_model;   ///< the largest model that the cluster holds
  std::string fewest_devices;  ///< the fewest devices that hold this model
  std::vector<Bound> bounds;   ///< operators of the first candidate whose memory is not exact
  int64_t parameters = 0;
  int64_t trained = 0;  ///< of them

  /// Returns the first candidate. Throws Error if there is none.
  const Candidate& best() const;
};

/// Returns the time of updates that a name means: "in-backward" or "delayed". Throws ConfigError
/// for another name.
Updates updates_named(std::string_view name);

/// Answers a question. Throws ConfigError if no micro-batch divides the batch over the ranks, or if
/// the cluster lacks a speed (check() of hardware.h).
Answer plan(const Question& question);

/// Returns what a configuration is on the cluster of `question`, with micro-batches of so many
/// sequences: its memory, and its times where it fits. `recompute` as in RecomputeSettings::every.
/// Throws ConfigError as an engine would.
Candidate evaluate(const Question& question, const Config& config, int64_t micro_batch,
                   int64_t recompute = 0);

/// A cluster of another size, and the fastest candidate there.
struct ScalePoint {
  int64_t ranks = 0;
  Candidate best;
  bool fits = false;
  double efficiency = 0;  ///< tokens a second and rank, of those at the first point
};
/// Returns clusters of `first` to `last` ranks, doubling, on hosts like those of `cluster`. Throws
/// ConfigError for a number of ranks above a host's that does not fill its hosts, and for what the
/// cluster lacks (check() of hardware.h), as the speed of a network.
std::vector<Cluster> scaled(const Cluster& cluster, int64_t first, int64_t last);
/// Returns the best candidates on these clusters, with the batch of a rank that `question` has on
/// its own cluster.
std::vector<ScalePoint> scale(const Question& question, int64_t first, int64_t last);

/// Returns the configuration file of a candidate, with DeepSpeed's keys, which `zero train
/// --config` takes. It names the optimizer unless that is AdamW, whose rate the run chooses.
/// `nvme_path` is the folder for states on disk.
std::string ds_config(const Candidate& candidate, const std::string& nvme_path = "/local_nvme");

}  // namespace zero::plan
