// Loads a device's kernels from a library of their own: libzero itself needs no device's toolkit,
// and one program runs with and without a GPU.
#pragma once

#include <c10/core/DeviceType.h>

namespace zero {

/// Loads the plugin for devices of this type (libzero_cuda.so, which is built where a CUDA toolkit
/// is), and with it LibTorch's libraries for them. Its operators are there from then on, for as
/// long as the process lives. Does nothing for the CPU, and if it has been loaded. To be called
/// before LibTorch is asked for such a device (torch::cuda::is_available, torch::manual_seed),
/// since LibTorch remembers that there was none; except in a program that is linked to those
/// libraries itself, and in Python with a torch that has them. Throws ConfigError, which says what
/// is missing: the plugin, LibTorch's libraries, a driver or a device.
void load_device_plugin(c10::DeviceType type);

}  // namespace zero
