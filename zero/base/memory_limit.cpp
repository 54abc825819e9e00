#include "zero/base/memory_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string_view>

#include "zero/base/error.h"

namespace zero {

namespace {

namespace fs = std::filesystem;

// The number after `key` in a file of lines "key number".
std::optional<int64_t> number_of(const fs::path& file, std::string_view key) {
  std::ifstream lines(file);
  std::string name;
  int64_t value = 0;
  std::string rest;
  while (lines >> name >> value) {
    if (name == key) return value;
    std::getline(lines, rest);
  }
  return std::nullopt;
}

// A file of one number; "max" has none.
std::optional<int64_t> number_in(const fs::path& file) {
  std::ifstream stream(file);
  int64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

// How the two versions of cgroups name the same things.
struct Version {
  fs::path mount;
  const char* limit;
  const char* resident;
  const char* shared;
};

// Takes what one group and those above it leave.
void take_groups(MemoryLimit& least, const Version& version, const std::string& path) {
  // In a container the path may be that outside it; then the mount itself is this process's group.
  auto group = version.mount / fs::path(path).relative_path();
  std::error_code ignored;
  if (!fs::exists(group, ignored)) group = version.mount;
  const auto levels = std::distance(version.mount.begin(), version.mount.end());
  for (; std::distance(group.begin(), group.end()) >= levels; group = group.parent_path()) {
    const auto limit = number_in(group / version.limit);
    if (!limit) continue;
    const auto statistics = group / "memory.stat";
    const int64_t used = number_of(statistics, version.resident).value_or(0) +
                         number_of(statistics, version.shared).value_or(0);
    const int64_t left = std::max<int64_t>(0, *limit - used);
    if (left >= least.available) continue;
    least = {left, fmt::format("a memory cgroup's limit of {}, of which {} are used",
                               format_bytes(static_cast<double>(*limit)),
                               format_bytes(static_cast<double>(used)))};
  }
}

}  // namespace

MemoryLimit available_memory(const fs::path& root) {
  MemoryLimit least;
  const auto meminfo = root / "proc/meminfo";
  if (const auto kib = number_of(meminfo, "MemAvailable:")) {
    const auto total = number_of(meminfo, "MemTotal:").value_or(0);
    least = {*kib << 10, fmt::format("the machine's memory, {}",
                                     format_bytes(static_cast<double>(total << 10)))};
  }
  const Version first{root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss",
                      "total_shmem"};
  const Version second{root / "sys/fs/cgroup", "memory.max", "anon", "shmem"};
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto controllers = line.find(':');
    const auto path = line.find(':', controllers + 1);
    if (path == std::string::npos) continue;
    const auto names = line.substr(controllers + 1, path - controllers - 1);
    if (names.empty()) take_groups(least, second, line.substr(path + 1));
    if (names == "memory") take_groups(least, first, line.substr(path + 1));
  }
  return least;
}

int64_t kills_for_memory(const fs::path& root) {
  return number_of(root / "proc/vmstat", "oom_kill").value_or(0);
}

}  // namespace zero
