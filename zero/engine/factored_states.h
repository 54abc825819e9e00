// The rows and columns of factored second moments (Adafactor): whole on every rank.
//
// Note [Factored states]
// Rows and columns take some thousandth of a matrix's memory, and every slice of the matrix needs
// all of its columns. So each rank has all of them and computes the same new ones
// (factor_exchange.h). They lie on the device if the unit's states do, and else in the host's
// memory: a file on disk would be read and written for a few bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "zero/engine/engine_plan.h"
#include "zero/optim/factors.h"

namespace zero {

class FactoredStates {
 public:
  /// The names that checkpoints and PyTorch give them.
  static constexpr std::array<std::string_view, 2> kNames{"row_var", "col_var"};

  /// Makes them, filled with zeros. The ledger charges them to the optimizer's categories.
  explicit FactoredStates(const EnginePlan& plan);

  bool has(int64_t parameter) const { return entries_[static_cast<size_t>(parameter)].has_value(); }
  /// The parameter must have factored states.
  const optim::Factors& factors(int64_t parameter) const { return entry(parameter).factors; }
  const at::Tensor& rows(int64_t parameter) const { return entry(parameter).values[0]; }
  const at::Tensor& columns(int64_t parameter) const { return entry(parameter).values[1]; }
  /// Returns a state by name, in the shape that PyTorch gives it; an undefined tensor if there is
  /// none.
  at::Tensor find(int64_t parameter, std::string_view state) const;
  /// Sets all to 0.
  void clear();

 private:
  struct Entry {
    optim::Factors factors;
    std::array<at::Tensor, 2> values;  // 1-D: of rows, of columns
  };
  const Entry& entry(int64_t parameter) const { return *entries_[static_cast<size_t>(parameter)]; }
  std::vector<std::optional<Entry>> entries_;  // by parameter
  std::array<at::Tensor, 2> memory_;           // on the device, on the host
};

}  // namespace zero
