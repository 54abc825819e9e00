// Updates that may still be under way when somebody reads parameters.
#pragma once

#include <cstdint>

namespace zero {

class LateUpdates {
 public:
  virtual ~LateUpdates() = default;
  /// Completes the update of a unit whose parameters are about to be read from a disk.
  virtual void complete(int64_t unit) = 0;
  /// Completes it if that needs no waiting. Returns whether the parameters may be read now.
  virtual bool try_complete(int64_t unit) = 0;
};

}  // namespace zero
