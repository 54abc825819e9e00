// The group and the checks of an engine whose model is on a device.
#pragma once

#include <memory>

#include "zero/comm/group.h"
#include "zero/config/config.h"
#include "zero/engine/model.h"
#include "zero/engine/update_timing.h"

namespace zero {

/// Returns the group whose collectives carry the tensors of `model`: `ranks`, or the same single
/// rank with memory on the model's device. A model on the CPU goes to the device of `ranks`
/// (Model::goes_to). Throws ConfigError if `ranks` are several and carry the tensors of another
/// device.
std::shared_ptr<comm::Group> group_on_device(std::shared_ptr<comm::Group> ranks, Model& model);

/// Loads the plugin for the model's device, if its kernels are missing. Throws ConfigError if that
/// fails, or naming the first key that asks for something that only the CPU does, or that the
/// transport of `shards`, which carries the model's tensors, does not do between hosts.
void check_on_device(const Config& config, const UpdateTiming& timing, const Model& model,
                     const comm::Group& shards);

}  // namespace zero
