// Carries a device's tensors through the memory of the host: for devices whose plugin or LibTorch
// has no backend, and for ranks that share a device, which NCCL refuses.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "zero/comm/group.h"

namespace zero::comm {

/// The third argument of `on_device` that lets the host's group carry the tensors. In each
/// collective a rank copies its tensor to the host, the ranks exchange and add there as those of
/// the CPU do, with the same bits, and Work::wait copies the result to the device. So the host
/// waits for the device and for the other ranks, and the bytes pass the bus twice. Between
/// hosts arrays are quantised or packed (LinkWire) as those of the CPU.
struct ThroughHost {
  /// Throws CommError. `on_device` makes the backend, since it knows what carries the host's group.
  c10::intrusive_ptr<c10d::Backend> operator()(Group& ranks) const;
};

/// Returns the backend that carries a device's tensors over `host`, which carries those of the CPU.
c10::intrusive_ptr<c10d::Backend> through_host(c10::intrusive_ptr<c10d::Backend> host);

}  // namespace zero::comm
