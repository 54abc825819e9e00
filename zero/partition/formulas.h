// The formulas of ZeRO (1910.02054): memory of the model states, traffic of a step, the largest
// model that fits. Two forms of each: over Psi, as the paper states them, and over a Layout, which
// counts the declared padding too and is what the ledger shows, byte for byte.
#pragma once

#include <cstdint>

#include "zero/partition/layout.h"

namespace zero::partition {

/// Which of the three model states are sharded over the ranks. A stage is this table and nothing
/// else.
struct Placement {
  bool parameters = false;  ///< sharded from stage 3
  bool gradients = false;   ///< sharded from stage 2
  bool optimizer = false;   ///< sharded from stage 1
};

/// The placement of ZeRO stage 0, 1, 2 or 3. Throws ConfigError for another.
Placement placement_of_stage(int stage);

/// Bytes per parameter of each state. Mixed precision with Adam: 2, 2 and 12 (fp32 master, m, v);
/// fp32: 4, 4 and 8, since the parameter is its own master.
struct StateBytes {
  int64_t parameter = 2;
  int64_t gradient = 2;
  int64_t optimizer = 12;
};

/// Bytes of the model states on one rank.
struct StateMemory {
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  double total() const { return parameters + gradients + optimizer; }
};

/// Section 5, Figure 1, Table 1: stage 0 (2+2+K) Psi; 1 (2+2) Psi + K Psi/N; 2 2 Psi + (2+K) Psi/N;
/// 3 (2+2+K) Psi/N.
StateMemory state_memory(Placement placement, double parameters, double world_size,
                         StateBytes bytes = {});

/// The same over a layout, in whole bytes with padding. One unit at a time.
struct LayoutMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t padding = 0;  ///< bytes of the above that are padding
  int64_t total() const { return parameters + gradients + optimizer; }
};

/// Bytes per element of one unit's states; zero for states that the unit does not have.
LayoutMemory unit_memory(const Layout& layout, int64_t unit, Placement placement, StateBytes bytes);

/// Table 2: the largest model, in parameters, whose states fit into `device_bytes` on each of
/// `world_size` data-parallel ranks, times `model_parallel` (section 10.1 multiplies).
double largest_model(Placement placement, double device_bytes, double world_size,
                     double model_parallel = 1, StateBytes bytes = {});

/// Elements that one rank sends per step, section 7, with k micro-batches accumulated. Each is a
/// multiple of Psi (N-1)/N.
struct StepTraffic {
  double reduce = 0;  ///< reduce-scatter, and the first half of stage 0's all-reduce
  double gather = 0;  ///< all-gather, and the second half of stage 0's all-reduce
  double total() const { return reduce + gather; }
};

/// Stages 0 and 1: Psi + Psi, at the accumulation boundary. Stage 2: k Psi + Psi. Stage 3, when
/// every unit is gathered once for forward and once for backward: k Psi + 2k Psi. All times
/// (N-1)/N.
StepTraffic step_traffic(Placement placement, double parameters, double world_size,
                         int64_t micro_batches = 1);

/// Bytes that one rank sends when all of `bytes` (a full buffer) is gathered or reduce-scattered
/// over N ranks: (N-1)/N of it.
int64_t share_sent(int64_t bytes, int64_t world_size);

}  // namespace zero::partition
