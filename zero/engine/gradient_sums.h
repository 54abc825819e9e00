// The places of the sums of sharded gradients: one class for each place. ShardedGradients asks a
// unit's class for the memory that a reduction writes to, and hands it the result.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zero/engine/bucket_pool.h"
#include "zero/engine/reduction.h"
#include "zero/engine/reduction_context.h"
#include "zero/optim/optimizer.h"

namespace zero {

/// Takes sums as soon as they are reduced, for updates in backward (Note [Update in backward]).
class HandOver {
 public:
  virtual ~HandOver() = default;
  /// Returns whether the sum of a unit may be used. It may not if some of its gradients have not
  /// come.
  virtual bool wants(int64_t unit) const = 0;
  virtual void hand_over(int64_t unit, at::Tensor sum) = 0;
};

class GradientSums {
 public:
  /// `takes_norms`: `take_norm` is called on each sum.
  GradientSums(const ReductionContext& context, bool takes_norms) : context_(context) {
    if (takes_norms) norms_.resize(static_cast<size_t>(context.layout.unit_count()));
  }
  virtual ~GradientSums() = default;
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;

  /// Sets the output of a reduction that is about to start, and `sum` if it takes memory.
  virtual void prepare(Reduction& reduction) = 0;
  /// Stores the reduction's result, or adds it to the unit's sum. Gives back the memory that the
  /// reduction took, the bucket too.
  virtual void store_or_add(Reduction reduction) = 0;
  /// Nobody needs the reduction's result: gives back the memory that it took.
  virtual void drop(Reduction reduction) = 0;
  /// Blocks until the received results lie in their place.
  virtual void wait() {}
  /// Returns this rank's slice of the sum; a copy if it lies on disk.
  virtual at::Tensor slice(int64_t unit) { return cell(unit); }
  /// Returns memory for a sum that was not reduced. The caller writes it and calls `store`.
  virtual at::Tensor make(int64_t unit) { return slice(unit); }
  virtual void store(int64_t /*unit*/, const at::Tensor& /*sum*/) {}
  /// See GradientReduction::norm_part_on_device and norm.
  virtual at::Tensor norm_part_on_device(int64_t /*unit*/) { return {}; }
  optim::SquaredNorm norm(int64_t unit) {
    return norms_.empty() ? norm_of(slice(unit)) : norms_[static_cast<size_t>(unit)];
  }
  /// Gives the sum to an update, which reads the returned tensor (undefined: the disk) until the
  /// next call. New sums go elsewhere if they are doubled.
  virtual at::Tensor detach(int64_t unit);
  /// The step is over.
  virtual void clear(int64_t /*unit*/) {}

 protected:
  /// Returns the memory of a unit's sum; undefined if there is none now.
  at::Tensor& cell(int64_t unit) const { return context_.table.memory(unit, State::gradients); }
  at::ScalarType dtype(int64_t unit) const { return context_.table.plan(unit).gradient_dtype; }
  int64_t numel(int64_t unit) const { return context_.layout.slice_numel(unit); }
  /// Takes memory for a reduction's result, in the dtype that the plan gives it.
  at::Tensor take_output(const Reduction& reduction) const {
    const auto& form = context_.gradient_form(reduction.unit);
    return context_.pool.take(numel(reduction.unit), form.sum_dtype(!reduction.accumulates));
  }
  /// Makes the memory of sums that exist at all times, of `make(unit, category)`. Doubled sums get
  /// a second memory, of category `second`, and `detach` exchanges the two.
  void make_cells(const std::vector<int64_t>& units, Category category, Category second,
                  const std::function<at::Tensor(int64_t unit, Category)>& make);
  /// Returns the norm of the part of a slice whose norm falls to this rank (Note [Hybrid
  /// sharding]).
  optim::SquaredNorm norm_of(const at::Tensor& slice) const;
  /// Takes the norm of a sum while it is in memory, and returns it.
  const optim::SquaredNorm& take_norm(int64_t unit, const at::Tensor& slice) {
    return norms_[static_cast<size_t>(unit)] = norm_of(slice);
  }
  /// Returns this rank's slice of the bucket.
  at::Tensor part_of_bucket(const Reduction& reduction) const;
  /// Adds `addend` to `to`.
  static void add(const at::Tensor& to, const at::Tensor& addend);
  /// Adds the reduction's output to the sum, and gives its memory back.
  void add_output(const at::Tensor& sum, Reduction& reduction) const;
  void give_bucket(Reduction& reduction) const;

  ReductionContext context_;

 private:
  std::vector<optim::SquaredNorm> norms_;  // by unit
  std::vector<at::Tensor> other_;          // by unit: the second memory of doubled sums
};

// These make the classes for `units`. `hand_over` may be null, and outlives them.

/// Sums lie on the device, where micro-batches add up.
std::unique_ptr<GradientSums> device_sums(const ReductionContext& context,
                                          const std::vector<int64_t>& units, HandOver* hand_over);
/// Sums lie in the host's memory: slices come down while backward goes on, and micro-batches add up
/// there.
std::unique_ptr<GradientSums> host_sums(const ReductionContext& context,
                                        const std::vector<int64_t>& units, HandOver* hand_over);
/// Sums lie on disk, where the update reads them with the other states. Nothing is handed over.
std::unique_ptr<GradientSums> disk_sums(const ReductionContext& context);

/// The sums of all units, each in the class of the place that its plan names.
class SumsByTier {
 public:
  SumsByTier(const ReductionContext& context, HandOver* hand_over);
  GradientSums& of(int64_t unit) const { return *by_unit_[static_cast<size_t>(unit)]; }
  /// Blocks until the received results lie in their place.
  void wait() const;

 private:
  std::vector<std::unique_ptr<GradientSums>> made_;
  std::vector<GradientSums*> by_unit_;
};

}  // namespace zero
