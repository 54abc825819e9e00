// The bytes of a step by formula.
#pragma once

#include <cstdint>

namespace zero {

/// The bytes that one rank sends in one step by formula, with padding, in the dtype that is sent:
/// the sums of all units' messages. At stage 3 `all_gather` is that of the
/// paper (1910.02054, section 7), with each unit once for forward and once for backward. A live
/// budget that holds units between the two sends less.
struct TrafficFormula {
  int64_t all_gather = 0;
  int64_t reduce_scatter = 0;
  int64_t all_reduce = 0;
  /// The part of the above that this rank sends to other hosts: sums of bf16 leave a
  /// host in fp32.
  int64_t all_gather_link = 0;
  int64_t reduce_scatter_link = 0;
  int64_t all_reduce_link = 0;
  /// The bytes from and to this rank's disk. Each state on it is read once and written once.
  /// Parameters are read for every gather (as in `all_gather`). Gradients are written for every
  /// micro-batch, and read again to add the next one.
  int64_t disk_read = 0;
  int64_t disk_written = 0;
  /// The bytes between this rank's device and its host. Gradients come down once a step where they
  /// add up on the device (stages 0 and 1), else for every micro-batch. Parameters go up once a
  /// step if the optimizer is on the host, and for every gather (as in `all_gather`) if they are.
  int64_t host_down = 0;
  int64_t host_up = 0;
};

}  // namespace zero
