#include "zero/device/plugin.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

#include <string>

#include "zero/base/error.h"
#include "zero/base/shared_library.h"

namespace zero {

void load_device_plugin(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return;
  const auto name = c10::DeviceTypeName(type);
  if (type != c10::DeviceType::CUDA) {
    throw ConfigError(fmt::format(
        "libzero has no plugin for devices of type {}: there is one for CUDA alone.", name));
  }
  const std::string file = "libzero_cuda.so";
  std::string why;
  if (load_beside(file, why) == nullptr) {
    const bool absent = why.starts_with(file + ":");
    throw ConfigError(fmt::format(
        "The plugin for CUDA devices cannot be loaded: {}. {}", why,
        absent ? "Build libzero where a CUDA toolkit is installed (ZERO_BUILD_CUDA=ON says what "
                 "else is missing), and install the plugin beside libzero.so."
               : "It needs a LibTorch with CUDA of the release that libzero was built with, whole, "
                 "with the CUDA libraries that pip installs beside it: set LIBTORCH_ROOT to one, "
                 "or start the program with the folder of its libtorch_cuda.so in "
                 "LD_LIBRARY_PATH."));
  }
  const auto* device = c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].load();
  if (device == nullptr || device->deviceCount() == 0) {
    throw ConfigError(fmt::format(
        "{} is loaded, and LibTorch finds no CUDA device: nvidia-smi shows whether the driver has "
        "one, and CUDA_VISIBLE_DEVICES which of them this process may use.",
        file));
  }
  if (!at::hasCUDA()) {
    throw ConfigError(fmt::format(
        "LibTorch was asked for CUDA before {} was loaded, and remembers that there was none: load "
        "the plugin first, or link the program to libtorch_cuda.so.",
        file));
  }
}

}  // namespace zero
