// The loss scale of training in fp16: a rule that follows overflows. zero/optim/loss_scaler.h
// applies it to tensors, and the engine applies it to its own gradients.
//
// Note [Loss scale]
// The least fp16 number is 6e-8 and the greatest 65504. So gradients are computed from the loss
// times a scale (1710.03740, section 3.2), and divided by the scale in fp32 before they are used. A
// dynamic scale is as large as possible: a step with an infinite or NaN gradient is left out and
// lowers the scale, and steps without one raise it. Implementations differ in how many of either it
// takes: DeepSpeed 0.19.8 lets `hysteresis` overflows pass, and does not count the first step
// without one; PyTorch's GradScaler does neither. A rule here has both as numbers.
#pragma once

#include <cstdint>
#include <limits>

namespace zero {

/// How a loss scale is chosen. The values here are those of DeepSpeed's `fp16` section.
struct LossScaling {
  double fixed = 0;            ///< a scale that never changes; 0: the scale is dynamic
  int64_t initial_power = 16;  ///< the first scale is 2 to this power
  int64_t window = 1000;       ///< this many steps without overflow raise the scale
  int64_t hysteresis = 2;  ///< overflow number `hysteresis` lowers the scale, and each one after it
  /// If true, a step without overflow restarts the count of `hysteresis`; otherwise raising the
  /// scale restarts it.
  bool consecutive_hysteresis = false;
  double minimum = 1;  ///< lower limit of the scale; an overflow at it is an error
  double growth = 2;   ///< factor that raises the scale; `backoff` lowers it
  double backoff = 0.5;
  /// The steps without overflow that do not count for `window`, at the start and after an overflow.
  int64_t uncounted = 1;
  /// Upper limit of the scale: scales are numbers of fp32.
  double maximum = static_cast<double>(std::numeric_limits<float>::max());

  /// Returns the rule of torch.amp.GradScaler with its defaults.
  static constexpr LossScaling torch() {
    LossScaling rule;
    rule.window = 2000;
    rule.hysteresis = 1;
    rule.minimum = 0;
    rule.uncounted = 0;
    return rule;
  }
  bool operator==(const LossScaling&) const = default;
};

/// The part of a loss scale that a checkpoint keeps.
struct LossScaleState {
  double scale = 1;
  int64_t clean = 0;       ///< steps without overflow that count for the window
  int64_t hysteresis = 1;  ///< overflows that remain until the scale is lowered
  bool operator==(const LossScaleState&) const = default;
};

class LossScale {
 public:
  /// Throws ConfigError naming a number of `rule` that makes no sense.
  explicit LossScale(const LossScaling& rule);

  double value() const { return state_.scale; }
  bool dynamic() const { return rule_.fixed == 0; }
  /// Takes whether a step had an infinite or NaN gradient. Returns false if it had one and the
  /// scale cannot be lowered any more; then nothing has changed.
  bool update(bool overflow);

  const LossScaleState& state() const { return state_; }
  /// Throws a ConfigError for a state that no scale can have. A fixed scale stays as it is.
  void restore(const LossScaleState& state);

 private:
  LossScaling rule_;
  LossScaleState state_;
};

}  // namespace zero
