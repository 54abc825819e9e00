// How one call's array crosses between hosts in fewer bits than it has.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/comm/packed_exponents.h"
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
  /// Instead, with all its bits: Note [Packed exponents] in packed_exponents.h. Nothing above
  /// counts.
  bool packed = false;
};

/// The bytes of the message of `numel` elements of `dtype`.
inline int64_t link_bytes(const LinkWire& wire, at::ScalarType dtype, int64_t numel) {
  return wire.packed ? packed_bytes(dtype, numel) : wire_bytes(wire.quantisation, numel);
}

}  // namespace zero::comm
