// The traffic of a whole step as the papers state it, for tests that compare the engine with it.
#pragma once

#include <cstdint>

#include "zero/partition/formulas.h"
#include "zero/partition/link_bytes.h"

namespace zero::paper {

using partition::Cluster;
using partition::Sharding;
using partition::Wire;

/// Elements that one rank sends per step: ZeRO (1910.02054), section 7, with k micro-batches.
struct StepTraffic {
  double reduce = 0;  ///< reduce-scatter, and the first half of stage 0's all-reduce
  double gather = 0;  ///< all-gather, and the second half of stage 0's all-reduce
  double total() const { return reduce + gather; }
};

/// Returns the traffic of a step. Stages 0 and 1: Psi + Psi, at the accumulation boundary. Stage 2:
/// k Psi + Psi. Stage 3, where every unit is gathered once for forward and once for backward: k Psi
/// + 2k Psi. All are multiplied by (N-1)/N.
inline StepTraffic step_traffic(Sharding sharding, double parameters, double world_size,
                                int64_t micro_batches = 1) {
  const double once = parameters * (world_size - 1) / world_size;
  const auto k = static_cast<double>(micro_batches);
  return {.reduce = once * (sharding.gradients ? k : 1),
          .gather = once * (sharding.parameters ? 2 * k : 1)};
}

/// How a step uses the links.
struct LinkPlan {
  Sharding sharding{};
  /// States are sharded only inside a host, and the hosts are replicas of each other: PyTorch's
  /// HSDP, MiCS (2205.00119). Nothing is gathered between hosts.
  bool hybrid = false;
  /// Parameters that a host has gathered stay there until the update: hpZ (ZeRO++, section 3.2).
  /// Backward and further micro-batches then gather inside the host.
  bool kept = false;
  /// Gradients of micro-batches add up inside the host, and across hosts once a step.
  bool deferred = false;
  int64_t micro_batches = 1;
  Wire parameters = partition::kWireBf16;
  Wire gradients = partition::kWireBf16;
};

/// Bytes that leave a host in a step.
struct LinkTraffic {
  int64_t gather = 0;  ///< parameters, and the second half of all-reduces
  int64_t reduce = 0;
  int64_t total() const { return gather + reduce; }
};

/// Returns the traffic of a step over `numel` parameters (a multiple of N), with k micro-batches.
/// In units of numel (H-1)/H it is: ZeRO-3 2k + k; with `kept` 1 + k; with `kept` and `deferred` 1
/// + 1; stage 1 1 + 1; stage 2 1 + k (`deferred`: 1 + 1); stage 0 and `hybrid`, an all-reduce of
/// the gradients, 1 + 1, with `hybrid` k times that unless `deferred`. ZeRO++, section 3: M + M + M
/// of ZeRO-3 becomes 0.5 M + 0 + 0.25 M with INT8 parameters, kept, and INT4 gradients, without the
/// scales.
inline LinkTraffic link_traffic(const Cluster& cluster, int64_t numel, const LinkPlan& plan) {
  const auto& sharded = plan.sharding;
  const bool every_micro_batch = (sharded.gradients || plan.hybrid) && !plan.deferred;
  const int64_t sums = every_micro_batch ? plan.micro_batches : 1;
  LinkTraffic traffic;
  traffic.reduce = sums * partition::reduce_scatter_link_bytes(cluster, numel, plan.gradients);
  if (plan.hybrid || !sharded.optimizer) {
    traffic.gather = sums * partition::all_gather_link_bytes(cluster, numel, plan.gradients);
  } else {
    const int64_t gathers = sharded.parameters && !plan.kept ? 2 * plan.micro_batches : 1;
    traffic.gather = gathers * partition::all_gather_link_bytes(cluster, numel, plan.parameters);
  }
  return traffic;
}

}  // namespace zero::paper
