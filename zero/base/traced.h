// The kind of device that the device meta stands for while a step is traced (planner/trace.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// While a scope lives, this thread's code that chooses between ways of computing, with other
/// memory on a CPU than on a device, takes tensors on meta for those of a CPU.
class TracedAsHost {
 public:
  TracedAsHost();
  ~TracedAsHost();
  TracedAsHost(const TracedAsHost&) = delete;
  TracedAsHost& operator=(const TracedAsHost&) = delete;
  /// Returns true if a scope lives on this thread.
  static bool active();
};

/// Returns whether a tensor is on the CPU, or is traced as if it were.
inline bool on_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() || (tensor.is_meta() && TracedAsHost::active());
}

}  // namespace zero
