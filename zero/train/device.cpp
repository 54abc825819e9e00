#include "zero/train/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/comm/agreement.h"
#include "zero/device/plugin.h"

namespace zero::train {

std::shared_ptr<comm::Group> on_training_device(std::shared_ptr<comm::Group> host,
                                                TrainingDevice device,
                                                const std::function<void(std::string_view)>& tell) {
  if (device == TrainingDevice::cpu) return host;
  constexpr auto kType = c10::DeviceType::CUDA;
  const auto look = [&] {
    load_device_plugin(kType);
    const c10::impl::VirtualGuardImpl guard(kType);
    if (host->local_size() <= guard.deviceCount()) return;
    throw ConfigError(fmt::format(
        "There are {} ranks on this host and {} CUDA devices that they may use. Start a rank for "
        "each device (--nproc).",
        host->local_size(), guard.deviceCount()));
  };
  try {
    comm::agree_on_rank_zero<ConfigError>(*host, "Taking a device", look);  // so that an error is
                                                                            // told once
    comm::agree<ConfigError>(*host, "Taking a device", look);
  } catch (const ConfigError& error) {
    if (device == TrainingDevice::cuda) throw;
    if (host->rank() == 0)
      tell(fmt::format("training on the CPU, since no CUDA device can be used: {}", error.what()));
    return host;
  }
  const c10::Device own(kType, static_cast<c10::DeviceIndex>(host->local_rank()));
  c10::impl::VirtualGuardImpl(kType).setDevice(own);
  return comm::on_device(std::move(host), own);
}

}  // namespace zero::train
