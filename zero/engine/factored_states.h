// The states that are not one number for each element of a parameter (optim::factored_states).
//
// Note [Factored states]
// Adafactor's rows and columns take some thousandth of a matrix's memory, and every slice of the
// matrix needs all of its columns. So each rank has all of them and computes the same new ones
// (factor_exchange.h). Apollo's moments in low rank are needed only by the rank that projects the
// matrix (two_sweeps.h). Where the optimizer's states are in slices, that rank alone has them: the
// matrices are dealt out by cost (sweep_batches.h), once and for all steps.
//
// They lie on the device if the unit's states do, and else in the host's memory: a file on disk
// would be read and written for a few bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/comm/group.h"
#include "zero/engine/engine_plan.h"
#include "zero/optim/factors.h"

namespace zero {

class FactoredStates {
 public:
  struct Named {
    std::string_view name;
    std::vector<int64_t> sizes;
    at::Tensor values;  ///< contiguous; undefined if another rank has it
  };

  /// Makes this rank's, filled with zeros. The ledger charges them to the optimizer's categories.
  explicit FactoredStates(const EnginePlan& plan);

  /// Returns the states of a parameter, here or elsewhere; none for most.
  const std::vector<Named>& of(int64_t parameter) const {
    return states_[static_cast<size_t>(parameter)];
  }
  /// Returns a state by name, or null if there is none.
  const Named* find(int64_t parameter, std::string_view state) const;
  /// Returns whether every rank that shards has the states of a parameter.
  bool everywhere(int64_t parameter) const { return owners_[static_cast<size_t>(parameter)] < 0; }
  /// Returns the values of a state on every rank, which may be those of `of` themselves. Collective
  /// over the ranks that shard.
  at::Tensor read(int64_t parameter, const Named& state) const;
  /// The parameter must have second moments by rows and columns.
  const optim::Factors& factors(int64_t parameter) const {
    return *factors_[static_cast<size_t>(parameter)];
  }
  const at::Tensor& rows(int64_t parameter) const { return of(parameter)[0].values; }
  const at::Tensor& columns(int64_t parameter) const { return of(parameter)[1].values; }
  /// Sets all to 0.
  void clear();

 private:
  comm::Group& group_;                                  // the ranks that shard
  std::vector<int> owners_;                             // by parameter: factored_owners
  std::vector<std::vector<Named>> states_;              // by parameter
  std::vector<std::optional<optim::Factors>> factors_;  // by parameter
  std::array<at::Tensor, 2> memory_;                    // on the device, on the host
};

}  // namespace zero
