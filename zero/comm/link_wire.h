// How one call's array crosses between hosts in fewer bits than it has.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/comm/quantise_kernels.h"

namespace zero::comm {

/// Note [Quantised messages] in quantise_kernels.h. The same on all ranks, but for `error`.
struct LinkWire {
  Quantisation quantisation{};
  /// Of a sum: what each message loses is added to the next one (pack_with_feedback), by `beta`.
  /// 1-D, Byte, Group::feedback_bytes() of them, zeros at first; its owner keeps it from call to
  /// call of arrays of one size, and does not touch it while one is under way. Undefined: nothing
  /// is added.
  at::Tensor error{};
  float beta = 0;
};

}  // namespace zero::comm
