// The exchange between the two sweeps of parameters whose second moments are factored: the ranks
// tell each other about the rows and columns of their slices. Note [Sums by rows and columns] in
// zero/optim/factors.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "zero/engine/factored_states.h"
#include "zero/engine/state_table.h"
#include "zero/engine/sweep_batches.h"
#include "zero/optim/sweeps.h"
#include "zero/partition/layout.h"

namespace zero {

class FactorExchange {
 public:
  /// Both arguments outlive this.
  FactorExchange(const StateTable& table, FactoredStates& states)
      : group_(table.group()), layout_(table.layout()), table_(table), states_(states) {}

  /// Adds a batch; the first one has number 0. A batch of another reach than Reach::factors is
  /// empty here.
  void add_batch(const SweepBatch& planned);

  /// Computes the new rows and columns of a batch after its first sweeps. `directions` has, by
  /// unit, the gradients of the owned elements, and directions take their place; their squares are
  /// added to `norms`. `steps` has, by parameter, the number of the update, or 0 for a parameter
  /// that has none; `norms` is by parameter too. `in_force` gives a parameter's optimizer.
  /// Collective if the batch is sliced.
  void exchange(size_t batch, const std::vector<int64_t>& steps,
                const std::function<Optimizer(int64_t parameter)>& in_force,
                const std::vector<at::Tensor>& directions,
                std::vector<optim::ParameterNorms>& norms);

 private:
  struct Matrix {
    int64_t parameter = 0;
    int64_t offset = 0;  ///< its rows in arrays of the batch; its columns follow
  };
  struct Batch {
    std::vector<Matrix> matrices{};
    int64_t count = 0;    ///< rows and columns
    int64_t message = 0;  ///< how many of them a rank sends; 0: the ranks exchange nothing
  };
  // Return the elements of a parameter that are in a part of its unit, and in the slice of a rank.
  optim::Interval part_of(const Matrix& matrix, partition::Range of_unit) const;
  optim::Interval of_rank(const Matrix& matrix, int rank) const;
  optim::Interval owned(const Matrix& matrix) const;
  template <class Put>
  void for_each_part(const Batch& batch, int rank, const Put& put) const;
  template <class T, class Merge>
  at::Tensor gathered(const Batch& batch, const at::Tensor& own, std::string_view label,
                      const Merge& merge) const;

  comm::Group& group_;
  const partition::Layout& layout_;
  const StateTable& table_;
  FactoredStates& states_;
  std::vector<Batch> batches_;
};

}  // namespace zero
