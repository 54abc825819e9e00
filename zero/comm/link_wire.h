// Says how one call's array crosses between hosts in fewer bytes than it has.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/comm/packed_exponents.h"
#include "zero/comm/quantise_kernels.h"

namespace zero::comm {

/// All ranks must pass the same, except for `error`. By default values are quantised: see Note
/// [Quantised messages] in quantise_kernels.h.
struct LinkWire {
  Quantisation quantisation{};
  /// The errors of sums with feedback (quantise_with_feedback, with `beta`): each message loses a
  /// little, which is stored here and added to the next message. 1-D, Byte, on the CPU, with
  /// Group::feedback_bytes() elements, zeros at first. The owner keeps the tensor from call to call
  /// of arrays of one size, and does not touch it while a call is under way. Undefined: there is no
  /// feedback.
  at::Tensor error{};
  float beta = 0;
  /// If true, exponents are packed instead, and no bit is lost (Note [Packed exponents] in
  /// packed_exponents.h). The fields above are ignored.
  bool packed = false;
};

}  // namespace zero::comm
