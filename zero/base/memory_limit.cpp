#include "zero/base/memory_limit.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <string_view>

#include "zero/base/error.h"

namespace zero {

namespace {

namespace fs = std::filesystem;

// Returns the number after `key` in a file of lines "key number".
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

// Returns the number in a file of one number; none for "max".
std::optional<int64_t> number_in(const fs::path& file) {
  std::ifstream stream(file);
  int64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

// The two versions of cgroups have different names for the same things.
struct Version {
  fs::path mount;
  const char* limit;
  const char* resident;
  const char* shared;
};

// One id for each thing that has a number in the kernel that runs now.
int64_t identity(const std::string& boot, const std::string& what) {
  return static_cast<int64_t>(std::hash<std::string>{}(boot + what) | 1);
}

// Adds what one group and those above it leave.
void add_groups(std::vector<MemoryLimit>& limits, const Version& version, const std::string& path,
                const std::string& boot) {
  // In a container the path may be the one outside it; then the mount itself is this process's
  // group.
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
    // A group's number is the same in every container that sees it.
    struct stat status {};
    const bool known = stat(group.c_str(), &status) == 0;
    limits.push_back(
        {std::max<int64_t>(0, *limit - used),
         fmt::format("a memory cgroup's limit of {}, of which {} are used",
                     format_bytes(static_cast<double>(*limit)),
                     format_bytes(static_cast<double>(used))),
         known ? identity(boot, fmt::format("{}:{}", status.st_dev, status.st_ino)) : 0});
  }
}

}  // namespace

std::vector<MemoryLimit> memory_limits(const fs::path& root) {
  std::string boot;
  std::getline(std::ifstream(root / "proc/sys/kernel/random/boot_id"), boot);
  std::vector<MemoryLimit> limits(1);
  limits[0].id = identity(boot, "machine");
  const auto meminfo = root / "proc/meminfo";
  if (const auto kib = number_of(meminfo, "MemAvailable:")) {
    const auto total = number_of(meminfo, "MemTotal:").value_or(0);
    limits[0].available = *kib << 10;
    limits[0].reason =
        fmt::format("the machine's memory, {}", format_bytes(static_cast<double>(total << 10)));
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
    if (names.empty()) add_groups(limits, second, line.substr(path + 1), boot);
    if (names == "memory") add_groups(limits, first, line.substr(path + 1), boot);
  }
  std::sort(limits.begin() + 1, limits.end(),
            [](const MemoryLimit& a, const MemoryLimit& b) { return a.available < b.available; });
  if (limits.size() > kMemoryLimits) limits.resize(kMemoryLimits);
  return limits;
}

MemoryLimit available_memory(const fs::path& root) {
  const auto limits = memory_limits(root);
  return *std::min_element(
      limits.begin(), limits.end(),
      [](const MemoryLimit& a, const MemoryLimit& b) { return a.available < b.available; });
}

int64_t kills_for_memory(const fs::path& root) {
  return number_of(root / "proc/vmstat", "oom_kill").value_or(0);
}

}  // namespace zero
