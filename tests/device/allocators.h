// LibTorch's views of the device's memory and of pinned host memory.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace zero::simulated {

/// Memory of the current stream of the current device, as a caching allocator gives it.
c10::DeviceAllocator& device_allocator();
/// Host memory that asynchronous copies may use.
c10::Allocator& pinned_allocator();

}  // namespace zero::simulated
