#include "zero/comm/device_backend.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "zero/base/error.h"
#include "zero/device/plugin.h"

namespace zero::comm {

MakeBackend backend_of_plugin(c10::DeviceType type, std::chrono::milliseconds timeout) {
  load_device_plugin(type);
  auto* const make = reinterpret_cast<MakeDeviceBackend*>(dlsym(RTLD_DEFAULT, kDeviceBackend));
  if (make == nullptr) {
    throw ConfigError(fmt::format(
        "The plugin for devices of type {} is of another release of libzero: it has no {}. Build "
        "both from the same source.",
        c10::DeviceTypeName(type), kDeviceBackend));
  }
  return [make, timeout](Group& ranks) {
    c10::intrusive_ptr<c10d::Backend> made;
    make(&made, &ranks, timeout.count());
    return made;
  };
}

}  // namespace zero::comm
