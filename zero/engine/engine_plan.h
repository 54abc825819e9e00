// All that an engine decides before anything of the model changes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/engine/costs.h"
#include "zero/engine/model.h"
#include "zero/engine/placement.h"

namespace zero {

/// The configuration, the model, and for each unit a row of the table: over which ranks its states
/// lie, on which tier, in which form, and when they are updated.
class EnginePlan {
 public:
  /// Throws ConfigError if the configuration, the model and the parameter groups do not suit
  /// each other or the ranks. All ranks decide the same. Collective.
  EnginePlan(NamedTensors tensors, const std::vector<ParameterGroup>& groups, Config config,
             std::shared_ptr<comm::Group> ranks);

  const Config& config() const { return config_; }
  Model& model() { return model_; }
  const Model& model() const { return model_; }
  const Placement& placement() const { return placement_; }
  const partition::Layout& layout() const { return layout_; }
  const UpdateTiming& timing() const { return timing_; }
  const std::vector<UnitPlan>& units() const { return units_; }
  bool trainable(int64_t unit) const { return units_[static_cast<size_t>(unit)].trainable; }
  /// Returns the group of all ranks. Arrays are gathered over `placement().shards`.
  comm::Group& group() const { return *placement_.all; }
  /// Returns the bytes that the host has left for a rank: the same number on all ranks.
  int64_t available() const { return available_; }
  /// Returns whether each of several hosts keeps all parameters: Note [Kept on a host] in
  /// window_units.cpp.
  bool kept_on_hosts() const {
    return config_.hpz_partition_size > 1 && placement_.shards->topology().hosts > 1;
  }
  /// Returns the step of this engine as costs.h takes it, with gathers that send.
  PlannedStep step() const {
    return planned_step(layout_, units_, model_.shape(), config_, placement_.planned());
  }

  /// Sets the largest norm of the mean gradient from the next step on.
  void set_gradient_clipping(double norm) { config_.gradient_clipping = norm; }

 private:
  void check_evaluated(const Optimizer& optimizer) const;
  void check_passes() const;

  Config config_;
  Model model_;
  Placement placement_;
  partition::Layout layout_;
  int64_t available_;
  UpdateTiming timing_;
  std::vector<UnitPlan> units_;
};

}  // namespace zero
