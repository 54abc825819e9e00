// What carries tensors of a device between ranks, of the plugin for such devices.
#pragma once

#include <chrono>

#include "zero/comm/group.h"

namespace zero::comm {

/// For on_device. Loads the plugin (device/plugin.h), and throws ConfigError as that does.
MakeBackend backend_of_plugin(c10::DeviceType type, std::chrono::milliseconds timeout);

/// The function that a plugin exports as kDeviceBackend: the backend of `ranks`, which it makes
/// collectively.
using MakeDeviceBackend = void(c10::intrusive_ptr<c10d::Backend>* made, Group* ranks,
                               int64_t timeout_ms);
inline constexpr const char* kDeviceBackend = "zero_device_backend";

}  // namespace zero::comm
