// The memory that this process may still use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero {

struct MemoryLimit {
  int64_t available = INT64_MAX;  ///< bytes; what the system can drop (page cache) counts as free
  std::string reason;             ///< who sets it, for messages: "the machine's memory"
  /// The id of the limited memory: processes with the same id take from each other. 0 is unknown.
  int64_t id = 0;
};

/// Returns the folders of this process's cgroup of `controller` and of those above it, of version 1
/// or 2. `root` is where the file systems proc and sys are; tests give another.
std::vector<std::filesystem::path> cgroups_of(const std::string& controller,
                                              const std::filesystem::path& root = "/");

/// Returns the limits on this process: the memory of the machine, and the tightest limits of the
/// cgroups (version 1 or 2) that it is in. Processes that share memory need not share all of these
/// (containers of one pod), and others may (containers of one machine).
std::vector<MemoryLimit> memory_limits(const std::filesystem::path& root = "/");
/// There are at most so many limits; the first is the machine's.
inline constexpr size_t kMemoryLimits = 4;

/// Returns the limit that leaves the least.
MemoryLimit available_memory(const std::filesystem::path& root = "/");

/// Returns how many processes the kernel has killed since the machine's start because memory ran
/// out, of the machine or of a cgroup; 0 where it does not say.
int64_t kills_for_memory(const std::filesystem::path& root = "/");

}  // namespace zero
