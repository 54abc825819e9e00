// Memory, its huge pages, and its nodes.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "apps/zero/doctor_checks.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/base/memory_mapping.h"
#include "zero/comm/arena.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMemory = "memory";
constexpr size_t kTried = size_t{64} << 20;
constexpr int kRounds = 3;

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

// Of a file of "KEY: N kB".
int64_t kib_of(const fs::path& file, const std::string& key) {
  return number(value_of(file, key)).value_or(0) << 10;
}

double rate(size_t count, std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(count) / seconds.count() * 1e-9;
}

// Bytes of [memory, memory + size) that are in huge pages, by the counters `key` of smaps.
int64_t huge_bytes(const std::byte* memory, size_t size, const std::string& key) {
  std::ifstream maps("/proc/self/smaps");
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  int64_t sum = 0;
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0, last = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) {
      inside = first < begin + size && last > begin;
    } else if (inside && line.starts_with(key)) {
      sum += number(line.substr(key.size())).value_or(0) << 10;
    }
  }
  return std::min(sum, static_cast<int64_t>(size));
}

// GB/s of the first writes to fresh memory, as the first step's.
std::optional<double> first_touch(bool huge, double* share = nullptr) {
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const MemoryMapping memory({.bytes = kTried, .alignment = MemoryMapping::kHugePage});
    if (!memory) return std::nullopt;
    if (huge) {
      memory.advise_huge(kTried);
    } else {
      madvise(memory.data(), kTried, MADV_NOHUGEPAGE);
    }
    const auto start = std::chrono::steady_clock::now();
    std::memset(memory.data(), 1, kTried);
    best = std::max(best, rate(kTried, start));
    if (share != nullptr)
      *share = static_cast<double>(huge_bytes(memory.data(), kTried, "AnonHugePages:")) / kTried;
  }
  return best;
}

// GB/s of the first reads of shared memory that another rank has filled: what a mapping of its own
// costs a rank.
double first_reads(int file, int64_t offset) {
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const MemoryMapping view({.bytes = kTried,
                              .alignment = MemoryMapping::kHugePage,
                              .counted = false,
                              .file = file,
                              .file_offset = offset,
                              .shared = true});
    if (!view) return 0;
    const auto start = std::chrono::steady_clock::now();
    uint64_t sum = 0;
    for (size_t at = 0; at < kTried; at += sizeof sum) {
      uint64_t word = 0;
      std::memcpy(&word, view.data() + at, sizeof word);
      sum += word;
    }
    const double now = rate(kTried, start);
    ensure(sum != 0, "what was written can be read");
    best = std::max(best, now);
  }
  return best;
}

std::optional<Touch> try_arena() {
  try {
    constexpr auto kBytes = static_cast<int64_t>(kTried);
    const auto layout = comm::ArenaLayout::choose(1, int64_t{1} << 16, comm::physical_memory());
    const auto mapping = comm::Mapping::create(layout);
    comm::Arena arena(mapping, 0);
    const auto offset = arena.allocate(kBytes);
    auto* memory = mapping->at(offset);
    std::memset(memory, 1, kTried);
    Touch touch;
    touch.share = static_cast<double>(huge_bytes(memory, kTried, "ShmemPmdMapped:")) / kTried;
    touch.huge = first_reads(mapping->file(), offset);
    // A file of the same kind, of which nobody asks huge pages.
    const Descriptor plain(memfd_create("libzero-doctor", MFD_CLOEXEC));
    if (!plain || ftruncate(plain.get(), kBytes) != 0) return std::nullopt;
    const MemoryMapping fill({.bytes = kTried, .file = plain.get(), .shared = true});
    if (!fill) return std::nullopt;
    madvise(fill.data(), kTried, MADV_NOHUGEPAGE);
    std::memset(fill.data(), 1, kTried);
    touch.small = first_reads(plain.get(), 0);
    arena.free(offset);
    return touch;
  } catch (const Error&) {
    return std::nullopt;  // `try_sharing` tells why
  }
}

// A thread on `core` runs `work`; false where it may not.
template <class Work>
bool run_on(int core, Work&& work) {
  bool bound = false;
  std::thread([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(core), &set);
    bound = sched_setaffinity(0, sizeof set, &set) == 0;
    if (bound) work();
  }).join();
  return bound;
}

// GB/s of reads on one core of memory that was first touched on another.
std::optional<double> reads(int touching, int reading) {
  const MemoryMapping memory({.bytes = kTried, .alignment = MemoryMapping::kHugePage});
  if (!memory) return std::nullopt;
  memory.advise_huge(kTried);
  if (!run_on(touching, [&] { std::memset(memory.data(), 1, kTried); })) return std::nullopt;
  double best = 0;
  const bool bound = run_on(reading, [&] {
    for (int round = 0; round < kRounds; ++round) {
      const auto start = std::chrono::steady_clock::now();
      // One byte that there is not: all are looked at.
      ensure(std::memchr(memory.data(), 2, kTried) == nullptr, "memory holds what was written");
      best = std::max(best, rate(kTried, start));
    }
  });
  return bound ? std::optional(best) : std::nullopt;
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

void measure(HugePages& pages) {
  constexpr int64_t kLeft = int64_t{512} << 20;
  if (available_memory().available < kLeft) return;
  Touch own;
  const auto huge = first_touch(true, &own.share);
  const auto small = first_touch(false);
  if (huge && small) {
    own.huge = *huge;
    own.small = *small;
    pages.own = own;
  }
  pages.arena = try_arena();
}

Findings judge(const HugePages& pages) {
  constexpr double kMost = 0.5;
  constexpr const char* kSwitchedOff =
      "Start without what switches huge pages off for this process (prctl PR_SET_THP_DISABLE: some "
      "container runtimes and job managers).";
  const auto described = [](const std::string& word, const std::optional<Touch>& touch,
                            const char* what) {
    const auto setting = word.empty() ? std::string("the kernel has none") : word;
    if (!touch) return setting + ", not measured";
    return fmt::format("{}; {:.0f} % huge; {} at {:.2f} GB/s, with small pages {:.2f}", setting,
                       100 * touch->share, what, touch->huge, touch->small);
  };
  const auto cost = [](const std::optional<Touch>& touch, const char* what) {
    if (!touch) return fmt::format("{} is bound to be slower (not measured).", what);
    return fmt::format(
        "{} goes at {:.2f} GB/s of small pages (measured), and what is spent on each page of 4 KiB "
        "would be spent on 2 MiB.",
        what, touch->small);
  };
  Findings all;
  const auto own =
      fine(kMemory, "huge pages", described(pages.enabled, pages.own, "first touched"));
  if (pages.switched_off) {
    all.push_back(advice(own, kSwitchedOff, cost(pages.own, "Touching memory for the first time")));
  } else if (pages.enabled == "never" || pages.enabled.empty()) {
    all.push_back(advice(
        own,
        "Set /sys/kernel/mm/transparent_hugepage/enabled to madvise, as root, on the machine "
        "itself.",
        cost(pages.own, "Touching memory for the first time")));
  } else if (pages.own && pages.own->share < kMost) {
    all.push_back(advice(own,
                         "Run `echo 1 > /proc/sys/vm/compact_memory` as root, or free memory: "
                         "there are too few free pages side by side.",
                         cost(pages.own, "Touching memory for the first time")));
  } else {
    all.push_back(own);
  }
  const auto arena =
      fine(kMemory, "shared huge pages", described(pages.shared, pages.arena, "first read"));
  if (pages.shared == "deny") {
    all.push_back(
        advice(arena, "Set /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise, as root.",
               cost(pages.arena, "Reading another rank's memory for the first time")));
  } else if (pages.arena && pages.arena->share < kMost) {
    all.push_back(advice(
        arena,
        pages.switched_off
            ? kSwitchedOff
            : "Set /sys/kernel/mm/transparent_hugepage/shmem_enabled to within_size, as root, or "
              "run Linux 6.1 or later, of which libzero asks huge pages whatever the setting.",
        cost(pages.arena, "Reading another rank's memory for the first time")));
  } else {
    all.push_back(arena);
  }
  return all;
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

void measure(Nodes& nodes) {
  if (nodes.cores.size() < 2) return;
  const int first = nodes.cores.begin()->second.front();
  const int last = nodes.cores.rbegin()->second.front();
  nodes.near = reads(first, first);
  nodes.far = reads(first, last);
}

Findings judge(const Nodes& nodes, int ranks) {
  if (nodes.cores.size() < 2) return {fine(kMemory, "NUMA nodes", "one in use")};
  std::vector<std::string> parts;
  for (const auto& [node, cores] : nodes.cores)
    parts.push_back(fmt::format("node {}: {} cores", node, cores.size()));
  const auto line = fine(kMemory, "NUMA nodes", fmt::format("{}", fmt::join(parts, ", ")));
  const auto cost =
      nodes.near && nodes.far
          ? fmt::format(
                "A core reads memory of another node at {:.1f} GB/s and of its own at "
                "{:.1f} (measured).",
                *nodes.far, *nodes.near)
          : std::string("Memory of another node is bound to be slower (not measured).");
  const auto count = static_cast<int>(nodes.cores.size());
  return {advice(
      line,
      ranks < count ? fmt::format("Start {} ranks, a node for each (mpirun --map-by numa --bind-to "
                                  "numa, or numactl -N NODE -m NODE).",
                                  count)
                    : std::string("Bind each rank to the cores and the memory of one node (mpirun "
                                  "--map-by numa --bind-to numa, or numactl -N NODE -m NODE)."),
      cost)};
}

}  // namespace zero::app::checkup
