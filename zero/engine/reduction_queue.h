// The sums over ranks that are under way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "zero/comm/group.h"
#include "zero/engine/reduction.h"
#include "zero/engine/reduction_context.h"

namespace zero {

/// Moves reductions through their phases, in the order in which they were started.
class ReductionQueue {
 public:
  /// Names the owner of the arrays: the queue, or the caller, who may write to them after `drop`;
  /// `drop` then makes the caller's stream wait.
  enum class Arrays : uint8_t { own, callers };
  ReductionQueue(const ReductionContext& context, Arrays arrays)
      : context_(context), arrays_(arrays) {}
  /// Waits for those under way, whether they succeed or not.
  ~ReductionQueue();
  ReductionQueue(const ReductionQueue&) = delete;
  ReductionQueue& operator=(const ReductionQueue&) = delete;

  /// Starts the reduce-scatter of a bucket to `output`, which the sum over replicas follows if
  /// `over_replicas`. To be called on the side stream.
  void start(Reduction reduction, bool over_replicas, const std::optional<comm::LinkWire>& wire);
  /// Takes a reduction that has been started.
  void add(Reduction reduction) { under_way_.push_back(std::move(reduction)); }

  /// Moves all reductions on by a phase, the oldest first, except the `newest` of them, which run
  /// on while the next bucket fills. Results that are there go to their place.
  void advance(size_t newest);
  /// Completes all reductions.
  void complete();
  /// Waits for all reductions, and drops their results.
  void drop();

 private:
  // Gives a result to its sums, and its memory back.
  void deliver(Reduction reduction) const;

  ReductionContext context_;
  Arrays arrays_;
  std::deque<Reduction> under_way_;
};

}  // namespace zero
