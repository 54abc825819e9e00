// The second flow: gradients from autograd's hooks, through a unit's array, to the sums over ranks
// that the update reads.
//
// Note [Gradients]
// Each parameter's post-accumulate hook copies its gradient into the unit's array and drops
// `.grad`; a backward function that asked for the place beforehand (gradient_place.h) has written
// it there itself. Replicated (stages 0 and 1): the array is the gradient storage of the formula;
// micro-batches add up in it, and it is all-reduced (stage 0) or reduce-scattered (stage 1) once a
// step: in `finish`, or, where that costs backward no core (Note [Early reductions]), as soon as
// the step's last pass has completed it. Sharded (stages 2 and 3): the array is a bucket that lives
// until the unit is complete and reduce-scattered, in every backward pass; the slice that this rank
// owns is the gradient storage of the formula, and micro-batches add up where that lies
// (gradient_sums.h).
//
// Note [Order of reductions]
// Every rank reduces the units in the same order: a unit that is ready early waits its turn, and
// one that some rank did not touch is reduced with zeros when backward ends. The order is that in
// which units became ready on rank 0 in the first pass. So that a unit which a pass leaves out (a
// block that is skipped at random) does not keep all later buckets alive, it is reduced with what
// has come once kWaiting complete ones wait behind it (ReduceFlow::may_leave says where not). A
// gradient that comes for a unit already reduced in this pass (recomputation, several uses) waits
// in its bucket for the next pass, or for the boundary.
//
// A gradient that was written to its place reaches the hook when all uses of the parameter in its
// backward pass have run. A pass inside that one (recomputation) may bring another gradient of the
// parameter before: then what waits moves out of the place, to memory of its own.
//
// Where all micro-batches pass one layer before the next (Engine::accumulate), their gradients add
// up in the bucket, in the dtype of the storage, and the unit is reduced once a step: `release`
// says that the layers so far are complete. A weight that several layers share waits until all are.
//
// Where updates run in backward a slice is handed over as it is reduced, and none is kept. This
// needs to know that the unit is complete: a unit some of whose parameters had no gradient on this
// rank is kept until all ranks have told what they had.
//
// With replicas (Note [Hybrid sharding]) a reduction has three phases; each that starts moves those
// before it on by one. Where micro-batches add up on the device in several passes, they do so in
// the block, and the sums over replicas are made once, when the step ends.
//
// A sum in fp16 of gradients that are in fp16's range may leave it. So each rank divides its own
// before they are added (`predivisor`), by the ranks where the sum is rounded to fp16.
//
// Gradients may be reduced in another dtype than that of their sums (Note [Dtypes of gradients] in
// form.h). A bucket of one pass has that dtype from the start, if nothing is to be divided before.
// An array in which gradients of several passes add up is copied to a bucket of that dtype for the
// reduction. Where it has fewer bits, sums are rounded to it at every stage: an all-reduce has no
// other.
//
// On a device a unit is reduced on a stream of this flow's own: what the hook has enqueued comes
// before, backward goes on beside it, and `finish` lets the caller's stream follow. Sums are taken
// on that stream too, and it waits for their users when a step is over (`clear`).
//
// Buckets of ordinary units have one size and are used again and again: one on its way, one that
// fills. A parameter too large for them is a unit of its own; its gradient needs no bucket where it
// has the unit's shape: it is reduced from where autograd left it, through the group's small
// staging buffer.
//
// Note [Early reductions]
// Between hosts and on a device a replicated unit is reduced beside the backward pass of the step's
// last micro-batch, once the first step has told the order. So that all ranks end that pass with
// the same calls, it reduces what some rank had a gradient for in the step before, with zeros where
// none has come; what is new is left to `finish`. Where gradients come again for what one pass of a
// last micro-batch brings (a second loss, `backward` several times before `step`, a shared weight
// under reentrant checkpoints), or reductions are dropped by zero_grad, all are reduced in `finish`
// from then on: mostly the first step tells. In a later one, what comes for a unit that has been
// reduced adds up in a bucket, whose sum `finish` adds to the unit's. On one host's CPU reductions
// would only take the cores of backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "zero/comm/group.h"
#include "zero/device/stream.h"
#include "zero/engine/bucket_pool.h"
#include "zero/engine/gradient_sums.h"
#include "zero/engine/model.h"
#include "zero/engine/placement.h"
#include "zero/engine/state_table.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/layout.h"

namespace zero {

class ReduceFlow final : public GradientSink {
 public:
  struct Options {
    /// Bytes of an ordinary unit at most.
    int64_t unit_bytes = 0;
    /// A rank's gradients are divided by this before they are added.
    double predivisor = 1;
    /// What backward begins with now.
    std::function<double()> loss_factor;
    /// The beta with which the next one gets what a quantised sum has lost (LoCo).
    std::optional<float> feedback{};
    /// An update may use the gradients of one step while those of the next are reduced.
    bool doubled = false;
    /// Where set, the sums of sharded gradients are not kept: takes a unit's slice, for its update.
    /// A slice on the host stays as it is until `clear`. For one pass a step.
    HandOver hand_over;
    /// Called where set when the reduction of a unit starts in a pass (sharded gradients).
    std::function<void(int64_t unit)> starts{};
  };

  /// `table` outlives this.
  ReduceFlow(const partition::Layout& layout, std::vector<at::Tensor> parameters, StateTable& table,
             const Placement& placement, Options options);
  ~ReduceFlow() override;
  ReduceFlow(const ReduceFlow&) = delete;
  ReduceFlow& operator=(const ReduceFlow&) = delete;

  void arrive(int64_t parameter, const at::Tensor& variable) override;
  at::Tensor place(int64_t parameter) override;
  double loss_factor() const override { return options_.loss_factor(); }

  /// Gradients have come since the last step, but in no pass of this engine's: they were dropped.
  bool only_foreign() const { return foreign_ && !passed_; }

  /// `holds`: no unit is reduced but by `release` and at the end; those of the parameters `shared`
  /// at the end. `last`: no other pass of this step is to come, as far as is known.
  void begin_backward(bool holds = false, const std::vector<int64_t>& shared = {},
                      bool last = false);
  /// Reduces the units whose gradients have all arrived: no more will come for them in this pass.
  void release();
  /// Reduces what the pass left over (replicated gradients: Note [Early reductions]).
  void end_backward();
  /// The pass failed: what it reduces is of no use.
  void abandon_backward();

  /// Completes every reduction, so that sums and `present` are final for this step; further calls
  /// do nothing until a new gradient arrives. Collective.
  void finish();

  /// The sum over ranks and passes of the owned elements of `unit`. A copy where they lie on disk.
  at::Tensor sum(int64_t unit) const;
  /// A sum of this step was handed to an update in backward.
  bool used() const { return options_.hand_over && any_filled(); }
  /// The unit was updated from its sum, which is gone.
  bool updated(int64_t unit) const { return state(unit).updated; }
  /// Gives what was reduced to an update: `detached(unit)` until the next call, while new gradients
  /// go elsewhere if they are doubled.
  void detach();
  /// As `sum` was before `detach`; undefined where it is on disk.
  const at::Tensor& detached(int64_t unit) const { return state(unit).detached; }
  /// By unit, of those that some rank has a gradient for: the sum of squares of the sum's slice
  /// that this rank adds up, the same elements at every stage. On a device the host waits for them,
  /// once.
  std::vector<optim::SquaredNorm> norms();
  /// By parameter: some rank had a gradient for it in this step.
  const std::vector<uint8_t>& present() const { return present_; }
  /// The trainable units in the order of reduction.
  const std::vector<int64_t>& order() const { return order_; }

  /// Before all ranks drop the gradients of a step: reduces here too what others have begun to
  /// (Note [Early reductions]; one of them may have had no pass). Collective where early reductions
  /// are on, which is the same on all ranks.
  void join_started();
  /// Whether early reductions are on.
  bool early() const { return early_; }
  /// Starts the next step: no gradient has arrived.
  void clear();
  /// What quantised sums have lost so far is not added to the next ones. No reduction is under way.
  void forget_losses();

  /// Puts a full gradient (storage order, mean times `divisor`) in place of what was reduced;
  /// `parameter` counts as present everywhere.
  void set(int64_t parameter, const at::Tensor& values);

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Unit {
    GradientSums* sums = nullptr;  // sharded: where the unit's go
    at::Tensor whole;              // replicated: the gradient storage of the formula
    at::Tensor other;              // replicated and doubled: what the update reads, or has read
    at::Tensor detached;
    bool filled = false;   // there is a sum of this step
    bool updated = false;  // in backward
    bool last = false;     // in this pass: waits for the end
    at::Tensor losses;     // of quantised sums, with feedback (comm::LinkWire::error)
    at::Tensor bucket;     // sharded: gradients of this pass, replicated: late ones; or none
    std::optional<c10::Stream> home{};  // of the bucket's memory, on a device
    bool pooled = false;                // the bucket is of the pool, not a gradient itself
    bool queued = false;                // its turn in this pass (replicated: step) is over
    bool abandoned = false;             // replicated: reduced by a pass that has thrown
    int64_t arrived = 0;                // parameters whose gradient came in this pass
  };

  void make_pool();
  void make_sums();
  void make_losses();
  void make_whole();
  void reserve_buckets();
  const at::Tensor& array_of(int64_t unit);
  void evacuate(int64_t parameter, const at::Tensor& gradient);
  bool stands_alone(int64_t unit, const at::Tensor& gradient, const at::Tensor& variable) const;
  int64_t bucket_bytes(int64_t unit) const;
  const GradientForm& form(int64_t unit) const { return table_.plan(unit).gradients; }
  at::Tensor converted(int64_t unit, const at::Tensor& array);
  void zero_missing(int64_t unit, const at::Tensor& array, const std::vector<uint8_t>& here);
  std::optional<comm::LinkWire> link_wire(int64_t unit) const;
  bool complete(int64_t unit) const;
  bool any_filled() const;
  bool sharded() const { return placement_.sharded.gradients; }
  comm::Group* replicas() const {
    return placement_.replicas->size() > 1 ? placement_.replicas.get() : nullptr;
  }
  void abandon_reductions();
  void advance();
  bool any_of(int64_t unit, const std::vector<uint8_t>& parameters) const;
  // Some rank has a gradient for it; had one in the step before.
  bool wanted(int64_t unit) const { return any_of(unit, present_); }
  bool expected(int64_t unit) const { return any_of(unit, before_); }
  void start_expected();
  bool may_leave(int64_t unit) const;
  void reduce(int64_t unit);
  void start(Reduction reduction, bool over_replicas);
  void progress(size_t newest);
  void retire(Reduction reduction);
  void predivide(const at::Tensor& array) const;
  void close(int64_t unit, const at::Tensor& array);
  void add_deferred();
  void start_whole(int64_t unit);
  void reduce_whole();
  void add_late(const std::vector<bool>& left);
  bool on_device(int64_t unit) const;
  at::Tensor part_of_norm(int64_t unit) const;
  void send_down(int64_t unit);
  at::Tensor slice(int64_t unit) const;
  /// What all ranks know when a step's last pass is over.
  struct Agreed {
    std::vector<bool> left;  ///< by unit: some rank has a gradient in its bucket
    bool started = false;    ///< some rank has started what a last pass is expected to bring
  };
  Agreed agree();
  Unit& state(int64_t unit) { return states_[static_cast<size_t>(unit)]; }
  const Unit& state(int64_t unit) const { return states_[static_cast<size_t>(unit)]; }

  const partition::Layout& layout_;
  std::vector<at::Tensor> parameters_;
  StateTable& table_;
  Placement placement_;
  comm::Group& group_;               // that shards
  std::optional<c10::Stream> side_;  // of a device
  StreamMark mark_;
  at::Tensor norms_;  // (units, 2), on a device
  Options options_;
  std::vector<Unit> states_;
  std::vector<std::string> labels_;
  std::vector<int64_t> order_;
  std::vector<int64_t> ready_;  // units in the order in which they became ready in the first pass
  bool order_known_ = false;
  bool early_ = false;              // replicated: Note [Early reductions]
  bool counts_ = false;             // those of this pass are told apart
  bool began_ = false;              // a pass that is taken for the last one of this step
  bool started_ = false;            // it has started what was expected
  bool again_ = false;              // what is against early reductions has happened on this rank
  size_t next_ = 0;                 // into order_: the unit whose turn it is
  int64_t waiting_ = 0;             // complete units whose turn has not come in this pass
  std::vector<uint8_t> in_bucket_;  // by parameter: its gradient is in the unit's array
                                    // (replicated) or bucket (sharded)
  std::vector<uint8_t> came_;  // by parameter: its gradient came in this pass, where that counts
  std::vector<uint8_t> promised_;   // by parameter: a backward function has its place in there
  std::vector<WeakTensor> places_;  // by parameter: the tensor that it has, while promised
  std::vector<uint8_t> local_;      // by parameter: this rank had a gradient in this step
  std::vector<uint8_t> present_;    // by parameter: some rank had
  std::vector<uint8_t> before_;     // the same of the step before
  bool holds_ = false;
  bool in_pass_ = false;  // of Engine::backward, not of the user's torch::autograd::grad
  bool passed_ = false;   // there was one in this step
  bool foreign_ = false;  // a gradient came outside
  bool finished_ = false;
  std::unique_ptr<BucketPool> pool_;
  std::vector<std::unique_ptr<GradientSums>> sums_;  // sharded: those that units use
  std::deque<Reduction> in_flight_;
  std::vector<comm::Work> sums_of_all_;  // replicated: all-reduces under way
  std::mutex mutex_;                     // autograd may run hooks on threads of its own
};

}  // namespace zero
