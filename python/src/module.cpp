// The extension module libzero._C: a thin layer, without policies; those are in python/libzero.
#include <c10/core/Device.h>

#include <string>

#include "binding.h"
#include "zero/device/plugin.h"

PYBIND11_MODULE(_C, module) {
  zero::python::bind_errors(module);
  zero::python::bind_group(module);
  zero::python::bind_engine(module);
  zero::python::bind_tensors(module);
  module.def("load_device_plugin", [](const std::string& type) {
    zero::python::released([&] { zero::load_device_plugin(c10::Device(type).type()); });
  });
}
