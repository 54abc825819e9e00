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
  void end_step();
  /// Completes updates that the last step left under way, and counts what they move as its own.
  void complete_update();
  int64_t steps() const { return steps_; }
  /// Every rank's traffic so far, in rank order, with the formula's bytes for as many steps.
  /// Collective.
  std::vector<RankTraffic> collect() const;

 private:
  using Counts = std::array<comm::TrafficCount, comm::kCollectives>;
  Counts now() const;
  Engine& engine_;
  Counts before_{}, sum_{};
  DiskUse disk_before_, disk_sum_;
  HostTraffic host_before_, host_sum_;
  int64_t steps_ = 0;
};

}  // namespace zero::train
