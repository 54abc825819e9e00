// The decision to reduce replicated gradients beside the last backward pass of a step.
//
// Note [Early reductions]
// Replicated gradients are complete only when the last micro-batch of a step has gone backward, so
// they are reduced when the step ends. Between hosts and on a device that would leave the links
// idle during backward. There a unit is reduced in the step's last pass as soon as its gradient is
// complete. On the CPU of one host reductions would only take the cores of backward.
//
// The order of units must be known, so this begins in the second step. All ranks must end the last
// pass with the same calls, although a rank may leave layers out. So a rank reduces all units that
// some rank had a gradient for in the step before, with zeros where none has come. Units that are
// new in this step are reduced when it ends.
//
// This assumes that one pass brings the last gradients of a step. If gradients come again for units
// that have been reduced (a second loss, `backward` several times before `step`, a weight that
// reentrant checkpoints share), they add up in a bucket, whose sum over ranks is added to the
// unit's when the step ends. From then on all units are reduced when the step ends. The same
// follows if zero_grad drops gradients that were reduced early. A program that does so mostly does
// it in its first step already.
#pragma once

#include <cstdint>

namespace zero {

/// Follows the passes of a step. All ranks must be in the same state when a step ends.
class EarlyReductions {
 public:
  explicit EarlyReductions(bool on) : on_(on) {}

  /// Returns whether all ranks reduce early.
  bool on() const { return on_; }
  /// Returns whether the pass under way is the step's last one, and its gradients are reduced as
  /// they come.
  bool in_last_pass() const { return phase_ == Phase::last_pass; }
  /// Returns whether the units that are expected in a step's last pass have been reduced, or are
  /// about to be.
  bool begun() const { return phase_ == Phase::begun; }
  /// Returns whether this rank has seen a reason not to reduce early.
  bool refuses() const { return refuses_; }

  /// A pass begins. `last`: no other pass of this step follows, as far as is known. `layer_major`:
  /// it brings the gradients of several micro-batches.
  void begin_pass(bool last, bool layer_major) {
    const bool first = phase_ == Phase::open;
    if (last && !first) refuses_ = true;  // so the one before was not the last
    if (last && first && on_ && !layer_major) {
      phase_ = Phase::last_pass;
    } else if ((last && first) || phase_ == Phase::last_pass) {
      phase_ = Phase::at_the_end;
    }
  }
  /// A second gradient came for a parameter in the last pass.
  void arrived_again() { refuses_ = true; }
  void begin() { phase_ = Phase::begun; }
  /// All ranks know whether one of them refuses.
  void agree(bool refused) { on_ = on_ && !refused; }
  /// A step begins. The gradients of the one before were used (`completed`) or are dropped.
  void clear(bool completed) {
    if (!completed && begun()) refuses_ = true;
    phase_ = Phase::open;
  }

 private:
  enum class Phase : uint8_t {
    open,        ///< no pass that is taken for the last one has begun
    last_pass,   ///< it has begun, and units are reduced in it
    at_the_end,  ///< it has begun, and units are reduced when the step ends
    begun        ///< all units that were expected have been reduced
  };
  bool on_;
  bool refuses_ = false;
  Phase phase_ = Phase::open;
};

}  // namespace zero
