#include "zero/engine/on_device.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/device/plugin.h"
#include "zero/device/stream.h"
#include "zero/optim/operators.h"
#include "zero/optim/sweeps.h"

namespace zero {

std::shared_ptr<comm::Group> group_on_device(std::shared_ptr<comm::Group> ranks, Model& model) {
  if (model.device().is_cpu()) model.goes_to(ranks->device());
  const auto device = model.device();
  if (ranks->device() == device) return ranks;
  if (ranks->size() == 1) return comm::on_device(std::move(ranks), device);
  throw ConfigError(fmt::format(
      "Parameter '{}' is on {}, but the group of {} ranks carries tensors of {}. Give the Engine a "
      "group of that device (comm::on_device with a backend of c10d that carries its tensors), or "
      "move the module to {}.",
      model.name(0), device.str(), ranks->size(), ranks->device().str(), ranks->device().str()));
}

void check_on_device(const Config& config, const UpdateTiming& timing, const Model& model,
                     const comm::Group& shards) {
  const auto device = model.device();
  if (!is_asynchronous(device)) return;
  // The error says why a plugin cannot be loaded, before anything of the model has changed.
  if (!optim::has_kernels(device.type())) load_device_plugin(device.type());
  const auto refuse = [&](bool asked, std::string_view key, std::string_view remedy) {
    if (!asked) return;
    throw ConfigError(fmt::format("{} is for models on the CPU so far, and this one is on {}. {}",
                                  key, device.str(), remedy));
  };
  const auto& optimizer = config.offload_optimizer;
  const bool on_host = optimizer.device != OffloadDevice::none && optimizer.ratio == 1;
  const auto needs_host = [&](bool asked, std::string_view key) {
    if (!asked || on_host) return;
    throw ConfigError(
        fmt::format("{} for a model on {} needs all of the optimizer's states on the host or on a "
                    "disk, where the host updates them. Set offload_optimizer.device to \"cpu\" or "
                    "\"nvme\", with ratio 1.",
                    key, device.str()));
  };
  needs_host(config.offload_param.device == OffloadDevice::nvme, "offload_param.device \"nvme\"");
  needs_host(timing.delayed_after.has_value(), "offload_optimizer.delayed_update_after");
  needs_host(timing.in_backward, "update_in_backward");
  refuse(config.device_memory > 0, "device_memory", "Leave it out: the device has its own.");
  const auto needs_own_links = [&](bool asked, std::string_view key) {
    if (!asked || shards.topology().hosts == 1 || shards.codes()) return;
    throw ConfigError(fmt::format(
        "{} between {} hosts: another library than libzero carries the tensors of {}, and it does "
        "not encode them. Let the host's memory carry them (train.through_host, --through-host; in "
        "C++ comm::ThroughHost), or switch the key off.",
        key, shards.topology().hosts, device.str()));
  };
  const auto& quantised = config.quantised;
  needs_own_links(quantised.weights, "zero_quantized_weights");
  needs_own_links(quantised.frozen_weights, "zero_quantized_nontrainable_weights");
  needs_own_links(quantised.gradients, "zero_quantized_gradients");
  needs_own_links(config.packed_exponents, "zero_packed_exponents");
  for (const auto& chosen : model.optimizers()) {
    // The exchange between two sweeps is in one memory.
    const bool in_parts =
        optim::reach(chosen) != optim::Reach::element && optimizer.device != OffloadDevice::none;
    needs_host(in_parts || !optim::updates_on_devices(chosen), optim::name(chosen));
  }
}

}  // namespace zero
