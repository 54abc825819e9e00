// Functions that the binding's files share.
//
// Note [GIL]
// A call of the engine may wait for other ranks, and autograd's threads need the GIL for hooks that
// are written in Python: so every such call runs without it. An exception of such a hook crosses
// C++ as python_error, and arrives in Python as itself.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace zero::python {

namespace py = pybind11;

/// Calls `f` without the GIL and returns its result.
template <class F>
auto released(F&& f) {
  try {
    const py::gil_scoped_release no_gil;
    return std::forward<F>(f)();
  } catch (python_error& error) {
    error.restore();
    throw py::error_already_set();
  }
}

/// For a smart pointer whose object's end may wait for other ranks.
template <class Pointer>
void reset_released(Pointer& pointer) {
  released([&] { pointer.reset(); });
}

/// For destructors: reports an exception of `action` as Python reports errors that nobody can
/// catch.
template <class Action>
void unraisable(const Action& action) noexcept {
  try {
    action();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an unknown exception");
    PyErr_WriteUnraisable(nullptr);
  }
}

/// In the handler of an error of libzero's that leaves through torch: throws it as Python's
/// exception (NamedTensors::rethrow).
void rethrow_for_python();
/// A message of libzero's with Python's names in the place of those of C++.
std::string python_text(std::string_view message);

void bind_errors(py::module_& module);
void bind_group(py::module_& module);
void bind_engine(py::module_& module);
void bind_plan(py::module_& module);
void bind_tensors(py::module_& module);

}  // namespace zero::python
