// How an operator of the CPU becomes a task on a stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "tests/device/device.h"

namespace zero::simulated {

/// The bytes of a tensor; from its first to its last element where they are neither dense nor rows.
Range range_of(const at::Tensor& tensor, bool write);
/// The memory of a device's tensor as a tensor of the CPU, for tasks. Owns nothing. Throws
/// c10::Error for a tensor that shows no device memory.
at::Tensor shown_to_tasks(const at::Tensor& tensor);

/// Any operator: enqueues the CPU's kernel on the current stream of its tensors' device. Fresh
/// results are allocated there. See the notes in device.h, effects.h and random.h.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace zero::simulated
