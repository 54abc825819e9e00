// Gradients: from autograd's hooks, through a unit's bucket, to the sums over ranks that the
// optimizer reads.
//
// Note [Gradients]
// Each parameter's post-accumulate hook copies its gradient into the unit's array and drops
// `.grad`; a backward function that asked for the place beforehand (gradient_place.h) has written
// it there itself. Replicated (stages 0 and 1): the array is the gradient storage of the formula;
// micro-batches add up in it, and it is all-reduced (stage 0) or reduce-scattered (stage 1) at the
// accumulation boundary. Sharded (stages 2 and 3): the array is a bucket that lives until the unit
// is complete and reduce-scattered, in every backward pass; the slice that this rank owns is the
// gradient storage of the formula, and micro-batches add up in it. Every rank reduces the units in
// the same order: a unit that is ready early waits its turn, and one that some rank did not touch
// is reduced with zeros when backward ends. The order is that in which units became ready on rank 0
// in the first pass. A gradient that comes for a unit already reduced in this pass (recomputation,
// several uses) waits in its bucket for the next pass, or for the boundary.
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
// Buckets of ordinary units have one size and are used again and again: one on its way, one that
// fills. Where gradients live on disk the slices are written there as they are reduced, and the
// update reads them with the other states. Where they live on the host, what is reduced goes down
// to it: sharded, a slice at a time while backward goes on, where micro-batches add up; replicated,
// once a step, what this rank updates. A parameter too large for them is a unit of its own; its
// gradient needs no bucket where it has the unit's shape: it is reduced from where autograd left
// it, through the group's small staging buffer.
//
// Note [Slices in activations' memory]
// Sharded gradients are none between the update and the next reduction, which is when activations
// are most. So a slice is made when its unit is reduced, of memory that the activations behind it
// have left, and goes when the step is over (or, where updates run in backward, its update). Of a
// gradient that is a unit by itself the slice is reduced in its place, and the rest of its memory
// is given back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/model.h"
#include "zero/engine/state_stream.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/formulas.h"
#include "zero/partition/layout.h"
#include "zero/store/tier.h"

namespace zero {

class GradientStore final : public GradientSink {
 public:
  struct Options {
    partition::Placement placement;
    /// Gradients of several passes add up in fp32, whatever the parameter's dtype.
    bool accumulate_fp32 = false;
    /// They add up in the buckets: one pass brings those of all micro-batches (sharded gradients).
    bool add_in_buckets = false;
    /// Bytes of an ordinary unit at most.
    int64_t unit_bytes = 0;
    /// Where sharded gradients lie, as the last array of each trainable unit; null: in memory.
    StateStream* disk = nullptr;
    /// By unit: the update reads it on the host. None: no unit. `host` is the way there; it
    /// outlives this.
    std::vector<bool> on_host = {};
    HostLink* host = nullptr;
    /// An update may use the gradients of one step while those of the next are reduced.
    bool doubled = false;
    /// Where set, the sums of sharded gradients are not kept: takes a unit's slice, for its update.
    /// A slice on the host stays as it is until `clear`. For one pass a step.
    std::function<void(int64_t unit, at::Tensor slice)> update = {};
    /// By unit: of parameters and their gradients.
    std::vector<at::ScalarType> dtypes = {};
  };

  /// `trainable` has an entry a unit.
  GradientStore(const partition::Layout& layout, std::vector<at::Tensor> parameters,
                std::vector<bool> trainable, comm::Group& group, Options options);
  ~GradientStore() override;
  GradientStore(const GradientStore&) = delete;
  GradientStore& operator=(const GradientStore&) = delete;

  void arrive(int64_t parameter, const at::Tensor& variable) override;
  at::Tensor place(int64_t parameter) override;

  /// Gradients have come since the last step, but in no pass of this engine's: they were dropped.
  bool only_foreign() const { return foreign_ && !passed_; }

  /// `holds`: no unit is reduced but by `release` and at the end; those of the parameters `shared`
  /// at the end.
  void begin_backward(bool holds = false, const std::vector<int64_t>& shared = {});
  /// Reduces the units whose gradients have all arrived: no more will come for them in this pass.
  void release();
  /// Reduces what the pass left over (sharded gradients).
  void end_backward();
  /// The pass failed: what it reduces is of no use.
  void abandon_backward();

  /// Completes every reduction, so that `reduced` and `present` are final for this step; further
  /// calls do nothing until a new gradient arrives. Collective.
  void finish();

  /// The sum over ranks and passes of the owned elements of `unit` (all of them at stage 0, the
  /// slice from stage 1 on). A copy where they lie on disk.
  at::Tensor reduced(int64_t unit) const;
  bool on_disk() const { return options_.disk != nullptr; }
  /// A sum of this step was handed to an update in backward.
  bool used() const { return options_.update && any_filled(); }
  /// The unit was updated from its sum, which is gone.
  bool updated(int64_t unit) const { return state(unit).updated; }
  bool on_host(int64_t unit) const {
    return !options_.on_host.empty() && options_.on_host[static_cast<size_t>(unit)];
  }
  /// Gives what was reduced to an update: `detached(unit)` until the next call, while new gradients
  /// go elsewhere if they are doubled.
  void detach();
  /// As `reduced` was before `detach`; undefined where it is on disk.
  const at::Tensor& detached(int64_t unit) const;
  /// The sum of squares of `slice(unit)`.
  optim::SquaredNorm norm(int64_t unit) const;
  /// This rank's slice of it, whose norm this rank computes: the same elements at every stage.
  at::Tensor slice(int64_t unit) const;
  /// By parameter: some rank had a gradient for it in this step.
  const std::vector<uint8_t>& present() const { return present_; }
  bool trainable(int64_t unit) const { return states_[static_cast<size_t>(unit)].trainable; }
  /// The trainable units in the order of reduction.
  const std::vector<int64_t>& order() const { return order_; }

  /// Starts the next step: no gradient has arrived.
  void clear();

  /// Puts a full gradient (storage order, mean times `divisor`) in place of what was reduced;
  /// `parameter` counts as present everywhere.
  void set(int64_t parameter, const at::Tensor& values);

  /// dtype of a unit's gradient storage, and of what it sends.
  at::ScalarType storage_dtype(int64_t unit) const;
  at::ScalarType wire_dtype(int64_t unit) const;
  /// Bytes of a unit that go down to the host in a step of as many passes.
  int64_t bytes_down(int64_t unit, int64_t passes) const;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Unit {
    bool trainable = false;
    at::ScalarType dtype = at::kFloat;  // of parameters and their gradients
    at::Tensor storage;       // the formula's gradients: full (replicated) or the slice (sharded);
                              // undefined on disk, where updates run in backward, and while a
                              // slice on the device is not `filled`
    optim::SquaredNorm norm;  // of a sum that is not kept in memory
    at::Tensor below;         // on the host, replicated: what of it this rank updates
    at::Tensor other;         // doubled: what the update reads, of the step before or the one after
    at::Tensor detached;
    bool filled = false;   // storage has a value of this step
    bool updated = false;  // in backward
    bool last = false;     // in this pass: waits for the end
    at::Tensor bucket;     // sharded: gradients of this pass; undefined until one arrives
    bool pooled = false;   // the bucket is of the pool, not a gradient itself
    bool queued = false;   // sharded: its turn in this pass is over
    int64_t arrived = 0;   // parameters whose gradient came in this pass
  };
  struct Reduction {
    int64_t unit = 0;
    at::Tensor bucket;
    bool pooled = true;
    bool in_place = false;  // the sum takes the slice's place in the bucket
    at::Tensor sum;         // the slice, where it is not kept on the device
    at::Tensor addend;      // defined where the result is added to the storage
    comm::Work work;
  };

  // Slices come with their sums and go with the step: see Note [Slices in activations' memory].
  bool passing() const { return options_.placement.gradients && !streams() && !options_.doubled; }

  const at::Tensor& array_of(int64_t unit);
  void evacuate(int64_t parameter, const at::Tensor& gradient);
  bool stands_alone(int64_t unit, const at::Tensor& gradient, const at::Tensor& variable) const;
  int64_t bucket_bytes(int64_t unit) const;
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  void give(at::Tensor array);
  void zero_missing(int64_t unit, const at::Tensor& array, const std::vector<uint8_t>& here);
  bool any_filled() const;
  void abandon_reductions();
  void advance();
  void reduce(int64_t unit);
  void retire_one();
  at::Tensor& ensure_storage(int64_t unit);
  at::Tensor take_sum(int64_t unit);
  Category category_of_sums() const;
  at::Tensor& read_by_update(Unit& unit) const {
    return unit.below.defined() ? unit.below : unit.storage;
  }
  bool is_sum(int64_t unit) const;
  at::ScalarType sum_dtype(int64_t unit, bool first) const;
  void send_down(int64_t unit);
  void receive(Reduction& reduction);
  int64_t array_on_disk(int64_t unit) const;
  bool streams() const { return on_disk() || options_.update; }
  void stream(int64_t unit, at::Tensor sum);
  void retire_sum();
  void agree();
  Unit& state(int64_t unit) { return states_[static_cast<size_t>(unit)]; }
  const Unit& state(int64_t unit) const { return states_[static_cast<size_t>(unit)]; }

  const partition::Layout& layout_;
  std::vector<at::Tensor> parameters_;
  comm::Group& group_;
  Options options_;
  std::vector<Unit> states_;
  std::vector<std::string> labels_;
  std::vector<int64_t> order_;
  std::vector<int64_t> ready_;  // units in the order in which they became ready in the first pass
  bool order_known_ = false;
  size_t next_ = 0;                 // into order_: the unit whose turn it is
  std::vector<uint8_t> in_bucket_;  // by parameter: its gradient is in the unit's array
                                    // (replicated) or bucket (sharded)
  std::vector<uint8_t> promised_;   // by parameter: a backward function has its place in there
  std::vector<WeakTensor> places_;  // by parameter: the tensor that it has, while promised
  std::vector<uint8_t> local_;      // by parameter: this rank had a gradient in this step
  std::vector<uint8_t> present_;    // by parameter: some rank had
  bool holds_ = false;
  bool in_pass_ = false;  // of Engine::backward, not of the user's torch::autograd::grad
  bool passed_ = false;   // there was one in this step
  bool foreign_ = false;  // a gradient came outside
  bool finished_ = false;
  std::deque<Reduction> in_flight_;
  struct Sum {
    at::Tensor memory;
    store::Transfer write;
  };
  std::deque<Sum> sums_;                     // that are on their way to disk
  at::Tensor arriving_;                      // on the host: a block of what is added there
  int64_t bucket_bytes_ = 0;                 // of the largest ordinary unit
  int64_t slice_bytes_ = 0;                  // of its slice, in the widest dtype that it comes in
  std::multimap<int64_t, at::Tensor> free_;  // the pool of arrays, by bytes
  std::mutex mutex_;                         // autograd may run hooks on threads of its own
};

}  // namespace zero
