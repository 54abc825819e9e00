// How much memory this process may still use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace zero {

struct MemoryLimit {
  int64_t available = INT64_MAX;  ///< bytes; what the system can drop (page cache) counts as free
  std::string reason;             ///< what sets it, for messages: "the machine's memory"
};

/// The least of what the machine has, and what the memory cgroups of this process (version 1 or 2)
/// leave it and all others in them. `root` is where the file systems proc and sys are; tests give
/// another.
MemoryLimit available_memory(const std::filesystem::path& root = "/");

/// How many processes the kernel has killed since the machine's start because memory ran out, of
/// the machine or of a cgroup; 0 where it does not say.
int64_t kills_for_memory(const std::filesystem::path& root = "/");

}  // namespace zero
