// The progress of training: the micro-batches of the step under way, the steps so far and the loss
// scale; and the factors of losses and gradients that depend on them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "zero/engine/engine_plan.h"
#include "zero/optim/loss_scale.h"

namespace zero {

class StepProgress {
 public:
  /// `plan` outlives this.
  explicit StepProgress(const EnginePlan& plan) : plan_(plan) {
    if (plan.config().scales_loss()) loss_scale_.emplace(plan.config().loss_scaling);
  }

  /// Returns the micro-batches that `end_micro_batch` has counted since the last boundary.
  int64_t micro_batches() const { return micro_batches_; }
  int64_t micro_batches_left() const { return of_step() - micro_batches_; }
  /// Returns whether a backward pass has ended since the last micro-batch was counted.
  bool passed() const { return passed_; }
  void end_pass() { passed_ = true; }
  /// Counts micro-batches that have all been passed, except the last of them.
  void pass_together(int64_t count) { micro_batches_ += count - 1; }
  /// Counts a micro-batch. Returns whether it was the last one of a step. If the step is then
  /// refused, further calls return the same.
  bool end_micro_batch() {
    passed_ = false;
    micro_batches_ = std::min(micro_batches_ + 1, of_step());
    return micro_batches_ == of_step();
  }
  /// Begins the accumulation anew.
  void restart() {
    micro_batches_ = 0;
    passed_ = false;
    in_backward_.reset();
  }

  /// These count the passes under way whose loss Engine::scale has scaled.
  void begin_scaled_pass() { ++scaled_; }
  void end_scaled_pass() { --scaled_; }
  bool in_scaled_pass() const { return scaled_ > 0; }

  /// Returns the factor of the loss and its gradients: 1, or the loss scale over the micro-batches.
  double loss_factor() const;
  /// Returns the factor that makes a sum over ranks and micro-batches of scaled losses the mean.
  double mean_scale() const;

  /// Returns the factor by which clipping multiplies a step's mean gradient, whose norm is `norm`.
  /// Config::clip_by_previous_norm takes the norm of the last step in its place.
  double clipping_factor(double norm) const;
  /// Returns that factor for updates in backward, which need no norm: that of the last
  /// `begin_updates`, or 1 if nothing is clipped.
  double clipping_factor_in_backward() const { return in_backward_.value_or(1); }
  /// A pass with updates in backward begins: `clipping_factor` stays the same up to the next pass.
  void begin_updates();
  /// Returns the norm of the mean gradient in the last step that updated with finite gradients.
  const std::optional<double>& last_norm() const { return last_norm_; }
  void set_last_norm(std::optional<double> norm) { last_norm_ = norm; }

  /// Throws ConfigError if updates in backward use gradients up.
  void check_gradients_kept() const;
  /// Throws Error in the middle of an accumulation, whose gradients a save would not have.
  void check_at_boundary(std::string_view what) const;
  /// Throws Error unless all micro-batches of a step have been passed.
  void check_whole_step() const;

  /// Returns the updates so far.
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }
  /// Returns the loss scale; empty if losses are not scaled.
  std::optional<LossScale>& loss_scale() { return loss_scale_; }
  const std::optional<LossScale>& loss_scale() const { return loss_scale_; }

 private:
  int64_t of_step() const { return plan_.config().gradient_accumulation_steps; }

  const EnginePlan& plan_;
  int64_t micro_batches_ = 0;
  bool passed_ = false;
  int scaled_ = 0;
  int64_t steps_ = 0;
  std::optional<LossScale> loss_scale_;
  std::optional<double> last_norm_;
  std::optional<double> in_backward_;  // the clipping factor of the step under way
};

}  // namespace zero
