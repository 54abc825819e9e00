// The ranks, and the collectives that Python code needs of them.
#include "zero/comm/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "binding.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/through_host.h"
#include "zero/comm/traffic.h"
#include "zero/device/memory.h"

namespace zero::python {

namespace {

using GroupHolder = std::shared_ptr<comm::Group>;

py::dict traffic_of(comm::Group& group) {
  py::dict all;
  for (size_t i = 0; i < comm::kCollectives; ++i) {
    const auto kind = static_cast<comm::Collective>(i);
    const auto count = group.traffic().count(kind);
    py::dict of;
    of["calls"] = count.calls;
    of["bytes"] = count.logical_bytes;
    of["link_bytes"] = count.link_bytes;
    all[py::str(std::string(comm::name(kind)))] = of;
  }
  return all;
}

py::dict memory_of(comm::Group& group) {
  const auto both = [](const Usage& usage) { return py::make_tuple(usage.current, usage.peak); };
  py::dict all;
  for (size_t i = 0; i < kCategories; ++i) {
    const auto category = static_cast<Category>(i);
    if (category == Category::activations) continue;
    all[py::str(std::string(name(category)))] = both(group.ledger()->usage(category));
  }
  all["activations"] = both(other_tensors(group.device(), *group.ledger()));
  return all;
}

// A value that does not fit in milliseconds would be cast to anything, so it is checked first.
std::chrono::milliseconds milliseconds_of(double timeout) {
  constexpr double kYear = 365.0 * 24 * 3600;  // more is a year to a group
  if (!(timeout >= 0)) {
    throw ConfigError(fmt::format(
        "timeout is {}; it should be a number of seconds that is not negative.", timeout));
  }
  return std::chrono::milliseconds(static_cast<int64_t>(std::min(timeout, kYear) * 1000));
}

}  // namespace

void bind_group(py::module_& module) {
  module.def("install_host_allocator", &install_host_allocator);
  module.def(
      "init",
      [](std::optional<double> timeout) {
        comm::GroupOptions options;
        if (timeout) {
          options.timeout = milliseconds_of(*timeout);
        }
        return released([&] { return zero::init(options); });
      },
      py::arg("timeout"));
  module.def(
      "on_device",
      [](const GroupHolder& host, c10::Device device, bool through_host) {
        return released([&] {
          return comm::on_device(host, device,
                                 through_host ? comm::MakeBackend(comm::ThroughHost{}) : nullptr);
        });
      },
      py::arg("host"), py::arg("device"), py::arg("through_host"));
  py::class_<comm::Group, GroupHolder>(module, "Group")
      .def_property_readonly("rank", &comm::Group::rank)
      .def_property_readonly("size", &comm::Group::size)
      .def_property_readonly("local_rank", &comm::Group::local_rank)
      .def_property_readonly("local_size", &comm::Group::local_size)
      .def_property_readonly("device", &comm::Group::device)
      .def_property_readonly("hosts", [](comm::Group& group) { return group.topology().hosts; })
      .def(
          "barrier",
          [](comm::Group& group, const std::string& label) {
            released([&] { group.barrier(label); });
          },
          py::arg("label") = "Group.barrier")
      .def(
          "broadcast",
          [](comm::Group& group, const at::Tensor& values, int root, const std::string& label) {
            released([&] { group.broadcast(values, root, label).wait(); });
          },
          py::arg("values"), py::arg("root"), py::arg("label") = "Group.broadcast")
      .def(
          "all_reduce",
          [](comm::Group& group, const at::Tensor& values, const std::string& label) {
            released([&] { group.all_reduce(values, label).wait(); });
          },
          py::arg("values"), py::arg("label") = "Group.all_reduce")
      .def(
          "all_gather_control",
          [](comm::Group& group, const at::Tensor& values, const std::string& label) {
            return released([&] {
              auto all = at::empty({group.size() * values.numel()}, values.options());
              group.all_gather_control(all, values, label);
              return all;
            });
          },
          py::arg("values"), py::arg("label") = "Group.all_gather_control")
      .def("abandon", [](comm::Group& group, const std::string& why) { group.abandon(why); })
      .def("memory", &memory_of)
      .def("traffic", &traffic_of)
      .def("reset_peaks", [](comm::Group& group) {
        group.ledger()->reset_peaks();
        reset_peak_memory(group.device());
      });
}

}  // namespace zero::python
