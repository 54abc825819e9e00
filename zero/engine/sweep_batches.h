// The batches of updates in two sweeps, and the exchanges between ranks after the first sweeps of a
// batch (Note [Exchange between sweeps] in two_sweeps.h): numbers alone, decided in the plan.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "zero/engine/model_shape.h"
#include "zero/engine/unit_plan.h"
#include "zero/optim/sweeps.h"
#include "zero/partition/layout.h"

namespace zero {

/// Units whose first sweeps come before one exchange. All of them have the same reach.
struct SweepBatch {
  /// A matrix that one rank makes orthogonal, or projects.
  struct Matrix {
    int64_t parameter = 0;
    int64_t rows = 0;  ///< in the storage's order
    int64_t columns = 0;
    std::optional<optim::Projection> projection{};
    int owner = 0;       ///< the rank; of no meaning without slices
    int64_t offset = 0;  ///< in the owner's message, in elements
    /// Returns the elements that its owner finds out for the other ranks: a projected matrix has a
    /// factor for each channel.
    int64_t found() const { return projection ? projection->channels : rows * columns; }
  };

  optim::Reach reach = optim::Reach::parameter;
  std::vector<int64_t> units{};
  /// Parameters that lie in several slices: their norms are added over ranks.
  std::vector<int64_t> shared{};
  /// Reach::matrix: the matrices, the most expensive first, and the elements that an owner sends.
  std::vector<Matrix> matrices{};
  int64_t sent_by_owner = 0;
  /// Reach::factors: rows and columns that a rank sends, in whole words; 0: nothing is exchanged.
  int64_t factor_message = 0;
  /// Bytes of the arrays that are gathered over the ranks that shard, each once.
  std::vector<int64_t> gathered_bytes{};
};

/// Returns the batches of a step, in the order of their first sweeps, for `ranks` ranks that shard.
/// `sliced`: optimizer states lie in slices on those ranks, so that an exchange is needed.
std::vector<SweepBatch> batch_sweeps(const partition::Layout& layout,
                                     const std::vector<UnitPlan>& units, const ModelShape& model,
                                     int64_t ranks, bool sliced);

/// Returns, by parameter, the only rank that has its factored states, or -1 if every rank has them:
/// Note [Factored states] in factored_states.h.
std::vector<int> factored_owners(const std::vector<SweepBatch>& batches, size_t parameters,
                                 bool sliced);

}  // namespace zero
