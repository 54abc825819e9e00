// Loss scaling for a program without an engine, whose parameters are fp32 and whose operators
// compute in fp16 (autocast, say): what torch.amp.GradScaler is in Python.
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
  /// As DeepSpeed scales, or with LossScaling::torch() as PyTorch does. Throws ConfigError.
  explicit LossScaler(const LossScaling& rule = {}) : scale_(rule) {}

  double scale() const { return scale_.value(); }
  /// The loss times the scale, in fp32.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients of the parameters of a torch::optim::Optimizer (those that have one) in
  /// place by the scale. Returns whether one is infinite or NaN; then `step` leaves its update out.
  /// For what needs unscaled gradients before the step (clipping); otherwise `step` does it. Throws
  /// ConfigError for a gradient in fp16, which cannot hold what the scale has kept; Error where the
  /// optimizer was unscaled already since the last update.
  template <class Optimizer>
  bool unscale(Optimizer& optimizer) {
    auto& seen = begin(&optimizer);
    for (auto& group : optimizer.param_groups()) divide(group.params(), seen);
    return seen.overflow;
  }
  /// Since the last update a gradient was infinite or NaN, of any optimizer or rank.
  bool overflow() const;
  /// Another rank has found one: true makes `step` leave the updates out here too.
  void add_overflow(bool found) {
    elsewhere_ = elsewhere_ || found;
    looked_ = true;
  }
  /// optimizer.step() on unscaled gradients, or nothing where one of this optimizer's is infinite
  /// or NaN: returns whether it was called. Once between two updates: throws Error otherwise, since
  /// gradients that have come meanwhile would be used as they are, scaled.
  template <class Optimizer>
  bool step(Optimizer& optimizer) {
    if (!begun(&optimizer)) unscale(optimizer);
    if (!may_step(&optimizer)) return false;
    optimizer.step();
    return true;
  }
  /// Sets the scale of the next step. Throws Error where no gradient was looked at since the last
  /// update, and where gradients overflow at the least scale.
  void update();

  LossScaleState state() const { return scale_.state(); }
  void restore(const LossScaleState& state) { scale_.restore(state); }

 private:
  /// An optimizer since the last update.
  struct Seen {
    const void* optimizer;
    bool overflow = false;
    bool stepped = false;
  };
  Seen& begin(const void* optimizer);
  bool begun(const void* optimizer) const;
  /// Counts the step; throws where there was one.
  bool may_step(const void* optimizer);
  void divide(const std::vector<at::Tensor>& parameters, Seen& seen);

  LossScale scale_;
  std::vector<Seen> seen_;
  bool looked_ = false;
  bool elsewhere_ = false;
};

}  // namespace zero
