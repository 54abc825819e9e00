// The forward and backward passes of a step.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/engine/step_watch.h"
#include "zero/train/run.h"

namespace zero::train {

class StepPasses {
 public:
  /// `run` outlives this.
  explicit StepPasses(Run& run) : run_(run), losses_(static_cast<size_t>(run.micro_batches())) {}

  /// Begins step `step`: seeds dropout, and remembers the position at which the step's data begin.
  void begin(int64_t step);
  /// Passes this rank's micro-batches; the engine takes their gradients. `watch` may be null.
  /// Collective. Throws OutOfMemory, with a remedy, if a device is full.
  void pass(StepWatch* watch);
  /// Drops gradients, and passes the micro-batches of step `step` once more, as `pass` did after
  /// its `begin`. Afterwards the data go on after them. Collective.
  void pass_again(int64_t step, StepWatch& watch);

  /// Returns this rank's losses by micro-batch. Each is multiplied by its loss_factor, so that
  /// their mean over ranks and micro-batches is the step's.
  const std::vector<float>& losses() const { return losses_; }

 private:
  Batch next_batch();
  void pass_one_by_one(StepWatch* watch);
  void pass_layer_major(StepWatch* watch);
  /// Returns the factors of the micro-batches' losses. If weights differ, `batches` are those of
  /// the step, and the call is collective.
  std::vector<double> factors_of(const std::vector<Batch>& batches) const;

  Run& run_;
  std::vector<float> losses_;
  LoaderState data_begin_;
};

}  // namespace zero::train
