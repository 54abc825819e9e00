// Lists what each kind of operator of a step moves and computes, and the least time that this
// takes. The list is to be laid beside the times that a profiler measures on a device.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "zero/planner/hardware.h"
#include "zero/planner/trace.h"

namespace zero::plan {

/// The operators of one name in one kind of module and one pass.
struct OperatorRow {
  std::string name;    ///< as "aten::addmm"
  std::string module;  ///< whose parameter was used last, with * for the number of a layer
  bool backward = false;
  int64_t count = 0;
  double flops = 0;
  double bytes = 0;  ///< of tensors, which the operators read or write
  /// The sum of what each operator takes at the device's speeds: Note [Efficiency] in hardware.h.
  double seconds = 0;
  /// The part of `seconds` of operators that take the memory longer than the products.
  double memory_seconds = 0;
};

/// Returns the rows of a step at stage 0 on one rank, those with the most seconds first: its
/// operators, and what the engine adds behind them, which are the norm of the gradients and AdamW's
/// update ("zero::squared_norm_" and "zero::update_", of no module). `trace` is of one micro-batch
/// in `dtype`, that of parameters.
std::vector<OperatorRow> operator_rows(const Trace& trace, const Device& device,
                                       at::ScalarType dtype);

}  // namespace zero::plan
