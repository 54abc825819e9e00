// A forward pass whose graph is recorded later, in backward.
#pragma once

namespace zero {

/// While a scope lives on a thread, operators there belong to a training step although gradients
/// are off: recomputation runs them again, with gradients, in backward.
class DeferredGraph {
 public:
  DeferredGraph();
  ~DeferredGraph();
  DeferredGraph(const DeferredGraph&) = delete;
  DeferredGraph& operator=(const DeferredGraph&) = delete;
  /// Returns true if a scope lives on this thread.
  static bool active();
};

}  // namespace zero
