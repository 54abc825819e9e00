// The ranks' ledgers, collected for the monitors.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "zero/engine/engine.h"
#include "zero/train/monitor.h"

namespace zero::train {

/// Every rank's memory, in rank order. Collective.
std::vector<RankMemory> collect_memory(Engine& engine);

/// Counts what the training steps send, and nothing else (validation, say).
class StepTraffic {
 public:
  explicit StepTraffic(Engine& engine) : engine_(engine) {}
  void begin_step();
  /// `updated`: StepResult::updated. Of one that was skipped the formula is another.
  void end_step(bool updated);
  /// Completes updates that the last step left under way, and counts what they move as its own.
  void complete_update();
  /// Skipped ones too.
  int64_t steps() const { return steps_ + skipped_; }
  /// Every rank's traffic so far, in rank order, with the formula's bytes for as many steps.
  /// Collective.
  std::vector<RankTraffic> collect() const;

 private:
  using Counts = std::array<comm::TrafficCount, comm::kCollectives>;
  Counts now() const;
  void add();
  Engine& engine_;
  Counts before_{}, sum_{};
  DiskUse disk_before_, disk_sum_;
  HostTraffic host_before_, host_sum_;
  int64_t steps_ = 0;
  int64_t skipped_ = 0;
};

}  // namespace zero::train
