// Where the sums of sharded gradients go: one class a place. The flow that reduces (reduce.h) asks
// a unit's class for the memory that a reduction writes to, and gives it what was reduced.
//
// Note [Slices in activations' memory]
// Sharded gradients are none between the update and the next reduction, which is when activations
// are most. So a slice is made when its unit is reduced, of memory that the activations behind it
// have left, and goes when the step is over (or, where updates run in backward, its update). Of a
// gradient that is a unit by itself the slice is reduced in its place, and the rest of its memory
// is given back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/bucket_pool.h"
#include "zero/engine/placement.h"
#include "zero/engine/slice_sum.h"
#include "zero/engine/state_table.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/layout.h"

namespace zero {

/// One reduce-scatter of a unit's bucket.
struct Reduction {
  int64_t unit = 0;
  at::Tensor bucket;
  bool pooled = true;  ///< the bucket is of the pool, not a gradient itself
  /// Where it is not pooled: the stream of a device that its memory goes back to.
  std::optional<c10::Stream> home{};
  bool adds = false;   ///< the sum of an earlier pass of this step is there: this one is added
  at::Tensor output;   ///< what the reduction writes to
  at::Tensor sum;      ///< memory for the unit's sum, where it is not the output and not kept
  at::Tensor partial;  ///< memory for the block's sum, where there are replicas and that needs it
  SliceSum of_ranks;
};

/// A unit's sum is handed over for its update (Note [Update in backward]).
using HandOver = std::function<void(int64_t unit, at::Tensor sum)>;

class GradientSums {
 public:
  struct Context {
    const partition::Layout& layout;
    StateTable& table;
    const Placement& placement;
    BucketPool& pool;
  };
  explicit GradientSums(const Context& context) : context_(context) {}
  virtual ~GradientSums() = default;
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;

  /// Sets the output of a reduction that is about to start, and `sum` where it takes memory.
  virtual void prepare(Reduction& reduction) = 0;
  /// The reduction is done: its output is the unit's sum, or added to it. Gives back what it took,
  /// the bucket too.
  virtual void take(Reduction reduction) = 0;
  /// The reduction is of no use: gives back what it took.
  virtual void drop(Reduction reduction) = 0;
  /// Blocks until what was taken lies in its place.
  virtual void settle() {}
  /// This rank's slice of the sum; a copy where it lies on disk.
  virtual at::Tensor slice(int64_t unit) { return memory(unit); }
  /// Memory for a sum that was not reduced, to be written by the caller: `put` follows.
  virtual at::Tensor make(int64_t unit) { return slice(unit); }
  virtual void put(int64_t /*unit*/, const at::Tensor& /*sum*/) {}
  virtual optim::SquaredNorm norm(int64_t unit);
  /// Gives the sum to an update, which reads what this returns (undefined: the disk) until the next
  /// call; new sums go elsewhere where they are doubled.
  virtual at::Tensor detach(int64_t unit) { return memory(unit); }
  /// The step is over.
  virtual void clear(int64_t /*unit*/) {}

 protected:
  at::Tensor& memory(int64_t unit) const { return context_.table.memory(unit, State::gradients); }
  at::ScalarType dtype(int64_t unit) const { return context_.table.plan(unit).gradient_dtype; }
  int64_t numel(int64_t unit) const { return context_.layout.slice_numel(unit); }
  /// Of the part of this rank's slice whose norm falls to it (Note [Hybrid sharding]).
  optim::SquaredNorm norm_of(const at::Tensor& slice) const;
  /// This rank's slice of the bucket.
  at::Tensor part_of_bucket(const Reduction& reduction) const;
  /// The sum of this pass, unrounded, is added to that of the earlier ones.
  void add(const at::Tensor& sum, Reduction& reduction);
  void give_bucket(Reduction& reduction) const;
  /// In the host's memory.
  at::Tensor host_memory(int64_t numel, at::ScalarType dtype, Category category) const;

  Context context_;
};

/// Kept on the device, where micro-batches add up.
class KeptSums : public GradientSums {
 public:
  /// `doubled`: an update may use the sums of one step while those of the next are reduced.
  KeptSums(const Context& context, bool doubled);
  void prepare(Reduction& reduction) override;
  void take(Reduction reduction) override;
  void drop(Reduction reduction) override;
  at::Tensor make(int64_t unit) override;
  at::Tensor detach(int64_t unit) override;
  void clear(int64_t unit) override;

 protected:
  /// Of a slice that is made when it is reduced.
  virtual Category category() const { return Category::gradients; }
  bool in_place(const Reduction& reduction) const;
  at::Tensor make_slice(int64_t unit) const;
  at::Tensor part_kept(Reduction& reduction) const;

 private:
  std::vector<at::Tensor> other_;  // doubled: what the update reads, of the step before or after
};

/// Handed over on the device for an update in backward; kept only where `complete` says that the
/// unit's gradients are not all there.
class HandedSums final : public KeptSums {
 public:
  HandedSums(const Context& context, std::function<bool(int64_t unit)> complete,
             HandOver hand_over);
  void prepare(Reduction& reduction) override;
  void take(Reduction reduction) override;
  void drop(Reduction reduction) override;
  optim::SquaredNorm norm(int64_t unit) override { return norms_[static_cast<size_t>(unit)]; }

 protected:
  Category category() const override { return Category::gradient_buckets; }

 private:
  std::function<bool(int64_t)> complete_;
  HandOver hand_over_;
  std::vector<optim::SquaredNorm> norms_;
};

/// In the host's memory, where micro-batches add up: slices come down while backward goes on. From
/// a device with memory of its own they are enqueued behind the reduction, in blocks where the host
/// is to add them; the host waits where its blocks are all under way, and in `settle`.
class HostSums final : public GradientSums {
 public:
  /// `hand_over` may be empty.
  HostSums(const Context& context, bool doubled, std::function<bool(int64_t unit)> complete,
           HandOver hand_over);
  void prepare(Reduction& reduction) override;
  void take(Reduction reduction) override;
  void drop(Reduction reduction) override;
  void settle() override;
  optim::SquaredNorm norm(int64_t unit) override;
  at::Tensor detach(int64_t unit) override;

 private:
  // A block on its way to the host.
  struct Arrival {
    int64_t unit = 0;
    at::Tensor to;    // its place in the sum
    at::Tensor from;  // where it comes to; undefined: to its place
    bool adds = false;
    bool last = false;  // of its unit
    StreamMark arrived;
  };
  bool alone() const { return context_.placement.ranks() == 1; }
  void bring_down(const Reduction& reduction);
  void land();
  std::function<bool(int64_t)> complete_;
  HandOver hand_over_;
  std::vector<optim::SquaredNorm> norms_;
  std::vector<at::Tensor> other_;
  std::vector<at::Tensor> blocks_;  // for what is added there; they take turns
  size_t turn_ = 0;
  size_t taken_ = 0;  // of them
  std::deque<Arrival> arrivals_;
};

/// On disk: written as they are reduced; the update reads them with the other states.
class DiskSums final : public GradientSums {
 public:
  DiskSums(const Context& context, bool doubled);
  ~DiskSums() override;
  void prepare(Reduction& reduction) override;
  void take(Reduction reduction) override;
  void drop(Reduction reduction) override;
  void settle() override;
  at::Tensor slice(int64_t unit) override;
  void put(int64_t unit, const at::Tensor& sum) override;
  optim::SquaredNorm norm(int64_t unit) override { return norms_[static_cast<size_t>(unit)]; }
  at::Tensor detach(int64_t unit) override;

 private:
  int64_t place(int64_t unit) const;
  void write(int64_t unit, at::Tensor sum);
  void retire_write();
  struct Write {
    at::Tensor memory;
    store::Transfer transfer;
  };
  bool doubled_;
  std::deque<Write> writes_;
  std::vector<optim::SquaredNorm> norms_;
};

}  // namespace zero
