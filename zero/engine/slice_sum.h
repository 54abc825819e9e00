// The sum of an array over all ranks of a placement, of which each rank gets its slice.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "zero/comm/group.h"

namespace zero {

/// A reduce-scatter over `shards`; with replicas the unrounded sum of a block, which then each
/// replica adds a part of over the replicas and gives to the others (Note [Hybrid sharding]). A
/// phase is asynchronous; all ranks start and advance the same sums in the same order.
class SliceSum {
 public:
  SliceSum() = default;
  /// Starts the sum of `input` over `shards`. Without replicas it goes to `output`, else to
  /// `partial`, which may be `output`, or `input` where there is one shard. `label` and what
  /// `replicas` points to must live as long as this. `wire`: how sums cross between hosts; without
  /// replicas alone.
  SliceSum(comm::Group& shards, comm::Group* replicas, const at::Tensor& input, at::Tensor partial,
           at::Tensor output, std::string_view label,
           const std::optional<comm::LinkWire>& wire = {});
  /// The sum over `replicas` alone of what is in `slice`, in place.
  SliceSum(comm::Group& replicas, const at::Tensor& slice, std::string_view label);

  /// Waits for the phase under way and starts the next. True, now and from then on: there is none,
  /// the sum is done.
  bool advance();
  /// Waits for the phase under way.
  void wait() { work_.wait(); }

 private:
  at::Tensor part() const;

  comm::Group* replicas_ = nullptr;
  at::Tensor partial_;
  at::Tensor output_;
  std::string_view label_;
  comm::Work work_;
  enum class Phase { block, replicas, sharing } phase_ = Phase::block;
};

}  // namespace zero
