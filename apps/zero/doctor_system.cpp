// Limits of this process, and what the kernel lets ranks do with each other and with files.
#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>

#include <liburing.h>

#include "apps/zero/doctor_checks.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/comm/arena.h"
#include "zero/comm/rendezvous.h"
#include "zero/comm/shm_control.h"
#include "zero/store/file.h"
#include "zero/store/queue.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

// Returns the limits that are finite, by their names in /proc/self/limits.
std::map<std::string, int64_t> soft_limits(const fs::path& root) {
  std::map<std::string, int64_t> limits;
  std::ifstream lines(root / "proc/self/limits");
  for (std::string line; std::getline(lines, line);) {
    constexpr size_t kName = 26;  // the kernel pads names so
    if (line.size() <= kName || !line.starts_with("Max ")) continue;
    auto name = line.substr(0, kName);
    name.erase(name.find_last_not_of(' ') + 1);
    if (const auto soft = number(line.substr(kName))) limits[name] = *soft;
  }
  for (const auto& group : cgroups_of("pids", root)) {
    const auto most = number(first_line(group / "pids.max"));
    if (!most) continue;
    const auto left = *most - number(first_line(group / "pids.current")).value_or(0);
    auto& processes = limits.try_emplace("Max processes", left).first->second;
    processes = std::min(processes, left);
  }
  return limits;
}

// Returns why ranks would not find each other in a folder of the machine; "" where they would.
std::string try_meeting(const fs::path& folder) {
  try {
    (void)comm::rendezvous_folder();
  } catch (const Error& refused) {
    return refused.what();
  }
  return access(folder.c_str(), W_OK) == 0 ? "" : folder.string() + ": " + std::strerror(errno);
}

}  // namespace

void check_limits(Report& report, const fs::path& root, const Plan& plan, int threads) {
  report.begin("limits");
  const auto limits = soft_limits(root);
  // Adds a line, which is ok where there is no limit or it is at least `needed`.
  const auto check = [&](const char* limit, const char* name, int64_t needed, Mark mark,
                         std::string change, std::string cost) {
    const auto found = limits.find(limit);
    const bool none = found == limits.end();
    report.check(none || found->second >= needed, mark, name,
                 none ? "none" : fmt::format("{}", found->second), std::move(change),
                 std::move(cost));
  };
  // Counted in jobs of 1 to 8 ranks: 7 + N files in a rank, 19 + 3 N in the launcher, and one
  // thread beside those that compute. Links to other hosts, data and disks come on top.
  const int64_t files = 64 + 4 * int64_t{plan.ranks} + 16 * int64_t{plan.hosts};
  check("Max open files", "open files", files, Mark::problem,
        fmt::format("Raise it: ulimit -n {}.", files),
        fmt::format("The launcher and {} ranks of {} hosts may need {} in one process, and fail "
                    "where there are fewer.",
                    plan.ranks, plan.hosts, files));
  const int64_t processes = int64_t{plan.ranks} * (threads + 4) + 4;
  check("Max processes", "processes and threads", processes, Mark::problem,
        fmt::format("Raise it to {} or more: ulimit -u, or the cgroup's pids.max.", processes),
        fmt::format("{} ranks with {} threads each need about {}; the kernel refuses what is "
                    "beyond the limit.",
                    plan.ranks, threads, processes));
  std::error_code ignored;
  const bool infiniband = !fs::is_empty(root / "sys/class/infiniband", ignored) && !ignored;
  check("Max locked memory", "locked memory", infiniband ? INT64_MAX : 0, Mark::advice,
        "Raise it: ulimit -l unlimited.",
        "An MPI locks what it sends over InfiniBand, so ZERO_TRANSPORT=openmpi or mpich is bound "
        "to fail or to copy; over TCP it costs nothing.");
  check("Max file size", "file size", INT64_MAX, Mark::problem, "Lift it: ulimit -f unlimited.",
        "The ranks' shared memory is a file (of addresses, mostly) far beyond it, and so are "
        "states on disk and checkpoints: they are refused.");
  check("Max address space", "address space", INT64_MAX, Mark::problem,
        "Lift it: ulimit -v unlimited.",
        "libzero reserves addresses for several times the machine's memory; shared memory is "
        "refused, and the host allocator's range is cut.");
}

void check_sharing(Report& report, int ranks) {
  report.begin("system");
  const auto works = [&](const char* name, const std::string& value, const std::string& failure,
                         const char* change, const char* cost) {
    report.check(failure.empty(), Mark::problem, name, failure.empty() ? value : failure, change,
                 cost);
  };
  std::string failure;
  try {
    (void)comm::Mapping::create(
        comm::ArenaLayout::choose(ranks, comm::control_bytes(ranks), comm::physical_memory()));
  } catch (const Error& error) {
    failure = error.what();
  }
  works("shared memory", "memfd works, for all ranks' regions", failure,
        "Lift limits of file size and of addresses (ulimit -f, -v), and let the container's "
        "seccomp profile allow memfd_create.",
        "Ranks on this host cannot share memory, and a job of several does not start.");
  const Descriptor self(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  works("watching ranks", "pidfd_open works", self ? "" : std::strerror(errno),
        "Run Linux 5.3 or later, and let the container's seccomp profile allow pidfd_open.",
        "`zero launch` and `zero train` with several ranks fail at the start.");
  std::error_code error;
  const auto folder =
      fs::temp_directory_path(error) / fmt::format("libzero-{}", static_cast<int>(geteuid()));
  const bool before = error || fs::exists(folder, error);
  works("meeting place", folder.string(), try_meeting(folder),
        "Set TMPDIR to a folder that this user may write.",
        "Ranks that no launcher tells an address do not find each other.");
  if (!before) rmdir(folder.c_str());  // empty, or somebody else's by now
}

void check_uring(Report& report, int ranks) {
  const auto depth = store::FileOptions().queue_depth;
  std::vector<std::unique_ptr<store::Queue>> queues;
  while (std::ssize(queues) < ranks) {
    auto queue = store::uring_queue(depth);
    if (!queue) break;
    queues.push_back(std::move(queue));
  }
  const bool all = std::ssize(queues) == ranks;
  std::string value = fmt::format("works, {} queue{}", ranks, ranks == 1 ? "" : "s");
  if (!all) {
    io_uring ring{};
    const int error = -io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0);
    if (error <= 0) io_uring_queue_exit(&ring);
    value = fmt::format("refused after {} of {} queues: {}", queues.size(), ranks,
                        error > 0 ? std::strerror(error) : "too old a kernel");
  }
  report.check(all, Mark::advice, "io_uring", value,
               "Run Linux 5.6 or later with kernel.io_uring_disabled=0, let the container's "
               "seccomp profile allow io_uring_setup, io_uring_enter and io_uring_register, and "
               "raise the limit of locked memory (ulimit -l) before Linux 5.12.",
               "States on disk go by threads that read and write block after block; `zero bench "
               "nvme` measures how fast. Without states on disk it costs nothing.");
}

}  // namespace zero::app::checkup
