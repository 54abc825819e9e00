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
#include <variant>

#include "zero/optim/moment.h"
#include "zero/optim/narrow.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

/// The arguments of an update except its arrays: the first argument of `zero::update_`.
struct UpdateCall final : torch::CustomClassHolder {
  Optimizer optimizer;
  Moment moment;
  double gradient_scale = 1;
  float gradient_limit = 0;
  // As NarrowOperands have them.
  uint64_t key = 0;
  int64_t first = 0;
};

/// Returns the arguments of a kernel of `zero::update_`, as NarrowOperands if weights or states are
/// narrower than fp32. `master` has fp32 numbers, or the lower halves of split master weights as
/// int16, or bf16 weights that are their own master weights. States have fp32 or bf16 numbers, or
/// whole 8-bit blocks as bytes. Throws c10::Error if the tensors do not go together: they must be
/// contiguous, have one length and one device, and have the dtypes of Operands; and there must be
/// as many states as the optimizer has, in one format.
std::variant<Operands, NarrowOperands> operands_of(const UpdateCall& call,
                                                   const at::Tensor& gradient,
                                                   const at::Tensor& master,
                                                   const std::optional<at::Tensor>& parameter,
                                                   at::TensorList states);

/// Returns whether devices of this type have kernels for the operators above.
bool has_kernels(c10::DeviceType type);

/// Returns whether devices update by an optimizer. The others' states must be on the host.
bool updates_on_devices(const Optimizer& optimizer);

/// Does the same as `update`, or as the sweep that the moment says, for operands on a device,
/// asynchronously. The operands of a sweep are those of device::with_update (device_elements.h).
/// Throws a ConfigError if devices do not update by the optimizer, and c10::Error if the device has
/// no kernel.
void enqueue_update(const Optimizer& optimizer, const Moment& moment, double gradient_scale,
                    const Operands& operands);
/// Does the same for narrow operands, of element-wise optimizers.
void enqueue_update(const Optimizer& optimizer, const Moment& moment, double gradient_scale,
                    const NarrowOperands& operands);

/// Writes the squared norm of `values` (1-D, on any device) to `sums`, two fp64 numbers on the same
/// device: the sum, and 0 if it is finite or 1 if it is not. Asynchronous on a device.
void squared_norm(const at::Tensor& values, const at::Tensor& sums);
/// Does the same for each of `values`, to whose rows in `sums` (n, 2) the results go, with the same
/// bits: a device is busier with all of them at once (`zero::squared_norms_`; one by one if the
/// device lacks that kernel).
void squared_norms(at::TensorList values, const at::Tensor& sums);

}  // namespace zero::optim
