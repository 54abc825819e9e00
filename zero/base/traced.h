// The kind of device that the device meta stands for while a step is traced (planner/trace.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <optional>

namespace zero {

/// While a scope lives, this thread's code that chooses between ways of computing, with other
/// memory on a CPU than on a device, takes tensors on meta for those of `device`. So does Autocast.
class TracedAs {
 public:
  explicit TracedAs(at::DeviceType device);
  ~TracedAs();
  TracedAs(const TracedAs&) = delete;
  TracedAs& operator=(const TracedAs&) = delete;
  /// Returns the device of this thread's innermost scope; none without a scope.
  static std::optional<at::DeviceType> device();

 private:
  std::optional<at::DeviceType> before_;
};

/// Returns whether a tensor is on the CPU, or is traced as if it were.
inline bool on_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() || (tensor.is_meta() && TracedAs::device() == at::kCPU);
}

}  // namespace zero
