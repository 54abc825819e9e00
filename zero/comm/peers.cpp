#include "zero/comm/peers.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "zero/base/error.h"

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

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
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

Watch::Watch(const Process& process) : process_(process), self_(process.pid == getpid()) {
  if (self_) return;
  pidfd_ =
      Descriptor(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(process_.pid), 0)));
  // The number may have gone to another process before the descriptor was there.
  gone_at_first_ = start_time(process_.pid) != process_.start_time;
}

bool Watch::dead() const {
  if (self_) return false;
  if (gone_at_first_) return true;
  if (pidfd_) {
    pollfd poll_it{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    return poll(&poll_it, 1, 0) > 0;
  }
  return start_time(process_.pid) != process_.start_time;  // a kernel without pidfd_open
}

Peers::Peers(int rank, std::vector<Process> processes, std::vector<int> numbers) : rank_(rank) {
  known_->numbers = std::move(numbers);
  known_->watches.reserve(processes.size());
  for (const auto& process : processes) known_->watches.emplace_back(process);
  known_->processes = std::move(processes);
  spins_ = size() <= usable_cores() ? 200 : 0;
}

void Peers::attach(std::shared_ptr<Mapping> mapping) { mapping_ = std::move(mapping); }

Peers Peers::on_channel(int channel) const {
  ensure(channel >= 0 && channel < kLocalChannels && mapping_ != nullptr,
         "ranks that have met have a few channels");
  Peers other = *this;
  other.channel_ = channel;
  return other;
}

RankSlot& Peers::slot(int rank) const {
  return *std::launder(
      reinterpret_cast<RankSlot*>(mapping_->at(slot_offset(rank, size(), channel_))));
}

RankSlot& Peers::being(int rank) const {
  return *std::launder(reinterpret_cast<RankSlot*>(mapping_->at(slot_offset(rank, size(), 0))));
}

void Peers::pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool Peers::troubled() const {
  if (!mapping_) return false;
  for (int r = 0; r < size(); ++r) {
    if (being(r).current_state() == RankState::failed) return true;
  }
  return false;
}

std::string Peers::who(int rank) const {
  const auto& process = known_->processes[static_cast<size_t>(rank)];
  return fmt::format("rank {} (pid {}, host {})", number(rank), process.pid, process.host);
}

std::string Peers::last_seen(int rank) const {
  if (!mapping_) return "it has not joined the group";
  const auto& there = slot(rank);
  const auto finished = there.finished.load(std::memory_order_acquire);
  const auto call = there.last_call();
  if (call.op != Op::none && finished < call.sequence) return "it is in " + call.describe();
  const auto doing = being(rank).activity.text();
  return (call.op == Op::none ? "it has not called any collective"
                              : "its last call was " + call.describe() + ", which it finished") +
         (doing.empty() ? "" : "; " + doing);
}

std::shared_ptr<ActivitySlot> Peers::own_activity() const {
  return {mapping_, &being(rank_).activity};
}

std::optional<Peers::Trouble> Peers::find_trouble(std::optional<int> awaited) const {
  for (int r = 0; r < size(); ++r) {
    if (known_->watches[static_cast<size_t>(r)].dead() &&
        (!mapping_ || being(r).current_state() == RankState::active)) {
      return Trouble{number(r), who(r) + " died"};
    }
  }
  if (!mapping_) return std::nullopt;
  std::optional<Trouble> follow_up;
  for (int r = 0; r < size(); ++r) {
    if (being(r).current_state() != RankState::failed) continue;
    const auto failure = being(r).failure.load();
    const bool known = failure.origin >= 0 && failure.origin <= std::numeric_limits<int>::max();
    Trouble trouble{known ? static_cast<int>(failure.origin) : number(r),
                    std::string(failure.message.view())};
    if (trouble.origin == number(r)) return trouble;
    follow_up = std::move(trouble);
  }
  if (follow_up) return follow_up;
  if (awaited && being(*awaited).current_state() == RankState::left) {
    return Trouble{number(*awaited),
                   fmt::format("{} left the group; {}", who(*awaited), last_seen(*awaited))};
  }
  return std::nullopt;
}

void Peers::check_failed(const Describe& doing) const {
  if (!troubled()) return;
  if (const auto trouble = find_trouble(std::nullopt)) fail(*trouble, doing);
}

void Peers::fail(const Trouble& trouble, const Describe& doing) const {
  std::string_view message = trouble.message;
  if (message.ends_with('.')) message.remove_suffix(1);
  throw PeerError(trouble.origin, trouble.message,
                  fmt::format("{}; rank {} was waiting in {}.", message, number(rank_), doing()));
}

void Peers::fail_timeout(int awaited, const Describe& doing) const {
  const auto behind = [&](int r) {
    if (!mapping_) return r == awaited;
    return static_cast<int32_t>(slot(r).ticks.load(std::memory_order_acquire) -
                                own().ticks.load(std::memory_order_relaxed)) < 0;
  };
  std::string missing;
  for (int r = 0; r < size(); ++r) {
    if (r != awaited && (r == rank_ || !behind(r))) continue;
    if (!missing.empty()) missing += "; ";
    missing += fmt::format("{} has not arrived: {}", who(r), last_seen(r));
  }
  const auto cause = fmt::format("Timed out: {}", missing);
  throw PeerError(number(rank_), cause,
                  fmt::format("{}; rank {} was waiting in {}.", cause, number(rank_), doing()));
}

void Peers::post_failure(int origin, std::string_view message) const noexcept {
  const std::lock_guard lock(known_->posting);
  auto& here = being(rank_);
  if (here.current_state() != RankState::active) return;
  Failure failure;
  failure.origin = origin;
  failure.message = FixedText<2040>(message);
  here.failure.store(failure);
  here.state.store(static_cast<uint32_t>(RankState::failed), std::memory_order_release);
  wake_waiters();
}

void Peers::post_left() const noexcept {
  const std::lock_guard lock(known_->posting);
  auto& here = being(rank_);
  if (here.current_state() != RankState::active) return;
  here.state.store(static_cast<uint32_t>(RankState::left), std::memory_order_release);
  wake_waiters();
}

void Peers::wake_waiters() const noexcept {
  for (int channel = 0; channel < kLocalChannels; ++channel) {
    auto* slot = reinterpret_cast<RankSlot*>(mapping_->at(slot_offset(rank_, size(), channel)));
    futex_wake(&std::launder(slot)->ticks);
  }
}

}  // namespace zero::comm
