// Stages 2 and 3: every rank keeps its slice of the sum of each unit's gradients.
//
// Note [Sharded gradients]
// The gradients of a unit are collected in a bucket, which lives until the unit is complete and its
// sum over the ranks is made by a reduce-scatter. This happens in every backward pass. The slice of
// the sum that this rank gets is the gradient storage of the formula. Micro-batches add up in it,
// wherever it lies: on the device, on the host or on disk (gradient_sums.h).
//
// Units are reduced in their order (Note [Order of reductions]). When the pass ends, a unit that
// this rank has not touched is reduced with zeros. A pass may leave a unit out (a block that is
// skipped at random), and the complete units behind it would keep their buckets; so when kWaiting
// of them wait, it is reduced with what has come (`may_leave` says where not). A gradient that
// comes for a unit that this pass has reduced (recomputation, several uses) waits in a new bucket
// for the next pass, or for the end of the step.
//
// Engine::accumulate passes all micro-batches through one layer before the next one. Their
// gradients add up in the bucket, in the dtype of the storage, and the unit is reduced once a step:
// `release` says that the layers so far are complete. A weight that several layers share waits
// until all of them are.
//
// Where updates run in backward a slice is handed over when it is reduced, and does not stay. Only
// a complete unit is handed over: one some of whose parameters had no gradient on this rank stays
// until all ranks have told which gradients they had.
//
// With replicas (Note [Hybrid sharding]) a reduction has three phases; each one that starts moves
// those before it on by one phase. Where several passes add up on the device, they do so in the
// block, and the sums over replicas are made once, when the step ends.
//
// A bucket of one pass has the dtype in which gradients are reduced from the start, if they are not
// to be divided before (Note [Dtypes of gradients] in form.h).
//
// On a device a unit is reduced on a stream of its own, behind what the hook has enqueued and
// beside the rest of backward. Sums are taken on that stream too, and it waits for those who use
// them when the step is over (`clear`).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "zero/engine/gradient_reduction.h"
#include "zero/engine/gradient_sums.h"
#include "zero/engine/reductions.h"

namespace zero {

class ShardedGradients final : public GradientReduction, private HandOver {
 public:
  explicit ShardedGradients(const ReductionContext& context);

  void begin_pass(const Pass& pass) override;
  const at::Tensor& array(int64_t unit) override;
  bool adopt(int64_t unit, const at::Tensor& gradient, const at::Tensor& variable) override;
  void arrived(int64_t parameter, bool first) override;
  void release() override { reduce_ready(); }
  void end_pass() override;
  void drop_pass() override { under_way_.drop(); }

  GradientPresence::Report report() const override;
  void reduce_left(const GradientPresence::Agreement& agreed) override;
  void complete(const GradientPresence::Agreement& agreed) override;
  bool sums_once_a_step() const override;
  void clear(bool finished) override;

  at::Tensor sum(int64_t unit) const override { return sums_.of(unit).slice(unit); }
  at::Tensor open_sum(int64_t unit) override;
  void store_sum(int64_t unit, const at::Tensor& sum) override { sums_.of(unit).store(unit, sum); }
  void detach() override;
  const at::Tensor& detached(int64_t unit) const override { return state(unit).detached; }

  at::Tensor norm_part_on_device(int64_t unit) const override {
    return sums_.of(unit).norm_part_on_device(unit);
  }
  optim::SquaredNorm norm(int64_t unit) const override { return sums_.of(unit).norm(unit); }

  void hand_over_to(SumUser& user) override { user_ = &user; }
  bool handed_over() const override;
  bool handed_over(int64_t unit) const override { return state(unit).sum == Sum::handed_over; }
  void forget_losses() override;

 private:
  enum class Turn : uint8_t {
    awaited,     ///< the unit is reduced when it is complete and its turn comes
    at_the_end,  ///< it is reduced when the pass ends: several layers share a parameter of it
    over         ///< this pass has reduced it
  };
  enum class Sum : uint8_t { none, started, handed_over };  // of this step
  struct Unit {
    Bucket bucket{};  // the gradients of this pass, or late ones of the pass before
    Turn turn = Turn::awaited;
    Sum sum = Sum::none;
    at::Tensor losses{};    // of quantised sums, with feedback (comm::LinkWire::error)
    at::Tensor detached{};  // what the update reads
  };

  void make_losses();
  bool stands_alone(int64_t unit, const at::Tensor& gradient, const at::Tensor& variable) const;
  bool may_leave(int64_t unit) const;
  void reduce_ready();
  void reduce(int64_t unit);
  std::optional<comm::LinkWire> wire(int64_t unit) const;
  void sum_over_replicas();
  bool wants(int64_t unit) const override { return context_.presence.complete_here(unit); }
  void give(int64_t unit, at::Tensor sum) override;
  Unit& state(int64_t unit) { return units_[static_cast<size_t>(unit)]; }
  const Unit& state(int64_t unit) const { return units_[static_cast<size_t>(unit)]; }

  PlacedSums sums_;
  std::vector<Unit> units_;
  bool holds_ = false;   // the pass under way reduces units by `release` alone
  int64_t waiting_ = 0;  // complete units whose turn has not come in this pass
  SumUser* user_ = nullptr;
  Reductions under_way_;
};

}  // namespace zero
