// One sum over ranks, with the phases that replicas need.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "zero/comm/group.h"

namespace zero {

/// The sum of an array over all ranks of a placement; each rank gets its slice. Without replicas it
/// is one reduce-scatter over `shards`. With replicas that gives the unrounded sum of a shard
/// group. Then each replica adds up one part of it over the replicas and sends this part to the
/// others (Note [Hybrid sharding]). Each phase is asynchronous. All ranks start and advance the
/// same sums in the same order.
class PhasedReduction {
 public:
  PhasedReduction() = default;
  /// Starts the sum of `input` over `shards`. Without replicas it goes to `output`, with replicas
  /// to `partial`, which may be `output`, or `input` if there is one shard. `label` and `replicas`
  /// must live as long as this. `wire` says how the sum crosses between hosts; it has an effect
  /// without replicas only.
  PhasedReduction(comm::Group& shards, comm::Group* replicas, const at::Tensor& input,
                  at::Tensor partial, at::Tensor output, std::string_view label,
                  const std::optional<comm::LinkWire>& wire = {});
  /// Starts the sum of `slice` over `replicas` alone, in place.
  PhasedReduction(comm::Group& replicas, const at::Tensor& slice, std::string_view label);
  /// Takes a sum that has been started and has one phase: an all-reduce, whose whole result each
  /// rank gets.
  explicit PhasedReduction(comm::Work work) : work_(std::move(work)) {}

  /// Waits for the phase under way and starts the next. Returns true, now and from then on, if
  /// there is none: the sum is done.
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
  enum class Phase : uint8_t { shards, replicas, sharing } phase_ = Phase::shards;
};

}  // namespace zero
