// Tells layers whether a device has a kernel for one of libzero's operators. A layer without one
// uses LibTorch's operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>

#include <optional>

namespace zero {

/// Returns whether x is of a dtype that kernels of devices take: fp32, bf16 or fp16.
inline bool has_kernel_dtype(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

/// Returns whether the operator `name` ("zero::gate"), which must be registered, has a kernel for
/// the device of x.
inline bool has_device_kernel(const at::Tensor& x, const char* name) {
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, x.device());
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").hasKernelForDispatchKey(key);
}

}  // namespace zero
