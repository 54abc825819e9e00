// The process that an object belongs to.
#pragma once

#include <sys/types.h>
#include <unistd.h>

namespace zero {

/// Remembers the process that it was made in. A fork without exec copies every object, and the copy
/// is destroyed when the child exits. But files, shared memory, threads and peers belong to the
/// parent, so the child must leave them alone.
class OwnerProcess {
 public:
  /// Returns false in a child that the process forked later.
  bool here() const { return getpid() == process_; }

 private:
  pid_t process_ = getpid();
};

}  // namespace zero
