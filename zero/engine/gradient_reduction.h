// The interface of reductions of gradients, which are replicated (stages 0 and 1) or sharded
// (stages 2 and 3).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/base/gradient_place.h"
#include "zero/engine/look_ups.h"
#include "zero/engine/reduction_context.h"
#include "zero/optim/optimizer.h"

namespace zero {

/// Learns when the reduction of a unit of sharded gradients starts.
class ReductionObserver {
 public:
  virtual ~ReductionObserver() = default;
  virtual void reduction_starts(int64_t unit) = 0;
};

/// Updates units in backward, as soon as their gradients are reduced (Note [Update in backward]).
class BackwardUpdates {
 public:
  virtual ~BackwardUpdates() = default;
  /// Takes this rank's slice of a unit's sum. A slice on the host does not change until the next
  /// step.
  virtual void update_in_backward(int64_t unit, at::Tensor sum) = 0;
};

/// Reduces the gradients of a step. The calls follow a step: passes (`begin_pass`, then arrivals,
/// then `end_pass` or `drop_pass`), `reduce_late` and `complete`, and then sums are read until
/// `clear`. One thread calls at a time.
class GradientReduction {
 public:
  explicit GradientReduction(const ReductionContext& context) : context_(context) {}
  virtual ~GradientReduction() = default;
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;

  /// Sets the observer of reductions, which outlives this; null: nobody observes.
  void observe(ReductionObserver* observer) { observer_ = observer; }

  struct Pass {
    /// Units are reduced by `reduce_ready` and when the pass ends, and not before.
    bool layer_major = false;
    /// Parameters whose units are reduced when the pass ends, and not before.
    const std::vector<int64_t>& shared;
    /// No other pass of this step follows, as far as is known.
    bool last = false;
    /// No backward function of the pass has run yet.
    bool from_start = true;
  };
  virtual void begin_pass(const Pass& pass) = 0;
  /// Returns the array that gradients of the unit are collected in.
  virtual const at::Tensor& array(int64_t unit) = 0;
  /// Takes the gradient itself as the array of its unit, if that saves a copy. Returns whether it
  /// did.
  virtual bool adopt(int64_t /*unit*/, const at::Tensor& /*gradient*/,
                     const at::Tensor& /*variable*/) {
    return false;
  }
  /// The gradient of a parameter lies in the array; `first`: no other one lay there before.
  virtual void arrived(int64_t parameter, bool first) = 0;
  /// No more gradients come in this pass for the units whose gradients have all arrived.
  virtual void reduce_ready() {}
  virtual void end_pass() = 0;
  /// The pass has thrown, so nobody needs its gradients.
  virtual void drop_pass() = 0;

  /// These do what GradientPlace's functions of the same name do; `announce_rows` is called before
  /// the last pass of a step only.
  virtual bool announce_rows(int64_t /*parameter*/, const at::Tensor& /*indices*/) { return false; }
  virtual c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(int64_t /*parameter*/,
                                                               const at::Tensor& /*indices*/) {
    return {};
  }
  virtual GradientTaker* taker(int64_t /*parameter*/) { return nullptr; }
  virtual void returns_whole(int64_t /*parameter*/, const at::Tensor& /*gradient*/) {}
  /// Autograd has brought this gradient of the parameter, which is not in its array yet.
  virtual void brought(int64_t /*parameter*/, const at::Tensor& /*gradient*/) {}
  /// Returns the messages of the last step's look-ups, by weight.
  virtual std::vector<RowMessages> look_ups() const { return {}; }
  /// Returns the look-ups on whose rows all ranks agree in the next step.
  virtual std::vector<ExpectedLookUp> expected_look_ups() const { return {}; }

  /// Returns the report for the other ranks at the end of the step.
  virtual GradientPresence::Report report() const = 0;
  /// Starts the reduction of gradients that came too late for their pass, on any rank. Collective.
  virtual void reduce_late(const GradientPresence::Agreement& /*agreed*/) {}
  /// Completes the sums of the step. Collective; to be called on the side stream.
  virtual void complete(const GradientPresence::Agreement& agreed) = 0;
  /// Returns whether the sums over all ranks are made once a step, so that none is added later.
  virtual bool sums_once_a_step() const = 0;

  /// Returns whether ranks must agree before they drop the gradients of a step.
  virtual bool drops_together() const { return false; }
  /// Returns whether this rank has begun reductions that the others must take part in.
  virtual bool has_begun() const { return false; }
  /// Takes part in reductions that other ranks have begun, before all drop them. Collective if
  /// `drops_together`.
  virtual void join_begun() {}
  /// Begins a step; the gradients of the one before were used (`completed`) or are dropped.
  virtual void clear(bool completed) = 0;

  /// Returns the elements that this rank updates of the sum over ranks and passes; a copy if
  /// they lie on disk.
  virtual at::Tensor sum(int64_t unit) const = 0;
  /// Opens a sum for writing. It holds zeros if the step had none before.
  virtual at::Tensor open_sum(int64_t unit) = 0;
  /// Stores the sum of `open_sum`, which the caller has changed.
  virtual void store_sum(int64_t unit, const at::Tensor& sum) = 0;
  /// Gives the sums of all units to an update, which reads `detached` until the next call. New sums
  /// go elsewhere if they are doubled.
  virtual void detach() = 0;
  /// Returns the sum that the update reads; an undefined tensor if it lies on disk.
  virtual const at::Tensor& detached(int64_t unit) const = 0;

  /// Returns the part of a sum whose squares this rank adds up, if it lies on a device.
  virtual at::Tensor norm_part_on_device(int64_t unit) const = 0;
  /// Returns the norm of that part, if it lies elsewhere.
  virtual optim::SquaredNorm norm(int64_t unit) const = 0;

  /// Sums go to `updates`, which outlives this, if the settings say that they are handed over.
  virtual void hand_over_to(BackwardUpdates& /*updates*/) {}
  /// Returns whether a sum of this step was handed over for an update, or is about to be.
  virtual bool handed_over() const { return false; }
  /// Returns whether the sum of `unit` was handed over.
  virtual bool handed_over(int64_t /*unit*/) const { return false; }
  /// Forgets the rounding errors of quantised sums. No reduction is under way.
  virtual void forget_residuals() {}

 protected:
  /// Makes a unit's array ready to be added to the other ranks': no more of this rank's gradients
  /// go into it.
  void close(int64_t unit, const at::Tensor& array) const {
    context_.arrivals.close(unit, array);
    const double divisor = context_.settings.predivisor;
    if (divisor != 1) array.mul_(1 / divisor);
  }
  /// Returns a copy of the array in a bucket, in the dtype in which it is reduced.
  at::Tensor converted(int64_t unit, const at::Tensor& array) const {
    auto bucket = context_.pool.take(array.numel(), context_.gradient_form(unit).reduced);
    bucket.copy_(array);
    return bucket;
  }

  ReductionContext context_;
  ReductionObserver* observer_ = nullptr;
};

/// Stages 0 and 1: Note [Replicated gradients] in replicated_gradients.cpp.
std::unique_ptr<GradientReduction> replicated_gradients(const ReductionContext& context);
/// Stages 2 and 3: Note [Sharded gradients] in sharded_gradients.cpp.
std::unique_ptr<GradientReduction> sharded_gradients(const ReductionContext& context);

}  // namespace zero
