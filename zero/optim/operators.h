// The kernels of this folder for tensors of a device. They are operators of LibTorch's dispatcher,
// which has a table of their kernels by device.
//
// Note [Kernels of a device]
// `zero::update_` and `zero::squared_norm_` are registered for the CPU, with the kernels of this
// folder. A library with the kernels of another device registers them under that device's key
// (TORCH_LIBRARY_IMPL(zero, CUDA, ...)) when it is loaded; nothing here depends on it. An operator
// is enqueued on the current stream like any other. Its results are those of the CPU, bit for bit,
// if the device divides and takes roots as IEEE 754 says.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>

#include "zero/optim/optimizer.h"

namespace zero::optim {

/// The arguments of an update except its arrays: the first argument of `zero::update_`.
struct UpdateCall final : torch::CustomClassHolder {
  Optimizer optimizer;
  int64_t step = 1;
  double lr = 0;
  double gradient_scale = 1;
  float gradient_limit = 0;
};

/// Returns the arguments of a kernel of `zero::update_` as Operands. Throws c10::Error if the
/// tensors do not go together: they must be contiguous, have one length and one device, and have
/// the dtypes of Operands; and there must be as many states as the optimizer has.
Operands operands_of(const UpdateCall& call, const at::Tensor& gradient, const at::Tensor& master,
                     const std::optional<at::Tensor>& parameter, at::TensorList states);

/// Returns whether devices of this type have kernels for the operators above.
bool has_kernels(c10::DeviceType type);

/// Does the same as `update` for operands on a device, asynchronously. Throws a ConfigError if
/// master weights are split or the optimizer is not element-wise, and c10::Error if the device has
/// no kernel.
void enqueue_update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                    const Operands& operands);

/// Writes the squared norm of `values` (1-D, on any device) to `sums`, two fp64 numbers on the same
/// device: the sum, and 0 if it is finite or 1 if it is not. Asynchronous on a device.
void squared_norm(const at::Tensor& values, const at::Tensor& sums);

}  // namespace zero::optim
