// The interface by which a read of parameters waits for the update that makes them.
#pragma once

#include <cstdint>

namespace zero {

/// Updates that may still be under way when somebody reads parameters.
class PendingUpdates {
 public:
  virtual ~PendingUpdates() = default;
  /// Completes the update of a unit whose parameters are about to be read for a gather, unless the
  /// update is a delayed one, whose parameters nobody reads yet. Needs no other rank.
  virtual void complete_before_read(int64_t unit) = 0;
  /// Completes the update if that needs no waiting. Returns whether the parameters may be read now.
  virtual bool try_complete(int64_t unit) = 0;
};

}  // namespace zero
