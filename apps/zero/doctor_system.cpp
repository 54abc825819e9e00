// Limits of this process, and what the kernel lets ranks do with each other and with files.
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>

#include <liburing.h>

#include "apps/zero/doctor_checks.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/comm/arena.h"
#include "zero/comm/rendezvous.h"
#include "zero/comm/shm_control.h"
#include "zero/store/file.h"
#include "zero/store/queue.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLimits = "limits";
constexpr const char* kSystem = "system";

std::string reason(int error) { return std::strerror(error); }

// Tries whether one process can hand a file to another, as ranks do with their shared memory.
std::string try_passing() {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    return "no unix socket: " + reason(errno);
  const Descriptor sender(ends[0]), receiver(ends[1]);
  const Descriptor file(dup(receiver.get()));  // any will do
  char byte = 'z';
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  auto* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = file.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(sender.get(), &message, 0) != 1) return "not sent: " + reason(errno);
  control.fill(0);
  message.msg_controllen = control.size();
  if (recvmsg(receiver.get(), &message, MSG_CMSG_CLOEXEC) != 1)
    return "not received: " + reason(errno);
  header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return "the file did not arrive";
  int passed = -1;
  std::memcpy(&passed, CMSG_DATA(header), sizeof passed);
  const Descriptor arrived(passed);
  return arrived ? "" : "the file did not arrive";
}

std::string try_watching() {
  const Descriptor self(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  return self ? "" : reason(errno);
}

}  // namespace

Limits read_limits(const fs::path& root) {
  Limits limits;
  std::ifstream lines(root / "proc/self/limits");
  for (std::string line; std::getline(lines, line);) {
    constexpr size_t kName = 26;  // the kernel pads names so
    if (line.size() <= kName || !line.starts_with("Max ")) continue;
    auto name = line.substr(0, kName);
    name.erase(name.find_last_not_of(' ') + 1);
    if (const auto soft = number(line.substr(kName))) limits.soft[name] = *soft;
  }
  for (const auto& group : groups_of(root, "pids")) {
    const auto most = number(first_line(group / "pids.max"));
    if (!most) continue;
    const auto left = *most - number(first_line(group / "pids.current")).value_or(0);
    limits.processes = std::min(left, limits.processes.value_or(left));
  }
  int major = 0, minor = 0;
  const auto release = first_line(root / "proc/sys/kernel/osrelease");
  if (std::sscanf(release.c_str(), "%d.%d", &major, &minor) == 2)
    limits.kernel = 1000 * major + minor;
  std::error_code ignored;
  limits.infiniband = fs::exists(root / "sys/class/infiniband", ignored) &&
                      !fs::is_empty(root / "sys/class/infiniband", ignored);
  return limits;
}

Findings judge(const Limits& limits, const Plan& plan, int threads) {
  // Counted in jobs of 1 to 8 ranks: 7 + N files in a rank, 19 + 3 N in the launcher, and one
  // thread beside those that compute. Links to other hosts, data and disks come on top.
  const int64_t files = 64 + 4 * int64_t{plan.ranks} + 16 * int64_t{plan.hosts};
  const int64_t processes = int64_t{plan.ranks} * (threads + 4) + 4;
  const auto soft = [&](const char* name) -> std::optional<int64_t> {
    const auto found = limits.soft.find(name);
    if (found == limits.soft.end()) return std::nullopt;
    return found->second;
  };
  const auto of_bytes = [](std::optional<int64_t> bytes) {
    return bytes ? format_bytes(static_cast<double>(*bytes)) : std::string("none");
  };
  const auto of_count = [](std::optional<int64_t> count) {
    return count ? fmt::format("{}", *count) : std::string("none");
  };
  Findings all;

  const auto open = soft("Max open files");
  const auto open_line = fine(kLimits, "open files", of_count(open));
  all.push_back(
      open.value_or(files) >= files
          ? open_line
          : problem(open_line, fmt::format("Raise it: ulimit -n {}.", files),
                    fmt::format("The launcher and {} ranks of {} hosts may need {} in one "
                                "process, and fail where there are fewer.",
                                plan.ranks, plan.hosts, files)));

  auto started = soft("Max processes");
  if (limits.processes) started = std::min(*limits.processes, started.value_or(*limits.processes));
  const auto started_line = fine(kLimits, "processes and threads", of_count(started));
  all.push_back(
      started.value_or(processes) >= processes
          ? started_line
          : problem(started_line,
                    fmt::format("Raise it to {} or more: ulimit -u, or the cgroup's pids.max.",
                                processes),
                    fmt::format("{} ranks with {} threads each need about {}; the kernel refuses "
                                "what is beyond the limit.",
                                plan.ranks, threads, processes)));

  const auto locked = soft("Max locked memory");
  const auto locked_line = fine(kLimits, "locked memory", of_bytes(locked));
  constexpr int64_t kRing = 8 << 10;  // a queue of 32: a page of entries, and two of rings
  constexpr int kOwnAccount = 5012;   // from Linux 5.12 on the memory cgroup counts rings
  if (locked && limits.infiniband) {
    all.push_back(advice(locked_line, "Raise it: ulimit -l unlimited.",
                         "An MPI locks what it sends over InfiniBand, so ZERO_TRANSPORT=openmpi or "
                         "mpich is bound to fail or to copy; over TCP it costs nothing."));
  } else if (locked && limits.kernel != 0 && limits.kernel < kOwnAccount &&
             *locked < 16 * kRing * plan.ranks) {
    all.push_back(advice(
        locked_line,
        fmt::format("Raise it: ulimit -l {}, or run Linux 5.12 or later.",
                    16 * kRing * plan.ranks >> 10),
        fmt::format("On this kernel the queues of io_uring of all processes of this user share it: "
                    "{} fit. Beyond them states on disk are bound to go by threads.",
                    *locked / kRing)));
  } else {
    auto line = locked_line;
    line.value += " (libzero locks no memory)";
    all.push_back(line);
  }

  const auto file = soft("Max file size");
  const auto file_line = fine(kLimits, "file size", of_bytes(file));
  all.push_back(!file ? file_line
                      : problem(file_line, "Lift it: ulimit -f unlimited.",
                                "The ranks' shared memory is a file (of addresses, mostly) far "
                                "beyond it, and so are states on disk and checkpoints: they are "
                                "refused."));

  const auto addresses = soft("Max address space");
  const auto addresses_line = fine(kLimits, "address space", of_bytes(addresses));
  all.push_back(!addresses
                    ? addresses_line
                    : problem(addresses_line, "Lift it: ulimit -v unlimited.",
                              "libzero reserves addresses for several times the machine's memory; "
                              "shared memory is refused, and the host allocator's range is cut."));
  return all;
}

Sharing try_sharing(int ranks) {
  Sharing sharing;
  try {
    (void)comm::Mapping::create(
        comm::ArenaLayout::choose(ranks, comm::control_bytes(ranks), comm::physical_memory()));
  } catch (const Error& error) {
    sharing.arena = error.what();
  }
  sharing.passing = try_passing();
  sharing.watching = try_watching();
  std::error_code error, ignored;
  const auto folder =
      fs::temp_directory_path(error) / fmt::format("libzero-{}", static_cast<int>(geteuid()));
  const bool before = error || fs::exists(folder, ignored);
  sharing.folder = folder.string();
  try {
    (void)comm::rendezvous_folder();
    if (access(folder.c_str(), W_OK) != 0) {
      sharing.meeting = fmt::format("{} cannot be written: {}. Set TMPDIR to another folder.",
                                    folder.string(), reason(errno));
    }
  } catch (const Error& refused) {
    sharing.meeting = refused.what();
  }
  if (!before) rmdir(folder.c_str());  // empty, or somebody else's by now
  return sharing;
}

Findings judge(const Sharing& sharing) {
  Findings all;
  const auto judged = [&](const char* name, const char* works, const std::string& failure,
                          const char* change, const char* cost) {
    if (failure.empty()) {
      all.push_back(fine(kSystem, name, works));
    } else {
      all.push_back(problem(fine(kSystem, name, failure), change, cost));
    }
  };
  judged("shared memory", "memfd works, for all ranks' regions", sharing.arena,
         "Lift limits of file size and of addresses (ulimit -f, -v), and let the container's "
         "seccomp profile allow memfd_create.",
         "Ranks on this host cannot share memory, and a job of several does not start.");
  judged("handing it on", "SCM_RIGHTS works", sharing.passing,
         "Let the container's seccomp profile, or AppArmor, allow unix sockets that pass files.",
         "Ranks on this host cannot share memory, and a job of several does not start.");
  judged("watching ranks", "pidfd_open works", sharing.watching,
         "Run Linux 5.3 or later, and let the container's seccomp profile allow pidfd_open.",
         "`zero launch` and `zero train` with several ranks fail at the start.");
  judged("meeting place", sharing.folder.c_str(), sharing.meeting,
         "Set TMPDIR to a folder that this user may write.",
         "Ranks that no launcher tells an address do not find each other.");
  return all;
}

Uring try_uring(const fs::path& root, int ranks) {
  Uring uring;
  uring.wanted = ranks;
  if (const auto value = number(first_line(root / "proc/sys/kernel/io_uring_disabled")))
    uring.sysctl = static_cast<int>(*value);
  const auto depth = store::FileOptions().queue_depth;
  std::vector<std::unique_ptr<store::Queue>> queues;
  for (int rank = 0; rank < ranks; ++rank) {
    auto queue = store::uring_queue(depth);
    if (queue) {
      queues.push_back(std::move(queue));
      continue;
    }
    io_uring ring{};
    uring.error = -io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0);
    if (uring.error <= 0) io_uring_queue_exit(&ring);
    break;
  }
  uring.opened = static_cast<int>(queues.size());
  return uring;
}

Findings judge(const Uring& uring) {
  const auto line = fine(
      kSystem, "io_uring",
      uring.opened == uring.wanted
          ? fmt::format("works, {} queue{}", uring.opened, uring.opened == 1 ? "" : "s")
          : fmt::format("refused{}: {}",
                        uring.opened > 0
                            ? fmt::format(" after {} of {} queues", uring.opened, uring.wanted)
                            : std::string(),
                        uring.error > 0 ? reason(uring.error) : std::string("too old a kernel")));
  if (uring.opened == uring.wanted) return {line};
  std::string change;
  if (uring.sysctl.value_or(0) == 2) {
    change = "Set kernel.io_uring_disabled=0 (sysctl, as root).";
  } else if (uring.sysctl.value_or(0) == 1) {
    change =
        "Set kernel.io_uring_disabled=0 (sysctl, as root), or put this user into the group of "
        "kernel.io_uring_group.";
  } else if (uring.error == ENOMEM) {
    change = "Raise the limit of locked memory (ulimit -l).";
  } else if (uring.error == EPERM || uring.error == ENOSYS) {
    change =
        "Let the container's seccomp profile allow io_uring_setup, io_uring_enter and "
        "io_uring_register; Linux 5.6 is the first that has all libzero needs.";
  } else {
    change = "Run Linux 5.6 or later.";
  }
  return {advice(line, change,
                 "States on disk go by threads that read and write block after block; `zero bench "
                 "nvme` measures how fast. Without states on disk it costs nothing.")};
}

}  // namespace zero::app::checkup
