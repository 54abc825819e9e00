// The device that a run trains on.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "zero/comm/group.h"
#include "zero/config/settings.h"

namespace zero::train {

/// The ranks of `host`, with collectives of tensors on `device`; `host` itself for the CPU. To be
/// called before LibTorch is asked for such a device (device/plugin.h). Throws ConfigError, on all
/// ranks, where it cannot be used, or a host has more ranks than devices; with
/// TrainingDevice::any it is the CPU then, and rank 0 is told why. Collective.
std::shared_ptr<comm::Group> on_training_device(std::shared_ptr<comm::Group> host,
                                                TrainingDevice device,
                                                const std::function<void(std::string_view)>& tell);

}  // namespace zero::train
