// The exchange between ranks that separates the two sweeps of an update: Note [Two sweeps] in
// zero/optim/sweeps.h.
//
// Note [Exchange between sweeps]
// LAMB needs the norms of parameters. The ranks add up those of parameters in several slices, as
// exact sums, in one all-gather a step; the others concern only the owner of their slice. Adafactor
// needs sums of rows and columns (factor_exchange.h), then norms in the same way, for batches of
// units. Muon and Apollo need whole matrices, in batches of about as many matrices as ranks. The
// ranks gather the directions of all slices. Each matrix is made orthogonal, or projected, by one
// rank, and the matrices are dealt out by cost. Then the ranks gather the results. Each takes its
// slice of an orthogonal matrix, or multiplies its slice of the gradient by the factors of
// channels. If states are replicated, every rank does all of it. The thread that trains makes these
// calls in one order on all ranks, whatever the schedule of updates: a first sweep ends before
// `step` does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "zero/engine/engine_plan.h"
#include "zero/engine/factor_exchange.h"
#include "zero/engine/factored_states.h"
#include "zero/engine/state_table.h"
#include "zero/engine/sweep_batches.h"
#include "zero/optim/sweeps.h"
#include "zero/partition/layout.h"

namespace zero {

class TwoSweeps {
 public:
  /// The arguments outlive this. `in_force` gives the optimizer of a parameter in this update, as
  /// it suits the parameter.
  TwoSweeps(const EnginePlan& plan, const StateTable& table, FactoredStates& factored,
            std::function<Optimizer(int64_t parameter)> in_force);

  optim::Reach reach(int64_t unit) const { return table_.plan(unit).reach; }
  /// Returns the units of two sweeps, in the order of their first sweeps; an `exchange` follows
  /// each batch.
  const std::vector<SweepBatch>& batches() const { return batches_; }

  /// The first sweep of a unit begins. Calls for its parameters follow, each with its update's
  /// number `step`.
  void begin(int64_t unit);
  void begin(int64_t parameter, int64_t step) { steps_[static_cast<size_t>(parameter)] = step; }
  /// Returns the places for the findings of a first sweep about owned elements from `begin` on. The
  /// sweep then gives its findings on a parameter to `add`, which several threads may call at once.
  optim::Findings findings(int64_t unit, int64_t begin) const;
  void add(int64_t parameter, const optim::Findings& found);

  /// Makes the exchange after the first sweeps of batch number `batch`. Collective over the ranks
  /// that shard.
  void exchange(size_t batch);

  /// The second sweep needs the ratio of a parameter, and directions of its owned elements from
  /// `begin` on.
  double ratio(int64_t parameter) const { return ratio_[static_cast<size_t>(parameter)]; }
  const float* direction(int64_t unit, int64_t begin) const;
  /// The second sweep of a unit has ended.
  void end(int64_t unit) { directions_[static_cast<size_t>(unit)] = at::Tensor(); }

 private:
  void exchange_norms(const std::vector<int64_t>& shared);
  void exchange_matrices(const SweepBatch& batch);
  at::Tensor matrix_of(const at::Tensor& unit, const SweepBatch::Matrix& matrix) const;
  at::Tensor found_in(const SweepBatch::Matrix& matrix, const at::Tensor& values) const;
  void make_direction(const SweepBatch::Matrix& matrix, const at::Tensor& found);

  const partition::Layout& layout_;
  const StateTable& table_;
  const FactoredStates& factored_;
  const Model& model_;
  std::function<Optimizer(int64_t parameter)> in_force_;
  comm::Group& group_;                    // the ranks that shard
  bool sliced_;                           // units lie in slices on its ranks
  std::vector<uint8_t> keeps_direction_;  // by unit
  std::vector<SweepBatch> batches_;
  FactorExchange factors_;
  std::vector<int64_t> steps_;                // by parameter; 0: it has no update
  std::vector<optim::ParameterNorms> norms_;  // by parameter; empty without need
  std::vector<double> ratio_;                 // by parameter
  std::vector<at::Tensor> directions_;        // by unit, owned elements
  std::mutex mutex_;                          // guards the norms
};

}  // namespace zero
