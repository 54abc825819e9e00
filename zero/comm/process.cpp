#include "zero/comm/process.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

namespace zero::comm {
namespace {

std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Blanks and line ends would confuse the text in which ranks name their hosts.
std::string host_name() {
  const char* said = std::getenv(kHostVariable);
  auto name =
      said != nullptr && *said != '\0' ? std::string(said) : line_of("/proc/sys/kernel/hostname");
  for (char& c : name) {
    if (std::isgraph(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

}  // namespace

std::optional<uint64_t> start_time(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto name_end = text.rfind(')');  // the name may hold anything, also line ends
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  char state = 0;
  fields >> state;
  if (state == 'Z' || state == 'X') return std::nullopt;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;  // see proc(5): starttime is field 22
  uint64_t start = 0;
  return fields >> start ? std::optional(start) : std::nullopt;
}

Process Process::self() {
  Process self;
  self.pid = getpid();
  self.start_time = comm::start_time(self.pid).value_or(0);
  self.host = host_name();
  self.machine = line_of("/proc/sys/kernel/random/boot_id") + " " + self.host;
  // A process in another process-id namespace cannot be watched, and one in another network
  // namespace cannot get the memory.
  for (const char* name : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    std::error_code none;
    self.machine += " " + std::filesystem::read_symlink(name, none).string();
  }
  return self;
}

ProcessWatch::ProcessWatch(const Process& process)
    : process_(process), self_(process.pid == getpid()) {
  if (self_) return;
  pidfd_ =
      Descriptor(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(process_.pid), 0)));
  // The number may have gone to another process before the descriptor was there.
  gone_at_first_ = start_time(process_.pid) != process_.start_time;
}

bool ProcessWatch::dead() const {
  if (self_) return false;
  if (gone_at_first_) return true;
  if (pidfd_) {
    pollfd poll_it{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    return poll(&poll_it, 1, 0) > 0;
  }
  return start_time(process_.pid) != process_.start_time;  // a kernel without pidfd_open
}

}  // namespace zero::comm
