// Memory, its huge pages, and its nodes.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "apps/zero/doctor_checks.h"
#include "zero/base/error.h"
#include "zero/base/memory_limit.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMemory = "memory";

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

// Returns the bytes that a file of lines "KEY: N kB" tells of a key.
int64_t kib_of(const fs::path& file, const std::string& key) {
  return number(value_of(file, key)).value_or(0) << 10;
}

}  // namespace

Memory read_memory(const fs::path& root) {
  Memory memory;
  const auto limit = available_memory(root);
  memory.available = limit.available;
  memory.reason = limit.reason;
  const auto meminfo = root / "proc/meminfo";
  memory.total = kib_of(meminfo, "MemTotal:");
  memory.swap = kib_of(meminfo, "SwapTotal:");
  memory.swapped = memory.swap - kib_of(meminfo, "SwapFree:");
  memory.of_a_rank = kib_of(root / "proc/self/status", "RssAnon:");
  memory.overcommit =
      static_cast<int>(number(first_line(root / "proc/sys/vm/overcommit_memory")).value_or(0));
  memory.kills = kills_for_memory(root);
  return memory;
}

Findings judge(const Memory& memory, int ranks) {
  constexpr double kOfParameter = 16;  // bytes in bf16: 2 + 2 + 12, docs/architecture.md
  constexpr int64_t kSwapped = int64_t{64} << 20;
  Findings all;
  const int64_t left = memory.available - ranks * memory.of_a_rank;
  const auto line =
      fine(kMemory, "available", fmt::format("{} of {}", bytes(memory.available), memory.reason));
  if (left <= 0) {
    all.push_back(problem(
        line, fmt::format("Free memory, raise the limit, or start fewer than {} ranks.", ranks),
        fmt::format("{} ranks take {} each before they have a model (this "
                    "process does), which is more than there is.",
                    ranks, bytes(memory.of_a_rank))));
  } else {
    auto roomy = line;
    roomy.value += fmt::format("; bf16 states of {:.2f}e9 parameters would fill it",
                               static_cast<double>(left) / kOfParameter * 1e-9);
    all.push_back(roomy);
  }
  const auto swap = fine(
      kMemory, "swap",
      memory.swap == 0 ? "none"
                       : fmt::format("{} of {} in use", bytes(memory.swapped), bytes(memory.swap)));
  all.push_back(memory.swapped < kSwapped
                    ? swap
                    : advice(swap,
                             "End what else takes the memory, and bring the rest back (swapoff -a "
                             "and swapon -a, as root).",
                             fmt::format("{} are on a disk and come back at its speed when they "
                                         "are touched.",
                                         bytes(memory.swapped))));
  const auto overcommit =
      fine(kMemory, "overcommit", fmt::format("vm.overcommit_memory={}", memory.overcommit));
  all.push_back(
      memory.overcommit != 2
          ? overcommit
          : advice(overcommit, "Set vm.overcommit_memory=0 (sysctl, as root).",
                   "Addresses that are only reserved count as memory, so the host allocator's "
                   "range of addresses is bound to be cut down, and large blocks to be refused "
                   "while there is memory."));
  if (memory.kills > 0) {
    all.push_back(advice(
        fine(kMemory, "kills", fmt::format("{} since the start", memory.kills)),
        "Look in dmesg for what was killed; give training a memory_budget, or a cgroup of its own.",
        fmt::format("The kernel has ended {} process{} because memory ran out.", memory.kills,
                    memory.kills == 1 ? "" : "es")));
  }
  return all;
}

HugePages read_huge_pages(const fs::path& root) {
  HugePages pages;
  const auto folder = root / "sys/kernel/mm/transparent_hugepage";
  pages.enabled = chosen_word(first_line(folder / "enabled"));
  pages.shared = chosen_word(first_line(folder / "shmem_enabled"));
  pages.switched_off = value_of(root / "proc/self/status", "THP_enabled:") == "0";
  return pages;
}

Findings judge(const HugePages& pages) {
  constexpr const char* kCost =
      "Memory comes in pages of 4 KiB, each of which costs what a page of 2 MiB would.";
  const auto line = fine(
      kMemory, "huge pages",
      fmt::format("{}, shared {}", pages.enabled.empty() ? "the kernel has none" : pages.enabled,
                  pages.shared.empty() ? "none" : pages.shared));
  if (pages.switched_off) {
    return {advice(line,
                   "Start without what switches huge pages off for this process (prctl "
                   "PR_SET_THP_DISABLE: some container runtimes and job managers).",
                   kCost)};
  }
  if (pages.enabled == "never" || pages.enabled.empty()) {
    return {advice(line,
                   "Set /sys/kernel/mm/transparent_hugepage/enabled to madvise, as root, on the "
                   "machine itself.",
                   kCost)};
  }
  if (pages.shared == "deny") {
    return {advice(
        line, "Set /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise, as root.", kCost)};
  }
  return {line};
}

Nodes read_nodes(const fs::path& root) {
  Nodes nodes;
  const auto allowed = numbers(value_of(root / "proc/self/status", "Cpus_allowed_list:"));
  const auto folder = root / "sys/devices/system/node";
  for (const int node : numbers(first_line(folder / "online"))) {
    for (const int core : numbers(first_line(folder / fmt::format("node{}", node) / "cpulist"))) {
      if (std::find(allowed.begin(), allowed.end(), core) != allowed.end())
        nodes.cores[node].push_back(core);
    }
  }
  return nodes;
}

Findings judge(const Nodes& nodes, int ranks) {
  if (nodes.cores.size() < 2) return {fine(kMemory, "NUMA nodes", "one in use")};
  std::vector<std::string> parts;
  for (const auto& [node, cores] : nodes.cores)
    parts.push_back(fmt::format("node {}: {} cores", node, cores.size()));
  const auto line = fine(kMemory, "NUMA nodes", fmt::format("{}", fmt::join(parts, ", ")));
  const auto count = static_cast<int>(nodes.cores.size());
  return {advice(
      line,
      ranks < count ? fmt::format("Start {} ranks, a node for each (mpirun --map-by numa --bind-to "
                                  "numa, or numactl -N NODE -m NODE).",
                                  count)
                    : std::string("Bind each rank to the cores and the memory of one node (mpirun "
                                  "--map-by numa --bind-to numa, or numactl -N NODE -m NODE)."),
      "A core reads the memory of another node slower than its own.")};
}

}  // namespace zero::app::checkup
