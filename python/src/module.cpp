// The extension module libzero._C: a thin layer, without policies; those are in python/libzero.
#include "binding.h"

PYBIND11_MODULE(_C, module) {
  zero::python::bind_errors(module);
  zero::python::bind_group(module);
  zero::python::bind_engine(module);
  zero::python::bind_tensors(module);
}
