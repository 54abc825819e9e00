#include "zero/train/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <utility>

#include "zero/base/error.h"
#include "zero/comm/agreement.h"
#include "zero/comm/through_host.h"
#include "zero/device/plugin.h"

namespace zero::train {

std::shared_ptr<comm::Group> on_training_device(std::shared_ptr<comm::Group> host,
                                                TrainingDevice device, bool through_host,
                                                const std::function<void(std::string_view)>& tell) {
  if (device == TrainingDevice::cpu) return host;
  constexpr auto kType = c10::DeviceType::CUDA;
  const auto count = [&] {
    return static_cast<int>(c10::impl::VirtualGuardImpl(kType).deviceCount());
  };
  const auto look = [&] {
    load_device_plugin(kType);
    if (host->local_size() <= count() || (through_host && count() > 0)) return;
    throw ConfigError(fmt::format(
        "There are {} ranks on this host and {} CUDA devices that they may use. Start a rank for "
        "each device (--nproc){}.",
        host->local_size(), count(),
        count() > 0 ? ", or let ranks share a device (--through-host)" : ""));
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
  const c10::Device own(kType, static_cast<c10::DeviceIndex>(host->local_rank() % count()));
  c10::impl::VirtualGuardImpl(kType).setDevice(own);
  comm::MakeBackend carrier;
  if (through_host) carrier = comm::ThroughHost{};
  return comm::on_device(std::move(host), own, std::move(carrier));
}

}  // namespace zero::train
