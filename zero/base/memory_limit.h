// Finds out how much memory this process may still use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero {

struct MemoryLimit {
  int64_t available = INT64_MAX;  ///< bytes; what the system can drop (page cache) counts as free
  std::string reason;             ///< its origin, for messages: "the machine's memory"
  /// The id of the limited memory: processes with the same id share it. 0 means unknown.
  int64_t id = 0;
};

/// Returns the folders of this process's cgroup of `controller` and of the cgroups above it, of
/// version 1 or 2. The file systems proc and sys are below `root`; tests give another root.
std::vector<std::filesystem::path> cgroups_of(const std::string& controller,
                                              const std::filesystem::path& root = "/");

/// Returns the limits on this process: the memory of the machine, and the tightest limits of the
/// cgroups (version 1 or 2) that it is in. Processes that share memory do not always have all of
/// these limits in common (containers of one pod), and processes that share none may have some in
/// common (containers of one machine).
std::vector<MemoryLimit> memory_limits(const std::filesystem::path& root = "/");
/// There are at most this many limits. The first is the machine's.
inline constexpr size_t kMemoryLimits = 4;

/// Returns the limit that leaves the least memory.
MemoryLimit available_memory(const std::filesystem::path& root = "/");

/// Returns how many processes the kernel has killed since the machine's start because the machine
/// or a cgroup ran out of memory; 0 if it does not say.
int64_t kills_for_memory(const std::filesystem::path& root = "/");

}  // namespace zero
