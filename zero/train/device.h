// The device that a run trains on.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "zero/comm/group.h"
#include "zero/config/settings.h"

namespace zero::train {

/// Returns the ranks of `host` with collectives of tensors on `device`; `host` itself for the CPU.
/// Call it before LibTorch is asked for such a device (device/plugin.h). If the device cannot be
/// used, or a host has more ranks than devices, throws ConfigError on all ranks. With
/// TrainingDevice::any it then takes the CPU and tells rank 0 the reason. With `through_host` the
/// host carries the tensors (comm::ThroughHost), and the ranks of a host may share devices.
/// Collective.
std::shared_ptr<comm::Group> on_training_device(std::shared_ptr<comm::Group> host,
                                                TrainingDevice device, bool through_host,
                                                const std::function<void(std::string_view)>& tell);

}  // namespace zero::train
