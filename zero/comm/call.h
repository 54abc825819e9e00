// One collective, as a backend of libzero's own runs it.
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "zero/comm/fixed_text.h"
#include "zero/comm/link_wire.h"
#include "zero/comm/memory_block.h"
#include "zero/comm/shm_control.h"
#include "zero/comm/traffic.h"

namespace zero::comm {

/// One collective with checked arguments. For all_reduce and broadcast `input` is `output`.
struct Call {
  Op op = Op::none;
  at::Tensor output{};
  at::Tensor input{};
  int root = 0;
  /// The bytes between the slices of a sum's input, (ranks, n), if they are parts of larger ones.
  int64_t slice_distance = 0;
  /// True if the output of an all-gather is one array that all ranks of this host share. Each rank
  /// then puts into it the slices of the ranks at its own place on all hosts.
  bool shared_output = false;
  Op within = Op::none;  ///< the collective of several hosts that this is a part of
  uint64_t digest = 0;   ///< the hash of that collective's record
  int64_t window_bytes = 0;
  int64_t window_slots = 0;
  std::vector<int64_t> window_block_bytes{};    ///< by rank
  std::unique_ptr<SharedBlock> window_block{};  ///< Op::window makes it
  std::vector<int64_t> window_offsets{};        ///< the places of the ranks' blocks
  Collective counted = Collective::control;
  FixedText<72> label{};
  std::optional<LinkWire> wire{};
  std::chrono::milliseconds timeout{};
  /// called once the call is done, before its waits end; must not throw
  std::function<void()> then{};
};

}  // namespace zero::comm
