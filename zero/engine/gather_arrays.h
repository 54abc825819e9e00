// Collectives of arrays in the host's memory or on the device, over the group that carries the
// model's tensors.
//
// Note [Arrays of the host]
// What ranks exchange between the two sweeps of an update lies where the update runs. A group of a
// device carries tensors of its device alone, which its links move faster than the host's: arrays
// of the host go up, are gathered there, and come down. The host waits for those, since it goes on
// with their values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <string_view>

#include "zero/comm/group.h"
#include "zero/device/stream.h"

namespace zero {

/// Gathers `mine` of every rank into `all`; both are contiguous, in the host's memory or on the
/// device. Arrays of the host are there when this returns.
inline void gather_arrays(comm::Group& group, const at::Tensor& all, const at::Tensor& mine,
                          std::string_view label) {
  if (all.device() == group.device()) {
    group.all_gather(all, mine, label).wait();
    return;
  }
  auto gathered = at::empty(all.sizes(), all.options().device(group.device()));
  group.all_gather(gathered, mine.to(group.device()), label).wait();
  all.copy_(gathered);
}

/// Sends `values`, which are contiguous, from `root` to all in the same way.
inline void broadcast_array(comm::Group& group, const at::Tensor& values, int root,
                            std::string_view label) {
  if (values.device() == group.device()) {
    group.broadcast(values, root, label).wait();
    return;
  }
  const auto sent = values.to(group.device());
  group.broadcast(sent, root, label).wait();
  values.copy_(sent);
}

}  // namespace zero
