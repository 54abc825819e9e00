// Operators of libzero that only some devices have.
#pragma once

#include <torch/library.h>

#include <initializer_list>

#include "tests/device/operators.h"

namespace zero::simulated {

/// While it lives, the simulated device has a kernel of its own of each operator of libzero's that
/// is named ("linear_gelu"): it is enqueued as any other and runs the CPU's.
class OwnOperators {
 public:
  OwnOperators(std::initializer_list<const char*> names) {
    for (const char* name : names)
      zero_.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }

 private:
  torch::Library zero_ = torch::Library(torch::Library::IMPL, "zero", c10::DispatchKey::PrivateUse1,
                                        __FILE__, __LINE__);
};

}  // namespace zero::simulated
