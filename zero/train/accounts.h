// The ranks' ledgers, collected for the monitors.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "zero/engine/engine.h"
#include "zero/train/monitor.h"

namespace zero::train {

/// Returns every rank's memory, in rank order. Collective.
std::vector<RankMemory> collect_memory(Engine& engine);

/// Counts the bytes that the training steps send, and nothing else (no validation).
class StepTraffic {
 public:
  explicit StepTraffic(Engine& engine) : engine_(engine) {}
  void begin_step();
  /// Ends a step. `updated` is StepResult::updated: a step that was skipped has another formula.
  void end_step(bool updated);
  /// Completes updates that the last step left under way, and counts their bytes as that step's.
  void complete_update();
  /// Returns the number of steps, skipped ones too.
  int64_t steps() const { return steps_; }
  /// Returns every rank's traffic so far, in rank order, with the formula's bytes for as many
  /// steps. Collective.
  std::vector<RankTraffic> collect() const;

 private:
  using Counts = std::array<comm::TrafficCount, comm::kCollectives>;
  Counts now() const;
  void add();
  Engine& engine_;
  Counts before_{}, sum_{};
  DiskUse disk_before_, disk_sum_;
  DeviceTraffic host_before_, host_sum_;
  std::optional<comm::LinkTimes> link_before_, link_sum_;
  TrafficFormula formula_sum_;
  int64_t steps_ = 0;
};

}  // namespace zero::train
