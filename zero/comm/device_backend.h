// The backend that carries a device's tensors between ranks. The plugin for the device contains it.
#pragma once

#include <chrono>

#include "zero/comm/group.h"

namespace zero::comm {

/// Returns the function that `on_device` makes backends with. Loads the plugin (device/plugin.h),
/// and throws ConfigError as that does.
MakeBackend backend_of_plugin(c10::DeviceType type, std::chrono::milliseconds timeout);

/// A plugin exports a function of this type as kDeviceBackend. It makes the backend of `ranks`.
/// Collective.
using MakeDeviceBackend = void(c10::intrusive_ptr<c10d::Backend>* made, Group* ranks,
                               int64_t timeout_ms);
inline constexpr const char* kDeviceBackend = "zero_device_backend";

}  // namespace zero::comm
