#include "zero/base/memory_limit.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
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

// Returns the number in a file of one number, or nothing for "max".
std::optional<int64_t> number_in(const fs::path& file) {
  std::ifstream stream(file);
  int64_t value = 0;
  if (stream >> value) return value;
  return std::nullopt;
}

// Returns one id for each thing that has a number in the running kernel.
int64_t identity(const std::string& boot, const std::string& what) {
  return static_cast<int64_t>(std::hash<std::string>{}(boot + what) | 1);
}

}  // namespace

std::vector<fs::path> cgroups_of(const std::string& controller, const fs::path& root) {
  std::vector<fs::path> all;
  std::ifstream lines(root / "proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string number, controllers, path;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    const bool second = controllers.empty();
    if (!second && ("," + controllers + ",").find("," + controller + ",") == std::string::npos)
      continue;
    auto mount = root / "sys/fs/cgroup";
    if (!second) mount /= controller;
    // In a container the path may be that of the host; then the mount itself is this process's
    // group.
    auto group = mount / fs::path(path).relative_path();
    std::error_code ignored;
    if (!fs::exists(group, ignored)) group = mount;
    const auto levels = std::distance(mount.begin(), mount.end());
    for (; std::distance(group.begin(), group.end()) >= levels; group = group.parent_path())
      all.push_back(group);
  }
  return all;
}

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
  for (const auto& group : cgroups_of("memory", root)) {
    std::error_code ignored;
    const bool first = fs::exists(group / "memory.limit_in_bytes", ignored);
    const auto limit = number_in(group / (first ? "memory.limit_in_bytes" : "memory.max"));
    if (!limit) continue;
    const auto statistics = group / "memory.stat";
    const int64_t used = number_of(statistics, first ? "total_rss" : "anon").value_or(0) +
                         number_of(statistics, first ? "total_shmem" : "shmem").value_or(0);
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
