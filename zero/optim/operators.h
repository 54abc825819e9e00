// The kernels of this folder for tensors of a device: operators of LibTorch's dispatcher, which has
// their kernels in a table by device.
//
// Note [Kernels of a device]
// `zero::update_` and `zero::squared_norm_` are registered for the CPU, by the kernels of this
// folder. A library that brings those of a device registers them under its key
// (TORCH_LIBRARY_IMPL(zero, CUDA, ...)) and is loaded; nothing here knows of it. An operator is
// enqueued on the current stream as any other, and its results are the CPU's, bit for bit, where
// the device divides and takes roots as IEEE 754 says.
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

/// Returns the arguments of a kernel of `zero::update_` as a Range. Throws c10::Error where the
/// tensors do not go together: they are contiguous, of one length and one device, and of a Range's
/// dtypes, with as many states as the optimizer has.
Range range_of(const UpdateCall& call, const at::Tensor& gradient, const at::Tensor& master,
               const std::optional<at::Tensor>& parameter, at::TensorList states);

/// Returns whether devices of this type have kernels for the operators above.
bool has_kernels(c10::DeviceType type);

/// Does the same as `update` for a range of a device; asynchronous. Throws ConfigError if master
/// weights are split or the optimizer is not element-wise, and c10::Error if the device has no
/// kernel.
void enqueue_update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                    const Range& range);

/// The squared norm of `values` (1-D, of any device) into `sums`, two numbers in fp64 there: the
/// sum, and 0, or 1 where it is not finite. Asynchronous on a device.
void squared_norm(const at::Tensor& values, const at::Tensor& sums);

}  // namespace zero::optim
