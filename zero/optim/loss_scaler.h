// Loss scaling for a program without an engine, whose parameters are fp32 and whose operators
// compute in fp16 (with autocast, for example). It corresponds to Python's torch.amp.GradScaler.
//
//   zero::LossScaler scaler;
//   for (auto& batch : loader) {
//     optimizer.zero_grad();
//     scaler.scale(loss(batch)).backward();
//     scaler.step(optimizer);  // left out where a gradient is infinite or NaN
//     scaler.update();
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "zero/optim/loss_scale.h"

namespace zero {

/// Scales losses. Not thread-safe. If there are several ranks, the program must make them agree:
/// `add_overflow`.
class LossScaler {
 public:
  /// Scales as DeepSpeed does, or as PyTorch does with LossScaling::torch(). Throws a ConfigError
  /// if a number of `rule` makes no sense.
  explicit LossScaler(const LossScaling& rule = {}) : scale_(rule) {}

  double scale() const { return scale_.value(); }
  /// Returns the loss times the scale, in fp32.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients of a torch::optim::Optimizer's parameters (those that have one) by the
  /// scale, in place. Returns whether a gradient is infinite or NaN; then `step` leaves its update
  /// out. Call it if unscaled gradients are needed before the step (for clipping); otherwise `step`
  /// does it. Throws a ConfigError for a gradient in fp16, which cannot hold the small numbers that
  /// the scale has kept, and an Error if the optimizer was already unscaled since the last update.
  template <class Optimizer>
  bool unscale(Optimizer& optimizer) {
    auto& seen = begin(&optimizer);
    for (auto& group : optimizer.param_groups()) divide(group.params(), seen);
    return seen.overflow;
  }
  /// Returns whether a gradient of any optimizer or rank was infinite or NaN since the last update.
  bool overflow() const;
  /// Takes whether another rank has found such a gradient. True makes `step` leave the updates out
  /// here too.
  void add_overflow(bool found) {
    elsewhere_ = elsewhere_ || found;
    looked_ = true;
  }
  /// Calls optimizer.step() on unscaled gradients, or does nothing if a gradient of this optimizer
  /// is infinite or NaN. Returns whether it was called. It may be called once between two updates,
  /// and otherwise throws an Error, since newer gradients would be used while they are still
  /// scaled.
  template <class Optimizer>
  bool step(Optimizer& optimizer) {
    if (!begun(&optimizer)) unscale(optimizer);
    if (!may_step(&optimizer)) return false;
    optimizer.step();
    return true;
  }
  /// Sets the scale of the next step. Throws an Error if no gradient was looked at since the last
  /// update, or if gradients overflow at the least scale.
  void update();

  LossScaleState state() const { return scale_.state(); }
  void restore(const LossScaleState& state) { scale_.restore(state); }

 private:
  /// The state of an optimizer since the last update.
  struct Seen {
    const void* optimizer;
    bool overflow = false;
    bool stepped = false;
  };
  Seen& begin(const void* optimizer);
  bool begun(const void* optimizer) const;
  /// Counts the step. Returns whether it may be made; throws if there was one already.
  bool may_step(const void* optimizer);
  void divide(const std::vector<at::Tensor>& parameters, Seen& seen);

  LossScale scale_;
  std::vector<Seen> seen_;
  bool looked_ = false;
  bool elsewhere_ = false;
};

}  // namespace zero
