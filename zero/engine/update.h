// The third flow: the blocks of a row of the table through the optimizer's kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "zero/engine/state_table.h"
#include "zero/optim/optimizer.h"
#include "zero/partition/layout.h"

namespace zero {

/// Parameters with one optimizer, and the learning rate in force.
struct OptimizerGroup {
  Optimizer optimizer;
  double lr = 0;
};

class UpdateFlow {
 public:
  /// `group_of` has an entry a parameter. `table` outlives this.
  UpdateFlow(const partition::Layout& layout, StateTable& table, std::vector<OptimizerGroup> groups,
             std::vector<size_t> group_of);

  /// The next updates use the learning rates of now.
  void begin();
  /// Updates the owned elements of `unit` from `gradient` (the same elements, summed over ranks and
  /// micro-batches; undefined where they are on disk) for every parameter with
  /// `present[parameter]`: absent ones keep weights and moments, as in LibTorch. Counts their
  /// steps.
  void update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
              const std::vector<uint8_t>& present);

  std::vector<OptimizerGroup>& groups() { return groups_; }
  const std::vector<OptimizerGroup>& groups() const { return groups_; }
  /// Updates that each parameter has had.
  std::vector<int64_t>& steps() { return steps_; }

 private:
  // Neighbours with the same hyper-parameters and step, the padding between them included: it is
  // zero and stays so.
  struct Run {
    partition::Range owned;  // counted from the first owned element
    size_t group = 0;
    int64_t step = 0;
  };
  using Runs = c10::SmallVector<Run, 8>;
  Runs runs(int64_t unit, const std::vector<uint8_t>& present) const;
  void apply(int64_t unit, const Runs& runs, const StateTable::Block& block,
             at::ScalarType gradient_dtype, double gradient_scale) const;

  const partition::Layout& layout_;
  StateTable& table_;
  std::vector<OptimizerGroup> groups_;
  std::vector<size_t> group_of_;
  std::vector<double> rates_;  // by group, of the updates under way
  std::vector<int64_t> steps_;
};

}  // namespace zero
