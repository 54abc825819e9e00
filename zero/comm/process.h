// Processes of other ranks: which they are, and whether they live.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "zero/base/descriptor.h"

namespace zero::comm {

/// Returns when a process started, in clock ticks since boot; nothing if there is none, or one
/// that has ended and whose parent has not asked yet (a zombie).
std::optional<uint64_t> start_time(int64_t pid);

/// This environment variable names this process's host in place of the host name. Ranks that name
/// different hosts share no memory, even on one machine. For tests of several hosts.
inline constexpr const char* kHostVariable = "ZERO_HOST";

/// A process as its peers know it. The start time tells it from a later process with the same
/// number.
struct Process {
  int64_t pid = 0;
  uint64_t start_time = 0;
  std::string host;     ///< the host name, or the value of kHostVariable
  std::string machine;  ///< boot id, host, process-id and network namespace: equal on one host
  /// Returns this process.
  static Process self();
  bool operator==(const Process&) const = default;
};

/// Tells whether one process lives.
class ProcessWatch {
 public:
  explicit ProcessWatch(const Process& process);
  bool dead() const;

 private:
  Process process_;
  bool self_ = false;
  bool gone_at_first_ = false;
  Descriptor pidfd_;
};

}  // namespace zero::comm
