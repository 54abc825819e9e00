// Cores, and the threads that are to run on them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "apps/zero/doctor_checks.h"
#include "zero/base/error.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCores = "cores";

// Returns how many cores' time a group may have; nothing where it sets no quota.
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

Findings judge(const Cores& cores, int ranks) {
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
        fmt::format("On average {:.2f} other processes want one of {}; training will be slower for "
                    "it.",
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
    const auto change =
        ranks > cores.usable()
            ? fmt::format("Start at most {}{}.",
                          counted(std::max(1, static_cast<int>(cores.usable())), "rank"),
                          threads > 1 ? ", with OMP_NUM_THREADS=1" : "")
            : fmt::format("Set OMP_NUM_THREADS={}.", fitting);
    all.push_back(
        problem(line, change,
                fmt::format("{} take turns on {:.2f} cores, and every loop waits for the "
                            "last of them.",
                            counted(int64_t{ranks} * threads, "thread"), cores.usable())));
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

}  // namespace zero::app::checkup
