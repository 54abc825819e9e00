#include "zero/comm/shm_meeting.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/token.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

// The mappings of this process by their group's nonce, so that ranks that are threads of one
// process share one.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Mapping>> mappings;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

// Makes an abstract unix socket's address: no file, gone with its descriptor. The nonce is a token.
std::pair<sockaddr_un, socklen_t> socket_address(const std::string& nonce) {
  const auto name = "libzero-" + nonce;
  ensure(name.size() < sizeof(sockaddr_un::sun_path), "a unix socket's name is too long");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

[[noreturn]] void throw_socket_error(std::string_view what) {
  throw CommError(fmt::format("Cannot pass the shared memory between ranks: {}: {}.", what,
                              std::strerror(errno)));
}

void send_descriptor(int socket, int fd) {
  char byte = 'z';
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  auto* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  // If a peer has died meanwhile, its absence shows it.
  [[maybe_unused]] const auto sent = sendmsg(socket, &message, MSG_NOSIGNAL);
}

// Receives a descriptor; returns none if the message brought none or several.
Descriptor receive_descriptor(int socket) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) <= 0) return Descriptor();
  const auto* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
    return Descriptor();
  std::array<int, 2> fds{-1, -1};  // the alignment of `control` leaves room for a second
  std::memcpy(fds.data(), CMSG_DATA(header),
              std::min<size_t>(header->cmsg_len - CMSG_LEN(0), sizeof fds));
  Descriptor file(fds[0]);
  const Descriptor other(fds[1]);
  return other || (message.msg_flags & MSG_CTRUNC) != 0 ? Descriptor() : std::move(file);
}

// Asks the kernel who is at the other end of a unix socket.
ucred peer_of(int socket) {
  ucred peer{.pid = -1, .uid = static_cast<uid_t>(-1), .gid = static_cast<gid_t>(-1)};
  socklen_t length = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) peer.pid = -1;
  return peer;
}

// A rank posts this about itself.
std::string encode(const Process& process) {
  return fmt::format("{}\n{}\n{}\n{}", process.pid, process.start_time, process.host,
                     process.machine);
}

constexpr size_t kLongestName = 1024;  // the longest name of a host or a machine

Process decode(const std::string& text, int rank) {
  Process process;
  std::istringstream lines(text);
  lines >> process.pid >> process.start_time;
  lines.ignore();
  std::getline(lines, process.host);
  std::getline(lines, process.machine);
  if (!lines || process.pid <= 0 || process.pid > std::numeric_limits<pid_t>::max() ||
      process.host.size() > kLongestName || process.machine.size() > kLongestName) {
    throw CommError(
        fmt::format("What the job's store says about the process of rank {} is not what a rank "
                    "writes ({} bytes). Does another program use the same store?",
                    rank, text.size()));
  }
  return process;
}

class Meeter {
 public:
  Meeter(c10d::Store& store, int rank, int size, milliseconds timeout, std::vector<int> numbers)
      : store_(store),
        rank_(rank),
        size_(size),
        numbers_(std::move(numbers)),
        deadline_(deadline_after(timeout)),
        timeout_(timeout) {}

  Meeting run() {
    // A store may serve several groups, one after the other: each has its own generation of keys.
    const auto generation = store_.add(fmt::format("zero/comm/generation/{}", rank_), 1);
    prefix_ = fmt::format("zero/comm/{}/", generation);
    try {
      exchange_processes();
      check_hosts();
      return rank_ == 0 ? host() : join();
    } catch (const c10::Error& error) {
      throw CommError(fmt::format("Rank {} cannot meet the {} ranks of its group: {}{}",
                                  number(rank_), size_, error.what_without_backtrace(),
                                  dead_known()));
    } catch (const std::exception& error) {
      tell_failure(error.what());
      throw;
    }
  }

 private:
  // A rank's number in the job, for messages.
  int number(int rank) const {
    return numbers_.empty() ? rank : numbers_[static_cast<size_t>(rank)];
  }

  std::string key(const char* what, int rank) const {
    return fmt::format("{}{}/{}", prefix_, what, rank);
  }

  void tell_failure(const char* message) noexcept {
    try {
      store_.set(key("failure", rank_), std::string(message));
    } catch (...) {  // then the peers find this rank dead, or time out
    }
  }

  std::string dead_known() const {
    std::string text;
    for (const auto& [r, watch] : watches_) {
      if (watch.dead()) {
        const auto& process = processes_.at(r);
        text +=
            fmt::format(" Rank {} (pid {}, host {}) died.", number(r), process.pid, process.host);
      }
    }
    return text;
  }

  // Looks once at the others while this rank waits for `awaited` in the store.
  void check_others(const std::string& awaited) {
    if (const auto dead = dead_known(); !dead.empty()) {
      throw CommError(
          fmt::format("Rank {} was making the shared-memory group of {} ranks, waiting for {}.{}",
                      number(rank_), size_, awaited, dead));
    }
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || !store_.check({key("failure", r)})) continue;
      throw CommError(fmt::format("Rank {} failed while the shared-memory group was made: {}",
                                  number(r), store_.get_to_str(key("failure", r))));
    }
    if (Clock::now() >= deadline_) {
      throw CommError(
          fmt::format("Timed out after {} ms: rank {} was making the shared-memory group of {} "
                      "ranks and still waits for {}.",
                      timeout_.count(), number(rank_), size_, awaited));
    }
  }

  // Waits for the value of a key that another rank sets.
  std::string wait_for(const std::string& which, const std::string& awaited) {
    auto next_check = Clock::now() + milliseconds(100);
    for (milliseconds pause(1);; pause = std::min(pause * 2, milliseconds(20))) {
      if (store_.check({which})) return store_.get_to_str(which);
      if (Clock::now() >= std::min(next_check, deadline_)) {
        check_others(awaited);
        next_check = Clock::now() + milliseconds(100);
      }
      std::this_thread::sleep_for(pause);
    }
  }

  void exchange_processes() {
    store_.set(key("process", rank_), encode(Process::self()));
    std::set<int> missing;
    for (int r = 0; r < size_; ++r) missing.insert(r);
    auto next_check = Clock::now() + milliseconds(100);
    for (milliseconds pause(1);; pause = std::min(pause * 2, milliseconds(20))) {
      for (auto r = missing.begin(); r != missing.end();) {
        if (!store_.check({key("process", *r)})) {
          ++r;
          continue;
        }
        const auto process = decode(store_.get_to_str(key("process", *r)), number(*r));
        // Only processes of this host can be looked at.
        if (process.machine == Process::self().machine) watches_.emplace(*r, ProcessWatch(process));
        processes_.emplace(*r, process);
        r = missing.erase(r);
      }
      if (missing.empty()) return;
      if (Clock::now() >= std::min(next_check, deadline_)) {
        std::vector<int> awaited;
        for (const int r : missing) awaited.push_back(number(r));
        check_others(fmt::format("rank {}", fmt::join(awaited, ", rank ")));
        next_check = Clock::now() + milliseconds(100);
      }
      std::this_thread::sleep_for(pause);
    }
  }

  void check_hosts() const {
    std::string table;
    bool differ = false;
    for (const auto& [r, process] : processes_) {
      differ = differ || process.machine != processes_.at(0).machine;
      table += fmt::format("{}rank {} on {}", table.empty() ? "" : ", ", number(r), process.host);
    }
    if (differ) {
      throw CommError(
          fmt::format("The shared-memory group needs all its ranks on one host, in one process-id "
                      "namespace, but they are: {}. Start all ranks on one host, or use another "
                      "backend.",
                      table));
    }
  }

  std::unique_ptr<Peers> make_peers() const {
    std::vector<Process> processes;
    for (int r = 0; r < size_; ++r) processes.push_back(processes_.at(r));
    return std::make_unique<Peers>(rank_, std::move(processes), numbers_);
  }

  // Rank 0 makes the memory and hands it to every other process over a socket.
  Meeting host() {
    const auto nonce = random_token();
    Meeting meeting;
    meeting.mapping =
        Mapping::create(ArenaLayout::choose(size_, control_bytes(size_), physical_memory()));
    for (int i = 0; i < size_ * kLocalChannels; ++i) {
      new (meeting.mapping->at(static_cast<int64_t>(sizeof(RankSlot)) * i)) RankSlot;
    }
    meeting.peers = make_peers();
    meeting.peers->attach(meeting.mapping);
    {
      const std::lock_guard lock(registry().mutex);
      std::erase_if(registry().mappings, [](const auto& entry) { return entry.second.expired(); });
      registry().mappings[nonce] = meeting.mapping;
    }
    Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto [address, length] = socket_address(nonce);
    if (!listener ||
        bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        listen(listener.get(), size_) != 0) {
      throw_socket_error(fmt::format("rank {} cannot listen on a unix socket", number(0)));
    }
    store_.set(key("arena", 0),
               fmt::format("{} {} {}", nonce, meeting.mapping->layout().control_bytes,
                           meeting.mapping->layout().region_bytes));
    meeting.peers->own().joined.store(1, std::memory_order_release);
    futex_wake(&meeting.peers->own().joined);
    auto next_check = Clock::now() + milliseconds(100);
    for (std::string missing; !(missing = not_joined(*meeting.peers)).empty();) {
      pollfd ready{.fd = listener.get(), .events = POLLIN, .revents = 0};
      if (poll(&ready, 1, 5) > 0) {
        const Descriptor peer(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (peer && is_joiner(peer_of(peer.get())))
          send_descriptor(peer.get(), meeting.mapping->file());
      }
      if (Clock::now() >= std::min(next_check, deadline_)) {
        check_joining(*meeting.peers, missing);
        next_check = Clock::now() + milliseconds(100);
      }
    }
    return meeting;
  }

  Meeting join() {
    const auto said =
        wait_for(key("arena", 0), fmt::format("rank {} to make the memory", number(0)));
    std::istringstream text(said);
    std::string nonce;
    ArenaLayout layout;
    text >> nonce >> layout.control_bytes >> layout.region_bytes;
    layout.ranks = size_;
    if (!text || !is_token(nonce) || !layout.valid(control_bytes(size_))) {
      throw CommError(
          fmt::format("What the job's store says about the memory of rank {} is not what a rank of "
                      "this version writes ({} bytes). Do all ranks run the same program, and does "
                      "another one use the same store?",
                      number(0), said.size()));
    }
    Meeting meeting;
    if (processes_.at(0) == processes_.at(rank_)) {
      const std::lock_guard lock(registry().mutex);
      meeting.mapping = registry().mappings[nonce].lock();
      if (!meeting.mapping)
        throw CommError(
            fmt::format("Rank {} gave up while the shared-memory group was made.", number(0)));
    } else {
      meeting.mapping = open(receive(nonce), layout);
    }
    meeting.peers = make_peers();
    meeting.peers->attach(meeting.mapping);
    meeting.peers->own().joined.store(1, std::memory_order_release);
    futex_wake(&meeting.peers->own().joined);
    for (std::string missing; !(missing = not_joined(*meeting.peers)).empty();) {
      for (int r = 0; r < size_; ++r)
        futex_wait(&meeting.peers->slot(r).joined, 0, milliseconds(100));
      check_joining(*meeting.peers, missing);
    }
    return meeting;
  }

  // Returns true if the process at the other end is a rank that has not got the memory yet.
  bool is_joiner(const ucred& peer) const {
    return peer.uid == geteuid() && peer.pid != getpid() &&
           std::any_of(processes_.begin(), processes_.end(),
                       [&](const auto& entry) { return entry.second.pid == peer.pid; });
  }

  // Only rank 0's message is taken.
  void check_host(const ucred& peer, const std::string& nonce) const {
    if (peer.uid == geteuid() && peer.pid == processes_.at(0).pid) return;
    throw CommError(fmt::format(
        "Rank {} found process {} of user {} at the socket of rank {}, which is process {} of user "
        "{} (abstract socket libzero-{}); it takes no memory from there.",
        number(rank_), peer.pid, peer.uid, number(0), processes_.at(0).pid, geteuid(), nonce));
  }

  std::shared_ptr<Mapping> open(Descriptor file, const ArenaLayout& layout) const {
    try {
      return Mapping::open(std::move(file), layout);
    } catch (const CommError& error) {
      throw CommError(
          fmt::format("Rank {} passed what is not its memory. {}", number(0), error.what()));
    }
  }

  Descriptor receive(const std::string& nonce) {
    for (;;) {
      Descriptor socket_to_host(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      if (!socket_to_host) throw_socket_error("no unix socket can be made");
      const timeval patience{.tv_sec = 0, .tv_usec = 100'000};
      setsockopt(socket_to_host.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
      setsockopt(socket_to_host.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
      const auto [address, length] = socket_address(nonce);
      if (connect(socket_to_host.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) {
        check_host(peer_of(socket_to_host.get()), nonce);
        if (auto file = receive_descriptor(socket_to_host.get())) return file;
      } else if (errno == ECONNREFUSED) {
        std::this_thread::sleep_for(milliseconds(10));  // its end is reported below
      } else if (errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
        throw_socket_error(fmt::format("the unix socket of rank {} cannot be reached", number(0)));
      }
      check_others(fmt::format("rank {} to pass the memory", number(0)));
    }
  }

  // Calls check_others, whose result does not count once all have joined: ranks then go on, and may
  // end, and the store with them, before this one looks.
  void check_joining(const Peers& peers, const std::string& missing) {
    try {
      check_others(missing);
    } catch (...) {
      if (!not_joined(peers).empty()) throw;
    }
  }

  // Returns the ranks that have not mapped the memory yet, for a message; empty when all have.
  std::string not_joined(const Peers& peers) const {
    std::string missing;
    for (int r = 0; r < size_; ++r) {
      if (peers.slot(r).joined.load(std::memory_order_acquire) != 0) continue;
      missing += fmt::format("{}rank {} to map the memory", missing.empty() ? "" : ", ", number(r));
    }
    return missing;
  }

  c10d::Store& store_;
  int rank_;
  int size_;
  std::vector<int> numbers_;
  Clock::time_point deadline_;
  milliseconds timeout_;
  std::string prefix_;
  std::map<int, Process> processes_;
  std::map<int, ProcessWatch> watches_;
};

}  // namespace

Meeting meet(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout,
             std::vector<int> numbers) {
  return Meeter(store, rank, size, timeout, std::move(numbers)).run();
}

}  // namespace zero::comm
