// `zero doctor` looks for what makes a run fail. Each subject has a file.
//
// Note [Facts and findings]
// A check is two functions. The first reads facts, from files under a `root` where the kernel tells
// them in files: a folder that plays /proc and /sys will do. The second makes findings of facts,
// and looks at nothing else. So tests can make every finding appear, on any machine. Nothing is
// timed: `zero bench` measures.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "zero/comm/job.h"

namespace zero::app::checkup {

/// advice: it costs something. problem: training fails, or is so slow that nobody can want it.
enum class Mark : uint8_t { ok, advice, problem };

/// A line of the report. A line that is not ok has a sentence that says what to change, and one
/// that says what it costs now.
struct Finding {
  std::string section, name, value;
  Mark mark = Mark::ok;
  std::string change{}, cost{};
};
using Findings = std::vector<Finding>;

Finding fine(std::string section, std::string name, std::string value);
Finding advice(Finding line, std::string change, std::string cost);
Finding problem(Finding line, std::string change, std::string cost);

/// The job that the machine is to run.
struct Plan {
  int ranks = 1;  ///< on this host
  int hosts = 1;
};

// Cores and threads: doctor_cores.cpp.

struct Cores {
  int online = 1;                 ///< of the machine
  int granted = 1;                ///< of them by the cgroup's cpuset
  int allowed = 1;                ///< of them by this process's affinity
  std::optional<double> quota{};  ///< a cgroup's, in cores
  std::optional<int> threads{};   ///< OMP_NUM_THREADS
  double load = 0;                ///< processes that ran or wanted to, over the last minute
  /// Returns how many cores' time the threads may use.
  double usable() const;
  /// Returns the threads of each of `ranks` ranks: OMP_NUM_THREADS, or what `zero launch` sets.
  int threads_of(int ranks) const;
  /// Returns how many threads of each rank fit, at least 1.
  int fitting_threads(int ranks) const;
};
/// Throws ConfigError where OMP_NUM_THREADS is not a number.
Cores read_cores(const std::filesystem::path& root, const comm::Lookup& variable);

Findings judge(const Cores& cores, int ranks);

// LibTorch and its threads: doctor_libraries.cpp.

struct LibTorch {
  std::string version;
  std::string kernels;                ///< the instructions of libzero's kernels, by Highway's name
  std::string operators;              ///< those of LibTorch's operators
  std::string backend;                ///< what runs its parallel loops: "OpenMP"
  int threads = 1;                    ///< of a loop
  bool avx2 = false;                  ///< the processor has it
  std::vector<std::string> runtimes;  ///< OpenMP libraries that this process has loaded
};
LibTorch read_libtorch(const std::filesystem::path& root);
Findings judge(const LibTorch& library);

/// Returns the names of NVIDIA's devices.
std::vector<std::string> read_gpus(const std::filesystem::path& root);
Findings judge_gpus(const std::vector<std::string>& gpus);

// Memory: doctor_memory.cpp.

struct Memory {
  int64_t total = 0, available = 0;  ///< bytes
  std::string reason;                ///< what limits `available`
  int64_t of_a_rank = 0;             ///< that a rank takes before it has a model
  int64_t swap = 0, swapped = 0;     ///< of it in use
  int overcommit = 0;                ///< vm.overcommit_memory
  int64_t kills = 0;                 ///< for want of memory, since the machine's start
};
Memory read_memory(const std::filesystem::path& root);
Findings judge(const Memory& memory, int ranks);

struct HugePages {
  std::string enabled, shared;  ///< the chosen words of `enabled` and `shmem_enabled`
  bool switched_off = false;    ///< for this process (PR_SET_THP_DISABLE)
};
HugePages read_huge_pages(const std::filesystem::path& root);
Findings judge(const HugePages& pages);

struct Nodes {
  std::map<int, std::vector<int>> cores;  ///< of each node, those that this process may use
};
Nodes read_nodes(const std::filesystem::path& root);
Findings judge(const Nodes& nodes, int ranks);

// Limits, and what the kernel lets ranks do: doctor_system.cpp.

struct Limits {
  std::map<std::string, int64_t> soft;  ///< by the names in /proc/self/limits; only finite ones
  std::optional<int64_t> processes{};   ///< that a cgroup leaves
  int kernel = 0;                       ///< 6001 for Linux 6.1
  bool infiniband = false;
};
Limits read_limits(const std::filesystem::path& root);
Findings judge(const Limits& limits, const Plan& plan, int threads);

/// Each text says why something does not work; it is empty where it works.
struct Sharing {
  std::string arena, passing, watching, meeting;
  std::string folder{};  ///< of the meeting
};
Sharing try_sharing(int ranks);
Findings judge(const Sharing& sharing);

struct Uring {
  int opened = 0, wanted = 1;   ///< queues
  int error = 0;                ///< errno of the first that was refused
  std::optional<int> sysctl{};  ///< kernel.io_uring_disabled
};
Uring try_uring(const std::filesystem::path& root, int ranks);
Findings judge(const Uring& uring);

// Disks: doctor_disks.cpp.

struct Disk {
  std::string path;
  std::string type, source;  ///< of the file system: "ext4", "/dev/nvme0n1p1"
  std::optional<bool> rotates{};
  int64_t total = 0, free = 0;  ///< bytes
  std::string failure{};        ///< why it cannot be used
  std::string way{};            ///< how bytes go there, as "io_uring, direct"; empty: not tried
};
Disk read_disk(const std::filesystem::path& root, const std::string& path);
/// Writes and reads a file of 8 MiB, and removes it.
void try_disk(Disk& disk);
/// `memory`: bytes of memory that are available.
Findings judge(const Disk& disk, int64_t memory);

// The network: doctor_links.cpp.

struct Interface {
  std::string name, state;
  int megabits = -1, mtu = 0;  ///< megabits a second; -1: not told
};
struct Links {
  std::vector<Interface> interfaces;  ///< without loopback
  std::vector<std::string> adapters;  ///< InfiniBand's
  std::string host;
  std::vector<std::string> addresses;  ///< of `host`, as this host sees them
  std::string chosen{}, refusal{};  ///< ZERO_INTERFACE or GLOO_SOCKET_IFNAME; why it cannot be used
  std::string transport{}, transport_refusal{};  ///< ZERO_TRANSPORT; why no job accepts it
  std::vector<std::string> plugins{};            ///< of MPIs, that are there
};
Links read_links(const std::filesystem::path& root, const comm::Lookup& variable);
Findings judge(const Links& links, int hosts);

// Files that the kernel writes: doctor_files.cpp.

/// Returns the first line of a file; empty where there is none.
std::string first_line(const std::filesystem::path& file);
/// Returns VALUE of the line "KEY: VALUE" or "KEY VALUE", where `key` includes the colon; empty
/// where there is no such line.
std::string value_of(const std::filesystem::path& file, const std::string& key);
/// Returns the number at the front of `text`.
std::optional<int64_t> number(const std::string& text);
/// Returns the numbers of a list: 0 1 2 5 of "0-2,5".
std::vector<int> numbers(const std::string& list);
/// Returns the word in brackets: "madvise" of "always [madvise] never".
std::string chosen_word(const std::string& line);
/// Returns this process's cgroup of `controller` and those above it, of version 1 or 2.
std::vector<std::filesystem::path> groups_of(const std::filesystem::path& root,
                                             const std::string& controller);

}  // namespace zero::app::checkup
