// The formulas of ZeRO (1910.02054) for the memory of the model states: over Psi, as the paper
// states them, and over a Layout. The latter counts the declared padding too, and the ledger shows
// it byte for byte. The costs of a whole step are in engine/costs.h.
#pragma once

#include <cstdint>

#include "zero/partition/layout.h"

namespace zero::partition {

/// Says which model states are sharded over the ranks. A stage is one of these tables and nothing
/// else.
struct Sharding {
  bool parameters = false;  ///< sharded from stage 3
  bool gradients = false;   ///< sharded from stage 2
  bool optimizer = false;   ///< sharded from stage 1
};

/// Returns the sharding of ZeRO stage 0, 1, 2 or 3. Throws ConfigError for another.
Sharding sharding_of_stage(int stage);

/// Returns the elements of `unit` that `rank` updates: all of them if optimizer states are
/// replicated, and its slice if they are sharded.
Range owned_range(const Layout& layout, int64_t unit, Sharding sharding, int rank);

/// Bytes of each state per parameter. They are 2, 2 and 12 (fp32 master, m, v) in mixed precision
/// with Adam, and 4, 4 and 8 in fp32, where the parameter is its own master.
struct StateBytes {
  int64_t parameter = 2;
  int64_t gradient = 2;
  int64_t optimizer = 12;
  /// Bytes besides `optimizer` for each kAlignment elements of the optimizer's states: the scales
  /// of 8-bit states.
  int64_t scales = 0;
};

/// Bytes of the model states on one rank.
struct StateMemory {
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  double total() const { return parameters + gradients + optimizer; }
};

/// Returns the memory of section 5, Figure 1 and Table 1. Stage 0: (2+2+K) Psi; stage 1: (2+2) Psi
/// + K Psi/N; stage 2: 2 Psi + (2+K) Psi/N; stage 3: (2+2+K) Psi/N.
StateMemory state_memory(Sharding sharding, double parameters, double world_size,
                         StateBytes bytes = {});

/// Table 2: returns the largest model, in parameters, whose states fit into `device_bytes` on each
/// of `world_size` data-parallel ranks, times `model_parallel` (section 10.1 multiplies).
double largest_model(Sharding sharding, double device_bytes, double world_size,
                     double model_parallel = 1);

/// Bytes of one unit, or of several units together, in a layout: whole bytes, with padding.
struct LayoutMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t padding = 0;  ///< bytes among the above that are padding
  int64_t total() const { return parameters + gradients + optimizer; }
};

/// Returns the bytes of one unit's states. `bytes` has the bytes of an element, and zero for states
/// that the unit does not have.
LayoutMemory unit_memory(const Layout& layout, int64_t unit, Sharding sharding, StateBytes bytes);

/// Returns the bytes that one rank sends when a full buffer of `bytes` is gathered or
/// reduce-scattered over N ranks: (N-1)/N of it.
int64_t share_sent(int64_t bytes, int64_t world_size);

}  // namespace zero::partition
