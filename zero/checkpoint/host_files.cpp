#include "zero/checkpoint/host_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <list>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/base/thread.h"
#include "zero/checkpoint/file.h"
#include "zero/comm/gather_texts.h"
#include "zero/comm/job.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/socket.h"
#include "zero/comm/token.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

/// A peer that takes or gives nothing for so long is given up.
constexpr int kPatienceSeconds = 60;
constexpr size_t kChunk = size_t{1} << 20;
/// More connections at a time are refused: the ranks of the job make one or two.
constexpr size_t kMostConnections = 64;
constexpr size_t kLongestLine = 4096;

/// A connection that carries lines and files. Its functions throw CheckpointError.
class Stream {
 public:
  explicit Stream(Descriptor socket) : socket_(std::move(socket)) {
    fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) & ~O_NONBLOCK);
    const timeval patience{kPatienceSeconds, 0};
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
      setsockopt(socket_.get(), SOL_SOCKET, option, &patience, sizeof patience);
  }

  int fd() const { return socket_.get(); }

  void put(const void* data, size_t size) const {
    const auto* from = static_cast<const std::byte*>(data);
    while (size > 0) {
      const auto sent = ::send(socket_.get(), from, size, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) give_up();
      from += sent;
      size -= static_cast<size_t>(sent);
    }
  }
  void put_line(const std::string& text) const { put((text + "\n").data(), text.size() + 1); }
  void put_file(const InputFile& file) const {
    std::vector<std::byte> chunk(std::min<uint64_t>(kChunk, file.size()));
    for (uint64_t at = 0; at < file.size(); at += chunk.size()) {
      const auto size = static_cast<size_t>(std::min<uint64_t>(chunk.size(), file.size() - at));
      file.read_at(at, chunk.data(), size);
      put(chunk.data(), size);
    }
  }

  void end_writing() const { shutdown(socket_.get(), SHUT_WR); }
  /// Takes all that comes, so that the other side reads the answer before it sees the end.
  void drain() const {
    std::vector<std::byte> chunk(kChunk);
    while (::recv(socket_.get(), chunk.data(), chunk.size(), 0) > 0) {
    }
  }

  std::string line() const {
    std::string text;
    for (char c = 0; text.size() < kLongestLine; text += c) {
      take(&c, 1);
      if (c == '\n') return text;
    }
    throw CheckpointError("the other side sends no line");
  }
  void take_file(uint64_t bytes, OutputFile& file) const {
    std::vector<std::byte> chunk(kChunk);
    while (bytes > 0) {
      const auto size = static_cast<size_t>(std::min<uint64_t>(chunk.size(), bytes));
      take(chunk.data(), size);
      file.write(chunk.data(), size);
      bytes -= size;
    }
    file.commit();
  }

 private:
  void take(void* data, size_t size) const {
    auto* to = static_cast<std::byte*>(data);
    while (size > 0) {
      const auto got = ::recv(socket_.get(), to, size, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got == 0) throw CheckpointError("the connection ended");
      if (got < 0) give_up();
      to += got;
      size -= static_cast<size_t>(got);
    }
  }
  [[noreturn]] static void give_up() {
    const int error = errno;
    throw CheckpointError(error == EAGAIN ? fmt::format("nothing moved for {} s", kPatienceSeconds)
                                          : std::string(std::strerror(error)));
  }

  Descriptor socket_;
};

/// The request's line is "TOKEN VERB BYTES NAME".
constexpr std::string_view kPut = "put";
constexpr std::string_view kGet = "get";
/// The answer's is "ok BYTES", or "no REASON".
constexpr std::string_view kOk = "ok ";
constexpr std::string_view kNo = "no ";

uint64_t bytes_of(std::string_view text) {
  uint64_t bytes = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, bytes);
  if (error != std::errc() || stop != end) throw CheckpointError("the other side sends no number");
  return bytes;
}

/// Returns the bytes of an answer. Throws CheckpointError with the other side's reason.
uint64_t answer_of(const Stream& stream) {
  const auto line = stream.line();
  if (line.starts_with(kOk)) return bytes_of(std::string_view(line).substr(kOk.size()));
  throw CheckpointError(line.starts_with(kNo) ? line.substr(kNo.size()) : excerpt(line));
}

/// Returns whether a name stays below the folder.
bool is_below(std::string_view name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.' || c == '/';
  };
  return !name.empty() && name.front() != '/' && name.find("..") == std::string_view::npos &&
         std::all_of(name.begin(), name.end(), is_plain);
}

std::string own_address() {
  const auto job = comm::job_from_environment();
  return job.addresses.empty() ? "127.0.0.1" : comm::rail_address(job.addresses.front());
}

}  // namespace

/// Listens, and has a thread for each connection.
class HostFiles::Server {
 public:
  Server(const std::string& address, fs::path folder, std::string token)
      : folder_(std::move(folder)),
        token_(std::move(token)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    auto listener = comm::listen_at(address, 0);
    if (!listener.socket || !wake_) {
      throw CommError(fmt::format(
          "This rank cannot listen on '{}' for files of other hosts: {}. Is that an address of "
          "this host? ZERO_INTERFACE names the interface that joins the hosts.",
          address, listener.socket ? std::strerror(errno) : listener.reason));
    }
    listener_ = std::move(listener.socket);
    thread_ = start_thread<CommError>("files of other hosts", [this] { accept_all(); });
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server() {
    const uint64_t one = 1;
    [[maybe_unused]] const auto woken = write(wake_.get(), &one, sizeof one);
    thread_.join();
    {
      const std::lock_guard lock(mutex_);
      for (const int fd : open_) shutdown(fd, SHUT_RDWR);
    }
    for (auto& each : connections_) each.join();
  }

  uint16_t port() const { return comm::own_port(listener_); }

 private:
  void accept_all() {
    for (;;) {
      std::array<pollfd, 2> polled{{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}}};
      if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
      if (polled[0].revents != 0) return;
      Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) continue;
      join_ended();
      const std::lock_guard lock(mutex_);
      if (open_.size() >= kMostConnections) continue;
      open_.push_back(socket.get());
      try {
        connections_.emplace_back(
            [this, stream = Stream(std::move(socket))]() mutable { serve(std::move(stream)); });
      } catch (const std::system_error&) {  // the peer sees its connection end
        open_.pop_back();
      }
    }
  }

  void join_ended() {
    std::vector<std::thread::id> ended;
    {
      const std::lock_guard lock(mutex_);
      ended.swap(ended_);
    }
    connections_.remove_if([&](std::thread& each) {
      if (std::find(ended.begin(), ended.end(), each.get_id()) == ended.end()) return false;
      each.join();
      return true;
    });
  }

  void serve(Stream stream) {
    try {
      answer(stream);
    } catch (const std::exception&) {  // the peer sees its connection end
    }
    const std::lock_guard lock(mutex_);
    std::erase(open_, stream.fd());
    ended_.push_back(std::this_thread::get_id());
  }

  void answer(const Stream& stream) const {
    std::istringstream words(stream.line());
    std::string token, verb, bytes, name;
    words >> token >> verb >> bytes >> name;
    if (token != token_) return;
    try {
      if (!is_below(name)) throw CheckpointError(fmt::format("'{}' is no name", excerpt(name)));
      if (verb == kPut) {
        OutputFile file(folder_ / name, &fail<CheckpointError>);
        stream.take_file(bytes_of(bytes), file);
        stream.put_line("ok 0");
      } else {
        const InputFile file(folder_ / name, &fail<CheckpointError>);
        stream.put_line(fmt::format("ok {}", file.size()));
        stream.put_file(file);
      }
    } catch (const std::exception& error) {
      std::string reason = error.what();
      std::replace(reason.begin(), reason.end(), '\n', ' ');
      stream.drain();
      stream.put_line(std::string(kNo) + reason.substr(0, kLongestLine / 2));
    }
  }

  fs::path folder_;
  std::string token_;
  Descriptor wake_, listener_;
  std::mutex mutex_;
  std::vector<int> open_;               // sockets of the connections
  std::vector<std::thread::id> ended_;  // threads to join
  std::list<std::thread> connections_;  // of `thread_`, and of the destructor
  std::thread thread_;
};

HostFiles::HostFiles(comm::Group& group, fs::path folder) {
  constexpr const char* kLabel = "files for other hosts";
  token_ = comm::gather_texts(group, comm::random_token(), kLabel).front();
  const auto own = own_address();
  const auto address = comm::reachable_address(own, comm::gather_texts(group, own, kLabel));
  server_ = std::make_unique<Server>(address, std::move(folder), token_);
  const auto mine = fmt::format("{} {}", server_->port(), address);
  for (const auto& text : comm::gather_texts(group, mine, kLabel)) {
    Place place;
    std::istringstream(text) >> place.port >> place.address;
    places_.push_back(std::move(place));
  }
}

HostFiles::~HostFiles() = default;

namespace {

Stream open_stream(const std::string& address, uint16_t port) {
  std::string reason;
  auto socket = comm::connect_to(address, port, reason);
  if (!socket) throw CheckpointError(reason);
  return Stream(std::move(socket));
}

/// Runs `body`, and says in an error of which file it is.
template <class Body>
void naming(std::string_view what, const std::string& name, int rank, const std::string& address,
            const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    throw CheckpointError(fmt::format("Cannot {} {} {} the host of rank {} ({}): {}", what, name,
                                      what == "send" ? "to" : "from", rank, address, error.what()));
  }
}

}  // namespace

void HostFiles::send(int rank, const fs::path& file, const std::string& name) const {
  const auto& place = places_[static_cast<size_t>(rank)];
  naming("send", name, rank, place.address, [&] {
    const InputFile from(file, &fail<CheckpointError>);
    const auto stream = open_stream(place.address, place.port);
    stream.put_line(fmt::format("{} {} {} {}", token_, kPut, from.size(), name));
    stream.put_file(from);
    stream.end_writing();
    (void)answer_of(stream);
  });
}

void HostFiles::fetch(int rank, const std::string& name, const fs::path& to) const {
  const auto& place = places_[static_cast<size_t>(rank)];
  naming("fetch", name, rank, place.address, [&] {
    const auto stream = open_stream(place.address, place.port);
    stream.put_line(fmt::format("{} {} 0 {}", token_, kGet, name));
    stream.end_writing();
    const auto bytes = answer_of(stream);
    OutputFile file(to, &fail<CheckpointError>);
    stream.take_file(bytes, file);
  });
}

}  // namespace zero
