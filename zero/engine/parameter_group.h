// Parameter groups, and the policy of buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/optim/optimizer.h"

namespace zero {

/// Parameters that share an optimizer and its hyper-parameters. A group that names none, has no
/// `matches` and is not the `rest` has no parameters.
struct ParameterGroup {
  std::vector<std::string> names = {};
  Optimizer optimizer = {};
  /// The group also takes each parameter that no group names and for which this is true. It gets
  /// the name that the module registered first, and the tensor as it was given: its shape decides,
  /// for example, that vectors have no weight decay.
  std::function<bool(std::string_view name, const at::Tensor& parameter)> matches = {};
  /// The group also takes every parameter that no other group has. One group may be so.
  bool rest = false;
};

/// Decides what happens to buffers (batch norm's running statistics), which each rank computes from
/// its own micro-batches. Buffers of integers become rank 0's if others are averaged.
enum class BufferPolicy : uint8_t {
  per_rank,  ///< each rank keeps its own, as with FSDP
  rank_0,    ///< all ranks get rank 0's at the end of each step, as with DDP before each forward
  average,   ///< all ranks get the mean over ranks at the end of each step
};

}  // namespace zero
