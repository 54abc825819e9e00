// Stages 0 and 1: every rank has the gradients of all units, whole.
//
// Note [Replicated gradients]
// The gradients of a unit are collected in one array, the gradient storage of the formula, in which
// the micro-batches of a step add up. Once a step the array is summed over the ranks: by an
// all-reduce at stage 0, where each rank updates all elements, and by a reduce-scatter at stage 1,
// where each rank updates its slice. This happens when the step ends, or as soon as the step's last
// pass has completed the unit (Note [Early reductions]).
//
// Where gradients are reduced in another dtype than they are added up in (Note [Dtypes of
// gradients] in form.h), the array is copied to a bucket of that dtype. If that has fewer bits, the
// sum is rounded to it at stage 1 too, since an all-reduce gives no other.
//
// A pass may throw after it has begun reductions that the other ranks have not begun. Nobody waits
// for them then, since the others may wait for this rank. The gradients of such a step are to be
// dropped on all ranks (Engine::zero_grad): the ranks tell each other whether one has begun
// reductions, all take part in the same ones, and then all wait for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/engine/early_reductions.h"
#include "zero/engine/gradient_reduction.h"
#include "zero/engine/reductions.h"
#include "zero/engine/whole_gradients.h"

namespace zero {

class ReplicatedGradients final : public GradientReduction {
 public:
  explicit ReplicatedGradients(const ReductionContext& context);

  void begin_pass(const Pass& pass) override;
  const at::Tensor& array(int64_t unit) override;
  void arrived(int64_t parameter, bool first) override;
  void end_pass() override;
  void drop_pass() override;

  GradientPresence::Report report() const override;
  void complete(const GradientPresence::Agreement& agreed) override;
  bool sums_once_a_step() const override { return true; }

  bool drops_together() const override { return early_.on(); }
  bool has_begun() const override { return early_.begun() || has_dropped(); }
  void join_begun() override;
  void clear(bool finished) override;

  at::Tensor sum(int64_t unit) const override { return state(unit).gradient->owned(); }
  at::Tensor open_sum(int64_t unit) override;
  void store_sum(int64_t unit, const at::Tensor& sum) override;
  void detach() override;
  const at::Tensor& detached(int64_t unit) const override { return state(unit).detached; }

  at::Tensor norm_part_on_device(int64_t unit) const override;
  optim::SquaredNorm norm(int64_t unit) const override;

 private:
  /// What has become of a unit's array in this step.
  enum class Sum : uint8_t {
    open,     ///< gradients are added to it
    started,  ///< its sum over ranks has been started, or is there
    dropped   ///< the same, by a pass that has thrown: no other rank may have started it
  };
  struct Unit {
    std::unique_ptr<WholeGradient> gradient;  // null where the unit is frozen
    Sum sum = Sum::open;
    bool filled = false;    // there are values of this step
    Bucket late{};          // gradients that came after the sum was started
    at::Tensor detached{};  // what the update reads
  };

  void reserve_buckets();
  bool scattered() const { return context_.placement.sharded.optimizer; }
  bool reduces_early() const;
  bool has_dropped() const;
  void reduce_ready();
  void reduce_expected();
  void start(int64_t unit);
  void add_late(int64_t unit);
  at::Tensor slice(int64_t unit) const;
  Unit& state(int64_t unit) { return units_[static_cast<size_t>(unit)]; }
  const Unit& state(int64_t unit) const { return units_[static_cast<size_t>(unit)]; }

  std::vector<Unit> units_;
  EarlyReductions early_{false};
  std::vector<uint8_t> came_;  // by parameter: its gradient has come in the step's last pass
  Reductions under_way_;
};

}  // namespace zero
