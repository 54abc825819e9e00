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

/// Not thread-safe. Results of several ranks are the program's to agree on: `add_overflow`.
class LossScaler {
 public:
  /// As DeepSpeed scales, or with LossScaling::torch() as PyTorch does. Throws ConfigError.
  explicit LossScaler(const LossScaling& rule = {}) : scale_(rule) {}

  double scale() const { return scale_.value(); }
  /// The loss times the scale, in fp32.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients of `parameters` (those that have one) in place by the scale, and
  /// remembers whether one is infinite or NaN, which it returns. For what needs unscaled gradients
  /// before the step (clipping). Throws ConfigError for a gradient in fp16, which cannot hold what
  /// the scale has kept.
  bool unscale(const std::vector<at::Tensor>& parameters);
  /// The same of all parameters of a torch::optim::Optimizer: once between two updates.
  template <class Optimizer>
  requires requires(Optimizer& optimizer) { optimizer.param_groups(); }
  bool unscale(Optimizer& optimizer) {
    begin(&optimizer);
    for (auto& group : optimizer.param_groups()) unscale(group.params());
    return overflow_;
  }
  /// Since the last update a gradient was infinite or NaN.
  bool overflow() const { return overflow_; }
  /// Another rank has found one: true makes `step` leave the update out here too.
  void add_overflow(bool found) {
    overflow_ = overflow_ || found;
    looked_ = true;
  }
  /// optimizer.step() on unscaled gradients, or nothing where one is infinite or NaN: returns
  /// whether it was called.
  template <class Optimizer>
  bool step(Optimizer& optimizer) {
    if (!begun(&optimizer)) unscale(optimizer);
    if (!overflow_) optimizer.step();
    return !overflow_;
  }
  /// Sets the scale of the next step. Throws Error where no gradient was looked at since the last
  /// update, and where gradients overflow at the least scale.
  void update();

  LossScaleState state() const { return scale_.state(); }
  void restore(const LossScaleState& state) { scale_.restore(state); }

 private:
  void begin(const void* optimizer);
  bool begun(const void* optimizer) const;

  LossScale scale_;
  std::vector<const void*> unscaled_;  // optimizers, since the last update
  bool looked_ = false;
  bool overflow_ = false;
};

}  // namespace zero
