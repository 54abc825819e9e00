// Cores, the threads that are to run on them, and clocks.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "apps/zero/doctor_checks.h"
#include "zero/base/error.h"
#include "zero/base/memory_mapping.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;
using Seconds = std::chrono::duration<double>;

constexpr const char* kCores = "cores";

// Cores' worth of time that a group may have; nothing where it sets no quota.
std::optional<double> quota_of(const fs::path& group) {
  const auto text = first_line(group / "cpu.max");  // "QUOTA PERIOD", or "max PERIOD"
  auto quota = number(text);
  auto period = number(text.substr(std::min(text.size(), text.find(' '))));
  if (!quota) {
    quota = number(first_line(group / "cpu.cfs_quota_us"));
    period = number(first_line(group / "cpu.cfs_period_us"));
  }
  if (!quota || *quota <= 0 || period.value_or(0) <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::string counted(int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

// Loops of a tenth of a millisecond of one core's work, as operators of small tensors are.
[[noreturn]] void run_loops(int threads, std::chrono::steady_clock::time_point end,
                            std::atomic_ref<int64_t> count) {
  constexpr int kSteps = 1 << 15;
  std::atomic<double> sink{0};
  at::set_num_threads(threads);
  while (std::chrono::steady_clock::now() < end) {
    at::parallel_for(0, kSteps, kSteps / threads, [&](int64_t first, int64_t last) {
      double sum = 1;
      for (int64_t i = first; i < last; ++i) sum = sum * 0.999 + static_cast<double>(i);
      sink.store(sum, std::memory_order_relaxed);
    });
    count.fetch_add(1);
  }
  std::_Exit(0);  // nothing of the parent's is to be undone here
}

}  // namespace

double Cores::usable() const {
  return std::min<double>(allowed, quota.value_or(static_cast<double>(allowed)));
}

int Cores::threads_of(int ranks) const { return threads.value_or(std::max(1, allowed / ranks)); }

int Cores::fitting_threads(int ranks) const {
  return std::max(1, static_cast<int>(usable() / ranks));
}

Cores read_cores(const fs::path& root, const comm::Lookup& variable) {
  Cores cores;
  const auto count = [](const std::string& list, int otherwise) {
    const auto all = numbers(list);
    return all.empty() ? otherwise : static_cast<int>(all.size());
  };
  cores.online = count(first_line(root / "sys/devices/system/cpu/online"), 1);
  cores.granted = cores.online;
  for (const auto& group : groups_of(root, "cpuset")) {
    for (const char* file : {"cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"})
      cores.granted = std::min(cores.granted, count(first_line(group / file), cores.granted));
  }
  cores.allowed = count(value_of(root / "proc/self/status", "Cpus_allowed_list:"), cores.granted);
  for (const auto& group : groups_of(root, "cpu")) {
    const auto quota = quota_of(group);
    if (quota) cores.quota = std::min(*quota, cores.quota.value_or(*quota));
  }
  cores.load = std::strtod(first_line(root / "proc/loadavg").c_str(), nullptr);
  if (const auto text = variable("OMP_NUM_THREADS"); text && !text->empty()) {
    const auto threads = number(*text);  // "4,2" has a number for each level of nesting
    if (!threads || *threads < 1) {
      throw ConfigError(
          fmt::format("OMP_NUM_THREADS is '{}'; it should be a number above 0.", *text));
    }
    cores.threads = static_cast<int>(*threads);
  }
  return cores;
}

std::optional<double> measure_loops(int ranks, int threads) {
  constexpr int kMostThreads = 512;
  constexpr Seconds kStart{0.1}, kLength{0.4};
  if (number(value_of("/proc/self/status", "Threads:")) != 1 || ranks * threads > kMostThreads)
    return std::nullopt;
  const MemoryMapping shared(
      {.bytes = sizeof(int64_t) * static_cast<size_t>(ranks), .shared = true});
  if (!shared) return std::nullopt;
  auto* counts = reinterpret_cast<int64_t*>(shared.data());
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::duration_cast<std::chrono::nanoseconds>(kStart + kLength);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) run_loops(threads, end, std::atomic_ref<int64_t>(counts[rank]));
    if (child > 0) children.push_back(child);
  }
  bool whole = children.size() == static_cast<size_t>(ranks);
  for (const auto child : children) {
    int status = 0;
    whole &= waitpid(child, &status, 0) == child && status == 0;
  }
  if (!whole) return std::nullopt;
  int64_t loops = 0;
  for (int rank = 0; rank < ranks; ++rank) loops += counts[rank];
  return static_cast<double>(loops) / (kStart + kLength).count();
}

std::optional<LoopRates> measure_loops(const Cores& cores, int ranks) {
  const int threads = cores.threads_of(ranks);
  if (ranks * threads <= std::ceil(cores.usable())) return std::nullopt;
  const int fitting_ranks = std::clamp(static_cast<int>(cores.usable()), 1, ranks);
  const auto asked = measure_loops(ranks, threads);
  const auto fitting = measure_loops(fitting_ranks, cores.fitting_threads(ranks));
  if (!asked || !fitting || *asked <= 0) return std::nullopt;
  return LoopRates{.asked = *asked, .fitting = *fitting};
}

Findings judge(const Cores& cores, int ranks, const std::optional<LoopRates>& rates) {
  Findings all;
  const auto available =
      fine(kCores, "available",
           cores.allowed == cores.online
               ? counted(cores.online, "core")
               : fmt::format("{} of {}", cores.allowed, counted(cores.online, "core")));
  if (cores.allowed < cores.granted) {
    all.push_back(advice(available,
                         "Start without the binding (taskset; mpirun --bind-to none; srun "
                         "--cpu-bind=none), unless each rank is meant to have these cores alone.",
                         fmt::format("Out of this process's reach: {} that it might use.",
                                     counted(cores.granted - cores.allowed, "core"))));
  } else {
    all.push_back(available);
  }
  const auto load = fine(kCores, "load", fmt::format("{:.2f} over the last minute", cores.load));
  constexpr double kIdle = 0.1;  // of the cores
  if (cores.load < std::max(1.0, kIdle * cores.online)) {
    all.push_back(load);
  } else {
    all.push_back(advice(
        load, "End what else runs, or leave it cores of its own (taskset).",
        fmt::format("On average {:.2f} other processes want one of {}; what is measured here is "
                    "slower for it, and training will be.",
                    cores.load, counted(cores.online, "core"))));
  }
  if (!cores.quota) {
    all.push_back(fine(kCores, "cgroup quota", "none"));
  } else {
    const auto line =
        fine(kCores, "cgroup quota", fmt::format("the time of {:.2f} cores", *cores.quota));
    if (*cores.quota >= cores.allowed) {
      all.push_back(line);
    } else {
      all.push_back(advice(
          line,
          "Raise the container's quota (docker --cpus, Kubernetes' limits.cpu), or remove it.",
          fmt::format("The time of {:.2f} of {} cores is not to be had, and threads that have used "
                      "theirs up stand still, mostly in the middle of a step.",
                      cores.allowed - *cores.quota, cores.allowed)));
    }
  }

  const int threads = cores.threads_of(ranks);
  const auto line =
      fine(kCores, "threads",
           fmt::format("{} x {} ({})", counted(ranks, "rank"), counted(threads, "thread"),
                       cores.threads ? fmt::format("OMP_NUM_THREADS={}", threads)
                       : ranks == 1  ? "OMP_NUM_THREADS is not set: one for each core"
                                     : "OMP_NUM_THREADS is not set: `zero launch` and `zero "
                                       "train` set this, mpirun and srun do not"));
  const int fitting = cores.fitting_threads(ranks);
  if (ranks * threads > std::ceil(cores.usable())) {
    constexpr double kNothing = 1.1;  // within what such short measurements say
    const bool loses = !rates || rates->fitting > kNothing * rates->asked;
    const auto shared = fmt::format("{} take turns on {:.2f} cores",
                                    counted(int64_t{ranks} * threads, "thread"), cores.usable());
    const auto cost =
        !rates  ? fmt::format("{} (not measured); every loop waits for the last of them.", shared)
        : loses ? fmt::format(
                      "Short parallel loops go {:.2f} times as fast with threads that fit: "
                      "{:.0f} a second instead of {:.0f} (measured).",
                      rates->fitting / rates->asked, rates->fitting, rates->asked)
                : fmt::format(
                      "{}: ranks wait for those whose turn it is not. Loops by themselves lose "
                      "nothing ({:.0f} a second, with threads that fit {:.0f}: measured).",
                      shared, rates->asked, rates->fitting);
    const auto change =
        ranks > cores.usable()
            ? fmt::format("Start at most {}{}.",
                          counted(std::max(1, static_cast<int>(cores.usable())), "rank"),
                          threads > 1 ? ", with OMP_NUM_THREADS=1" : "")
            : fmt::format("Set OMP_NUM_THREADS={}.", fitting);
    all.push_back(loses ? problem(line, change, cost) : advice(line, change, cost));
  } else if (cores.threads && threads < fitting) {
    all.push_back(advice(line, fmt::format("Set OMP_NUM_THREADS={}.", fitting),
                         fmt::format("Usable cores without a thread: {} of {}.",
                                     static_cast<int>(cores.usable()) - ranks * threads,
                                     static_cast<int>(cores.usable()))));
  } else {
    all.push_back(line);
  }
  return all;
}

Clock read_clock(const fs::path& root) {
  Clock clock;
  clock.source =
      first_line(root / "sys/devices/system/clocksource/clocksource0/current_clocksource");
  constexpr int kReadings = 20000;
  const auto start = std::chrono::steady_clock::now();
  auto last = start;
  for (int i = 0; i < kReadings; ++i) last = std::chrono::steady_clock::now();
  clock.nanoseconds = Seconds(last - start).count() * 1e9 / kReadings;
  const auto frequencies = root / "sys/devices/system/cpu/cpu0/cpufreq";
  clock.driver = first_line(frequencies / "scaling_driver");
  clock.governor = first_line(frequencies / "scaling_governor");
  const auto megahertz = [&](const char* file) {
    return static_cast<double>(number(first_line(frequencies / file)).value_or(0)) * 1e-3;
  };
  clock.megahertz = megahertz("scaling_cur_freq");
  clock.most_megahertz = megahertz("cpuinfo_max_freq");
  return clock;
}

Findings judge(const Clock& clock) {
  constexpr double kSlow = 200;  // a system call instead of an instruction
  Findings all;
  const auto reading =
      fine(kCores, "clock",
           fmt::format("{}, {:.0f} ns a reading", clock.source.empty() ? "unknown" : clock.source,
                       clock.nanoseconds));
  all.push_back(
      clock.nanoseconds < kSlow
          ? reading
          : advice(reading,
                   "Boot with clocksource=tsc, if /sys/devices/system/clocksource/clocksource0/"
                   "available_clocksource lists it; see dmesg for why the kernel has left it.",
                   fmt::format("Reading the time takes {:.0f} ns (measured) and mostly a system "
                               "call; waiting ranks do it all the time.",
                               clock.nanoseconds)));
  if (clock.governor.empty()) {
    all.push_back(fine(kCores, "frequency", "the system does not tell"));
    return all;
  }
  const auto frequency =
      fine(kCores, "frequency",
           fmt::format("{} by {}, {:.0f} of at most {:.0f} MHz just now", clock.governor,
                       clock.driver, clock.megahertz, clock.most_megahertz));
  // What intel_pstate and amd-pstate call powersave is the processor's own choice of a frequency.
  const bool lowest =
      clock.governor == "powersave" && clock.driver.find("pstate") == std::string::npos;
  all.push_back(!lowest ? frequency
                        : advice(frequency, "Run `cpupower frequency-set -g performance` as root.",
                                 fmt::format("Core 0 runs at {:.0f} % of its highest frequency.",
                                             100 * clock.megahertz / clock.most_megahertz)));
  return all;
}

}  // namespace zero::app::checkup
