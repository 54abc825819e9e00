// The extension module libzero._C: a thin layer, without policies; those are in python/libzero.
#include "binding.h"
#include "zero/base/error.h"
#include "zero/base/not_finite.h"

namespace zero::python {

void bind_errors(py::module_& module) {
  // Those that are registered later are tried first.
  const auto& error = py::register_exception<Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<ConfigError>(module, "ConfigError", error.ptr());
  py::register_exception<CommError>(module, "CommError", error.ptr());
  py::register_exception<CheckpointError>(module, "CheckpointError", error.ptr());
  py::register_exception<StoreError>(module, "StoreError", error.ptr());
  py::register_exception<OutOfMemory>(module, "OutOfMemory", error.ptr());
  py::register_exception<NotFinite>(module, "NotFinite", error.ptr());
}

}  // namespace zero::python

PYBIND11_MODULE(_C, module) {
  zero::python::bind_errors(module);
  zero::python::bind_group(module);
  zero::python::bind_engine(module);
  zero::python::bind_tensors(module);
}
