// `zero doctor`: what it looks at, one file a subject.
//
// Note [Facts and findings]
// A check is two functions. The one reads or measures facts, from files under a `root` where the
// kernel tells them in files: a folder that plays /proc and /sys will do. The other makes findings
// of facts, and looks at nothing else. So tests can make every finding appear, on any machine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/comm/job.h"

namespace zero::app::checkup {

/// advice: it costs something. problem: training fails, or is so slow that nobody can want it.
enum class Mark : uint8_t { ok, advice, problem };

/// A line of the report. What is not ok has a sentence that says what to change, and one that says
/// what it costs now.
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
  /// What the threads may use at a time.
  double usable() const;
  /// Threads of each of `ranks` ranks: OMP_NUM_THREADS, or what `zero launch` sets without it.
  int threads_of(int ranks) const;
  /// The most that fit: at least 1.
  int fitting_threads(int ranks) const;
};
/// Throws ConfigError where OMP_NUM_THREADS is not a number.
Cores read_cores(const std::filesystem::path& root, const comm::Lookup& variable);

/// Short parallel loops that all ranks together do in a second: with the threads that they would
/// have, and with as many as fit.
struct LoopRates {
  double asked = 0, fitting = 0;
};
/// Starts `ranks` processes for less than a second. Nothing where this process has threads already
/// (it could not fork), or where there are more than a few hundred threads to start.
std::optional<double> measure_loops(int ranks, int threads);
/// Nothing where the threads fit.
std::optional<LoopRates> measure_loops(const Cores& cores, int ranks);
Findings judge(const Cores& cores, int ranks, const std::optional<LoopRates>& rates);

struct Clock {
  std::string source;                ///< the kernel's, as "tsc"
  double nanoseconds = 0;            ///< of a reading
  std::string driver{}, governor{};  ///< of frequencies; empty where the system does not tell
  double megahertz = 0, most_megahertz = 0;  ///< of core 0; 0: not told
};
Clock read_clock(const std::filesystem::path& root);
Findings judge(const Clock& clock);

// Vector instructions and LibTorch: doctor_libraries.cpp.

struct Vectors {
  std::string processor;
  std::vector<std::string> sets;  ///< of those that matter here: "avx2", "avx512_bf16", ...
  std::string kernels;            ///< the set that libzero's kernels take, by Highway's name
  std::string libtorch;           ///< the one that LibTorch's operators take
  double fp32 = 0, bf16 = 0;      ///< 1e9 operations a second of matrix products
};
Vectors read_vectors(const std::filesystem::path& root);
Findings judge(const Vectors& vectors);

struct LibTorch {
  std::string version;
  std::string backend;                ///< of at::parallel_for: "OpenMP"
  int threads = 1, took_part = 1;     ///< of a loop over all threads: those that did
  std::vector<std::string> runtimes;  ///< OpenMP's, loaded in this process
};
LibTorch read_libtorch(const std::filesystem::path& root);
Findings judge(const LibTorch& library);

/// Names of the devices.
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

/// GB/s, and which part of the memory did come in huge pages.
struct Touch {
  double huge = 0, small = 0;
  double share = 0;
};
struct HugePages {
  std::string enabled, shared;  ///< the chosen words of `enabled` and `shmem_enabled`
  bool switched_off = false;    ///< for this process (PR_SET_THP_DISABLE)
  /// Of the host allocator's kind of memory (touched for the first time), and of a block of the
  /// shared arena (read by another process); nothing where that could not be tried.
  std::optional<Touch> own{}, arena{};
};
HugePages read_huge_pages(const std::filesystem::path& root);
/// Takes some 100 MiB for a moment.
void measure(HugePages& pages);
Findings judge(const HugePages& pages);

struct Nodes {
  std::map<int, std::vector<int>> cores;  ///< of each node, those that this process may use
  std::optional<double> near{}, far{};    ///< GB/s of one core's reads
};
Nodes read_nodes(const std::filesystem::path& root);
void measure(Nodes& nodes);
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

/// Each empty where it works, or why it does not.
struct Sharing {
  std::string arena, passing, watching, meeting;
  std::string folder{};  ///< of the meeting
};
Sharing try_sharing(int ranks);
Findings judge(const Sharing& sharing, const std::filesystem::path& root);

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
  std::string failure{};        ///< why nothing could be measured
  std::string way{};            ///< as "io_uring, direct"
  double write = 0, read = 0;   ///< GB/s
  int64_t measured = 0;         ///< bytes
};
Disk read_disk(const std::filesystem::path& root, const std::string& path);
/// Writes and reads a file of at most 256 MiB for some seconds, and removes it.
void measure(Disk& disk);
/// `memory`: bytes that are available of it.
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

/// Empty where there is none.
std::string first_line(const std::filesystem::path& file);
/// Of the line "KEY: VALUE" or "KEY VALUE", with `key` up to and with its colon; empty where there
/// is none.
std::string value_of(const std::filesystem::path& file, const std::string& key);
/// A number at the front of `text`.
std::optional<int64_t> number(const std::string& text);
/// "0-2,5" -> 0 1 2 5.
std::vector<int> numbers(const std::string& list);
/// "always [madvise] never" -> "madvise".
std::string chosen_word(const std::string& line);
/// This process's group of `controller` and those above it, of cgroups of version 1 or 2.
std::vector<std::filesystem::path> groups_of(const std::filesystem::path& root,
                                             const std::string& controller);

}  // namespace zero::app::checkup
