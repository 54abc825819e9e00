// The second flow: gradients, from autograd's hooks to the sums over ranks that the update reads.
//
// Note [The way of a gradient]
// A gradient takes these steps. The code has one word for each.
//   arrive      Autograd's hook hands the gradient over.                      GradientArrivals
//   collect     It is written or added to its place in the unit's array.      GradientArrivals
//   adopt       Instead, a gradient that is all of a unit too large for a     GradientReduction
//               bucket, and that nobody else uses, becomes the array.
//   close       No more come: the array's other elements become zero.         GradientReduction
//   convert     The array is copied to the dtype that is reduced.             GradientReduction
//   reduce      The ranks add their arrays up: a reduce-scatter, or at        ReductionQueue,
//               stage 0 an all-reduce.                                        PhasedReduction
//   deliver     The result goes to the class of the unit's tier.              ReductionQueue,
//               SumsByTier has chosen this class when the engine was made.    SumsByTier
//   store or    The result becomes the unit's sum on that tier, or is added   GradientSums
//   add         to the sum of earlier passes.
//   hand over   An update in backward takes the sum of one unit.              BackwardUpdates
//   detach      An update after the step takes the sums of all units.         UpdateSchedule
// A gradient is late if it arrives after its unit was reduced in its pass.
//
// Gradients are reduced once a step at stages 0 and 1 (ReplicatedGradients), and in each backward
// pass at stages 2 and 3 (ShardedGradients). Besides, ReductionOrder keeps the order in which all
// ranks reduce units, GradientPresence knows which parameters had a gradient on some rank, and
// UnitNorms takes the norm of the sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "zero/device/stream.h"
#include "zero/engine/bucket_pool.h"
#include "zero/engine/engine_plan.h"
#include "zero/engine/gradient_arrivals.h"
#include "zero/engine/gradient_presence.h"
#include "zero/engine/gradient_reduction.h"
#include "zero/engine/norm.h"
#include "zero/engine/reduction_order.h"
#include "zero/engine/state_table.h"

namespace zero {

/// Collects and reduces the gradients of one step after the other. Autograd may call it from
/// threads of its own.
class ReduceFlow {
 public:
  /// Both arguments outlive this.
  ReduceFlow(const EnginePlan& plan, StateTable& table);
  ReduceFlow(const ReduceFlow&) = delete;
  ReduceFlow& operator=(const ReduceFlow&) = delete;
  /// See GradientReduction::hand_over_to. To be called before the first pass.
  void hand_over_to(BackwardUpdates& updates) { reduction_->hand_over_to(updates); }
  /// See GradientReduction::observe.
  void observe(ReductionObserver* observer) { reduction_->observe(observer); }

  // The calls of a backward pass.

  /// Begins a pass. Throws Error if the step can have no other pass: its gradients have been
  /// completed, or handed over for updates.
  void begin_pass(const GradientReduction::Pass& pass);
  /// Returns memory for the gradient of a parameter: see GradientPlace::place.
  at::Tensor place(int64_t parameter);
  /// Return what GradientReduction's functions of the same name do.
  bool announce_rows(int64_t parameter, const at::Tensor& indices);
  c10::intrusive_ptr<AnnouncedLookUp> announce_look_up(int64_t parameter,
                                                       const at::Tensor& indices);
  GradientTaker* taker(int64_t parameter);
  void returns_whole(int64_t parameter, const at::Tensor& gradient);
  /// Takes the gradient of a parameter: see GradientSink::arrive.
  void arrive(int64_t parameter, const at::Tensor& variable);
  /// Reduces the units whose gradients have all arrived: no more come for them in this pass.
  void reduce_ready();
  /// Reduces the units that the pass has left over.
  void end_pass();
  /// The pass has failed, so nobody needs its reductions.
  void drop_pass();

  // The calls at the end of a step.

  /// Returns whether gradients have come since the last step, but only in passes of other engines,
  /// so that they were dropped.
  bool only_foreign() const { return brought_ == Brought::foreign; }
  /// Completes every reduction, so that `sum` and `present` are final for this step. Further calls
  /// do nothing until a new gradient arrives. Collective.
  void complete();
  /// Returns the sum over ranks and passes of the elements of `unit` that this rank updates; a copy
  /// if they lie on disk.
  at::Tensor sum(int64_t unit) const { return reduction_->sum(unit); }
  /// Returns 1 for each parameter that some rank had a gradient for in this step, else 0.
  const std::vector<uint8_t>& present() const { return presence_.anywhere(); }
  /// Return what GradientReduction's functions of the same name do.
  std::vector<RowMessages> look_ups() const { return reduction_->look_ups(); }
  std::vector<ExpectedLookUp> expected_look_ups() const { return reduction_->expected_look_ups(); }
  /// Returns the trainable units in the order of reduction.
  const std::vector<int64_t>& order() const { return order_.units(); }
  /// Returns, by unit, the sum of squares of the part of its sum that this rank adds up: the same
  /// elements at every stage. Units that no rank had a gradient for have none. On a device the host
  /// waits for them, once.
  std::vector<optim::SquaredNorm> norms();

  /// Gives the sums to an update, which reads `detached` until the next call. New sums go elsewhere
  /// if they are doubled.
  void detach();
  /// Returns the sum that the update reads; an undefined tensor if it lies on disk.
  const at::Tensor& detached(int64_t unit) const { return reduction_->detached(unit); }
  /// Returns whether a sum of this step was handed over for an update in backward.
  bool handed_over() const { return reduction_->handed_over(); }
  /// Returns whether the sum of `unit` was handed over.
  bool handed_over(int64_t unit) const { return reduction_->handed_over(unit); }

  // The calls between steps.

  /// Returns whether all ranks must drop the gradients of a step together, with `join_begun`. The
  /// answer is the same on all ranks.
  bool drops_together() const { return reduction_->drops_together(); }
  /// Returns whether this rank has begun reductions that the others must take part in then.
  bool has_begun() const { return reduction_->has_begun(); }
  /// Takes part in reductions that some rank has begun, before all drop them. Collective if
  /// `drops_together`.
  void join_begun();
  /// Starts the next step. Gradients that were not used are dropped.
  void clear();
  /// Forgets the rounding errors of quantised sums. No reduction is under way.
  void forget_residuals();

  /// Puts a full gradient (storage order, mean times the number of terms) in place of the reduced
  /// one. `parameter` counts as present on all ranks. Collective.
  void set(int64_t parameter, const at::Tensor& values);
  /// Drops what was reduced: no rank has had a gradient for `parameter` so far. Collective.
  void drop(int64_t parameter);

 private:
  std::unique_ptr<GradientReduction> make_reduction();
  BucketPool make_pool() const;

  const partition::Layout& layout_;
  StateTable& table_;
  const Placement& placement_;
  ReductionSettings settings_;
  std::optional<c10::Stream> side_;  // a device's; none on the CPU
  StreamMark mark_;
  std::vector<std::string> labels_;
  UnitNorms unit_norms_;
  GradientArrivals arrivals_;
  GradientPresence presence_;
  ReductionOrder order_;
  BucketPool pool_;
  enum class Brought : uint8_t { nothing, foreign, gradients };
  Brought brought_ = Brought::nothing;  // by the passes since the last step
  bool dropped_by_some_ = false;        ///< a pass of this step has thrown on some ranks only
  bool completed_ = false;              // sums are complete, and no gradient has come since
  std::mutex mutex_;                    // autograd may run hooks on threads of its own
  std::unique_ptr<GradientReduction> reduction_;  // uses all of the above
};

}  // namespace zero
