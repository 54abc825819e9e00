// The extension module libzero._C: a thin layer, without policies; those are in python/libzero.
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <string>

#include "binding.h"
#include "zero/device/plugin.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/packed_weight.h"

PYBIND11_MODULE(_C, module) {
  zero::python::bind_errors(module);
  zero::python::bind_group(module);
  zero::python::bind_engine(module);
  zero::python::bind_plan(module);
  zero::python::bind_tensors(module);
  module.def("linear_cross_entropy", [](const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& targets, double label_smoothing,
                                        double divisor) {
    return zero::python::released([&] {
      return zero::linear_cross_entropy(hidden, weight, targets,
                                        {.label_smoothing = label_smoothing, .divisor = divisor});
    });
  });
  module.def("packed_weight", [](const at::Tensor& values, const std::string& format) {
    return zero::python::released(
        [&] { return zero::packed_weight(values, zero::packed_format(format)); });
  });
  module.def("load_device_plugin", [](const std::string& type) {
    zero::python::released([&] { zero::load_device_plugin(c10::Device(type).type()); });
  });
  module.def("device_count", [](c10::Device device) -> int {
    const auto* guard =
        c10::impl::device_guard_impl_registry[static_cast<size_t>(device.type())].load();
    return guard == nullptr ? 0 : guard->deviceCount();
  });
}
