// Copies between a device, another one and the host.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero::simulated {

/// As a GPU copies: between host and device asynchronously if so asked and the host's memory is
/// pinned, from pageable memory by way of a copy that is made at once, else the host waits. Between
/// two devices on the source's current stream, which waits for the destination's and is waited for
/// by it.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination);

}  // namespace zero::simulated
