// Cores, the threads that are to run on them, and memory.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>

#include "apps/zero/doctor_checks.h"
#include "zero/base/error.h"
#include "zero/base/memory_limit.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

std::string counted(int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string bytes(int64_t count) { return format_bytes(static_cast<double>(count)); }

int online_cores(const fs::path& root) {
  return std::max(1, count_of(first_line(root / "sys/devices/system/cpu/online")));
}

// Returns how many cores this process may use.
int allowed_cores(const fs::path& root) {
  const int allowed = count_of(value_of(root / "proc/self/status", "Cpus_allowed_list:"));
  return allowed > 0 ? allowed : online_cores(root);
}

// Returns how many cores' time the cgroups grant; nothing where they set no quota.
std::optional<double> quota_of(const fs::path& root) {
  std::optional<double> least;
  for (const auto& group : cgroups_of("cpu", root)) {
    const auto text = first_line(group / "cpu.max");  // "QUOTA PERIOD", or "max PERIOD"
    auto quota = number(text);
    auto period = number(text.substr(std::min(text.size(), text.find(' '))));
    if (!quota) {
      quota = number(first_line(group / "cpu.cfs_quota_us"));
      period = number(first_line(group / "cpu.cfs_period_us"));
    }
    if (!quota || *quota <= 0 || period.value_or(0) <= 0) continue;
    const auto cores = static_cast<double>(*quota) / static_cast<double>(*period);
    least = std::min(cores, least.value_or(cores));
  }
  return least;
}

// Returns OMP_NUM_THREADS; nothing where it is not set.
std::optional<int> threads_from(const comm::Lookup& variable) {
  const auto text = variable("OMP_NUM_THREADS");
  if (!text || text->empty()) return std::nullopt;
  const auto threads = number(*text);  // "4,2" has a number for each level of nesting
  if (!threads || *threads < 1)
    throw ConfigError(
        fmt::format("OMP_NUM_THREADS is '{}'; it should be a number above 0.", *text));
  return static_cast<int>(*threads);
}

// Returns the OpenMP libraries that this process has loaded.
std::set<std::string> openmp_libraries(const fs::path& root) {
  std::set<std::string> libraries;
  std::ifstream maps(root / "proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto name = line.substr(line.rfind('/') + 1);
    for (const std::string library : {"libgomp", "libiomp5", "libomp"}) {
      if (name.starts_with(library + ".") || name.starts_with(library + "-"))
        libraries.insert(library);
    }
  }
  return libraries;
}

void check_huge_pages(Report& report, const fs::path& root) {
  const fs::path folder("sys/kernel/mm/transparent_hugepage");
  // The kernel puts the chosen word in brackets: "always [madvise] never".
  const auto chosen = [&](const char* file) {
    const auto line = first_line(root / folder / file);
    const auto begin = line.find('[');
    return begin == std::string::npos ? std::string("none")
                                      : line.substr(begin + 1, line.find(']') - begin - 1);
  };
  const auto enabled = chosen("enabled"), shared = chosen("shmem_enabled");
  const bool off = value_of(root / "proc/self/status", "THP_enabled:") == "0";
  const bool never = enabled == "never" || enabled == "none";
  report.check(!off && !never && shared != "deny", Mark::advice, "huge pages",
               fmt::format("{}, shared {}", enabled, shared),
               off ? "Start without what switches huge pages off for this process (prctl "
                     "PR_SET_THP_DISABLE: some container runtimes and job managers)."
                   : fmt::format("Set /{}/{}, as root, on the machine itself.", folder.string(),
                                 never ? "enabled to madvise" : "shmem_enabled to advise"),
               "Memory comes in pages of 4 KiB, each of which costs what a page of 2 MiB would.");
}

}  // namespace

int threads_of(const fs::path& root, const comm::Lookup& variable, int ranks) {
  return threads_from(variable).value_or(std::max(1, allowed_cores(root) / ranks));
}

void check_cores(Report& report, const fs::path& root, const comm::Lookup& variable, int ranks) {
  report.begin("cores");
  const int online = online_cores(root), allowed = allowed_cores(root);
  report.ok("available", allowed == online
                             ? counted(online, "core")
                             : fmt::format("{} of {}", allowed, counted(online, "core")));
  const auto quota = quota_of(root);
  const double usable = std::min<double>(allowed, quota.value_or(allowed));
  report.check(
      usable >= allowed, Mark::advice, "cgroup quota",
      quota ? fmt::format("the time of {:.2f} cores", *quota) : std::string("none"),
      "Raise the container's quota (docker --cpus, Kubernetes' limits.cpu), or remove it.",
      fmt::format("The time of {:.2f} of {} cores is not to be had, and threads that have used "
                  "theirs up stand still, mostly in the middle of a step.",
                  allowed - usable, allowed));

  const auto set = threads_from(variable);
  const int threads = threads_of(root, variable, ranks);
  const int fitting = std::max(1, static_cast<int>(usable / ranks));
  const auto value =
      fmt::format("{} x {} ({})", counted(ranks, "rank"), counted(threads, "thread"),
                  set          ? fmt::format("OMP_NUM_THREADS={}", threads)
                  : ranks == 1 ? "OMP_NUM_THREADS is not set: one for each core"
                               : "OMP_NUM_THREADS is not set: `zero launch` and `zero train` set "
                                 "this, mpirun and srun do not");
  const auto fit = fmt::format("Set OMP_NUM_THREADS={}.", fitting);
  if (ranks * threads > std::ceil(usable)) {
    report.check(false, Mark::problem, "threads", value,
                 ranks > usable
                     ? fmt::format("Start at most {}{}.",
                                   counted(std::max(1, static_cast<int>(usable)), "rank"),
                                   threads > 1 ? ", with OMP_NUM_THREADS=1" : "")
                     : fit,
                 fmt::format("{} take turns on {:.2f} cores, and every loop waits for the last of "
                             "them.",
                             counted(int64_t{ranks} * threads, "thread"), usable));
  } else {
    report.check(!set || threads >= fitting, Mark::advice, "threads", value, fit,
                 fmt::format("Usable cores without a thread: {} of {}.",
                             static_cast<int>(usable) - ranks * threads, static_cast<int>(usable)));
  }
  const auto libraries = openmp_libraries(root);
  report.check(libraries.size() < 2, Mark::problem, "OpenMP",
               libraries.empty() ? "none" : fmt::format("{}", fmt::join(libraries, ", ")),
               "Load one of them only: start without LD_PRELOAD of another, and link the program "
               "to that which LibTorch brings.",
               "Each has its threads, so loops of the one and of the other use twice as many as "
               "there are cores.");
}

void check_memory(Report& report, const fs::path& root, int ranks) {
  constexpr double kOfParameter = 16;  // bytes in bf16: 2 + 2 + 12, docs/architecture.md
  report.begin("memory");
  const auto limit = available_memory(root);
  const auto of_a_rank = number(value_of(root / "proc/self/status", "RssAnon:")).value_or(0) << 10;
  const auto left = limit.available - ranks * of_a_rank;
  report.check(left > 0, Mark::problem, "available",
               fmt::format("{} of {}; bf16 states of {:.2f}e9 parameters would fill it",
                           bytes(limit.available), limit.reason,
                           std::max(0.0, static_cast<double>(left) / kOfParameter * 1e-9)),
               fmt::format("Free memory, raise the limit, or start fewer than {} ranks.", ranks),
               fmt::format("{} ranks take {} each before they have a model (this process does), "
                           "which is more than there is.",
                           ranks, bytes(of_a_rank)));
  const auto overcommit = first_line(root / "proc/sys/vm/overcommit_memory");
  report.check(overcommit != "2", Mark::advice, "overcommit",
               fmt::format("vm.overcommit_memory={}", overcommit),
               "Set vm.overcommit_memory=0 (sysctl, as root).",
               "Addresses that are only reserved count as memory, so the host allocator's range "
               "of addresses is bound to be cut down, and large blocks to be refused while there "
               "is memory.");
  check_huge_pages(report, root);
}

}  // namespace zero::app::checkup
