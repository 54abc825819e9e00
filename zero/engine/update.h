// The third flow: it passes the blocks of a table's row through the optimizer's kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "zero/base/timeline.h"
#include "zero/engine/engine_plan.h"
#include "zero/engine/hyper_parameters.h"
#include "zero/engine/state_table.h"
#include "zero/engine/two_sweeps.h"

namespace zero {

class UpdateFlow {
 public:
  /// The arguments outlive this.
  UpdateFlow(const EnginePlan& plan, StateTable& table, FactoredStates& factored,
             const HyperParameters& hyper_parameters);

  /// The next updates use the current learning rates and hyper-parameters.
  void begin();
  /// Forgets that there were updates since `begin`: their results were taken back.
  void take_back() { steps_ = steps_before_; }
  /// Updates the owned elements of `unit` from `gradient`, for every parameter with
  /// `present[parameter]`. `gradient` has the same elements, summed over ranks and micro-batches;
  /// it is undefined if they are on disk. Absent parameters keep weights and moments, as in
  /// LibTorch. Counts the steps of present parameters. For a unit of two sweeps this is the second
  /// sweep, which needs no gradient.
  void update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
              const std::vector<uint8_t>& present);

  /// Makes the first sweep of a unit of two sweeps. It has the arguments of `update`, but does not
  /// change the weights.
  void first_sweep(int64_t unit, const at::Tensor& gradient, double gradient_scale,
                   const std::vector<uint8_t>& present);
  /// Returns the units of two sweeps, with the numbers that ranks exchange between the sweeps.
  TwoSweeps& sweeps() { return sweeps_; }
  const TwoSweeps& sweeps() const { return sweeps_; }
  Timeline& timeline() const { return *timeline_; }
  bool two_sweeps(int64_t unit) const { return sweeps_.reach(unit) != optim::Reach::element; }

  /// Returns the number of updates that each parameter has had.
  std::vector<int64_t>& steps() { return steps_; }

 private:
  // Neighbouring parameters with the same hyper-parameters and step, with the padding between them,
  // which is zero and stays so. If an update has two sweeps, a run is one parameter.
  struct Run {
    partition::Range owned;  // counted from the first owned element
    int64_t parameter = 0;   // the first
    size_t parameter_group = 0;
    int64_t step = 0;
  };
  using Runs = c10::SmallVector<Run, 8>;
  Runs runs(int64_t unit, const std::vector<uint8_t>& present) const;
  Timeline::Scope timeline_scope(int64_t unit) const;
  void count(int64_t unit, const std::vector<uint8_t>& present);
  // The optimizer of a group, as it suits the parameters of a unit.
  Optimizer optimizer_of(int64_t unit, size_t parameter_group) const;
  c10::Device updated_on(int64_t unit) const;
  at::ScalarType gradient_dtype(int64_t unit, const at::Tensor& gradient) const;
  optim::Operands operands_of(int64_t unit, const StateTable::Block& block,
                              partition::Range elements, at::ScalarType gradient_dtype) const;
  void update_narrow(int64_t unit, const Run& run, partition::Range mine,
                     const StateTable::Block& block, at::ScalarType gradient_dtype,
                     double gradient_scale) const;
  void write_fresh(int64_t unit, const Runs& runs, const StateTable::Block& block) const;

  const partition::Layout& layout_;
  StateTable& table_;
  std::shared_ptr<Timeline> timeline_;
  const HyperParameters& hyper_parameters_;
  const Model& model_;
  const std::vector<size_t>& parameter_group_of_;
  TwoSweeps sweeps_;
  float gradient_limit_ = std::numeric_limits<float>::infinity();  // the limit of mean gradients
  std::vector<OptimizerInForce> in_force_;                         // for the updates under way
  std::vector<int64_t> steps_;
  std::vector<int64_t> steps_before_;  // `steps_` at `begin`
};

}  // namespace zero
