// How much memory this process may still use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero {

struct MemoryLimit {
  int64_t available = INT64_MAX;  ///< bytes; what the system can drop (page cache) counts as free
  std::string reason;             ///< what sets it, for messages: "the machine's memory"
  /// Of whose memory it is: processes with the same one take from each other. 0: not known.
  int64_t id = 0;
};

/// What limits this process: the memory of the machine, and the limits of the cgroups (version 1 or
/// 2) that it is in, the tightest. Processes that share memory
/// need not share all of these (containers of one pod), and others may (containers of one machine).
/// `root` is where the file systems proc and sys are; tests give another.
std::vector<MemoryLimit> memory_limits(const std::filesystem::path& root = "/");
/// At most as many, of which the first is the machine's.
inline constexpr size_t kMemoryLimits = 4;

/// The one of them that leaves the least.
MemoryLimit available_memory(const std::filesystem::path& root = "/");

/// How many processes the kernel has killed since the machine's start because memory ran out, of
/// the machine or of a cgroup; 0 where it does not say.
int64_t kills_for_memory(const std::filesystem::path& root = "/");

}  // namespace zero
