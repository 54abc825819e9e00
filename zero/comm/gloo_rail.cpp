#include "zero/comm/gloo_rail.h"

#include <ATen/Version.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "zero/base/broken_pipe.h"
#include "zero/base/error.h"
#include "zero/comm/agreement.h"
#include "zero/comm/deadline.h"
#include "zero/comm/job.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/watched_store.h"

namespace zero::comm {
namespace {

using c10d::ProcessGroupGloo;
using std::chrono::milliseconds;

constexpr const char* kTransportVariable = "GLOO_DEVICE_TRANSPORT";

// This file compiles Gloo's classes as that LibTorch's headers declare them.
void check_release() {
  const auto settings = at::show_config();
  constexpr std::string_view kKey = "TORCH_VERSION=";
  const auto begin = settings.find(kKey);
  if (begin == std::string::npos) return;
  const auto running = settings.substr(begin + kKey.size(), std::string_view(TORCH_VERSION).size());
  if (running != TORCH_VERSION) {
    throw CommError(fmt::format(
        "libzero was built with LibTorch {} and runs with {}; ranks on several hosts need the "
        "release that it was built with.",
        TORCH_VERSION, running));
  }
}

// Note [No encryption by Gloo]
// Gloo has a transport TCP_TLS, reads the certificates, and then makes its connections with the
// function that only its plain transport has overridden: with LibTorch 2.11.0 every byte goes over
// the network as it is, and a certificate of a stranger is accepted. A user who asks for encryption
// must not get that.
void check_transport() {
  const auto value = environment_variable(kTransportVariable).value_or("");
  if (value.empty() || value == "TCP") return;
  if (value == "TCP_TLS") {
    throw ConfigError(fmt::format(
        "{} is 'TCP_TLS', and the Gloo in LibTorch takes that and encrypts nothing. Unset it and "
        "join the hosts by a network that encrypts (WireGuard, IPsec), naming its interface in "
        "ZERO_INTERFACE.",
        kTransportVariable));
  }
  throw ConfigError(fmt::format("{} is '{}'; rails use TCP only.", kTransportVariable, value));
}

// A receive for which no message is ever sent. Its state tells the state of the connection.
class Canary {
 public:
  Canary(c10d::Backend& gloo, int host) : byte_(at::empty({1}, at::kByte)) {
    constexpr int kTag = 0x7fffffff;  // no piece has this tag
    std::vector<at::Tensor> tensors{byte_};
    work_ = gloo.recv(tensors, host, kTag);
  }
  // Returns why the connection is broken, if it is.
  std::optional<std::string> trouble() {
    try {
      work_->abort();  // an aborted wait does not run out of time
      work_->wait(milliseconds(1));
    } catch (...) {
      return message_of(std::current_exception());
    }
    return std::nullopt;
  }
  // Gloo closes all connections of a kind when a wait for one of them runs out of time.
  void close() {
    try {
      work_->wait(milliseconds(1));
    } catch (const std::exception&) {  // its time has run out, as intended
    }
  }

 private:
  at::Tensor byte_;
  c10::intrusive_ptr<c10d::Work> work_;
};

class GlooPiece final : public Piece {
 public:
  explicit GlooPiece(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool wait(milliseconds timeout) override { return work_->wait(timeout); }
  void abort() override { work_->abort(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

// Wraps a piece of memory as c10d takes it, which only reads it to send it.
std::vector<at::Tensor> tensors_of(std::span<const std::byte> bytes) {
  return {at::from_blob(const_cast<std::byte*>(bytes.data()), {static_cast<int64_t>(bytes.size())},
                        at::kByte)};
}

// Note [One way a connection]
// A sender of Gloo's keeps a message until the receiver has said, over the same connection, that
// its memory is there. Where one connection carries messages both ways, that word stands behind
// the messages on their way in its own direction, which at 1 Gbit/s are tens of milliseconds. A
// sum, whose few chunks are received in turn, gets two thirds of the link then. So the channels of
// sums have two lines, each of which carries messages one way: to hosts of higher numbers, or of
// lower ones. A gather receives whole messages, whose memory is there long before.
constexpr bool goes_one_way(Channel channel) {
  return channel == Channel::reduce || channel == Channel::homeward;
}

// Connections of one channel, so that its messages wait for no other channel's.
class Line {
 public:
  Line(const c10::intrusive_ptr<c10d::Store>& store, int host, int hosts,
       const std::string& address, milliseconds timeout) {
    const BrokenPipeScope survives;  // the thread that Gloo starts inherits it
    auto options = c10::make_intrusive<ProcessGroupGloo::Options>(timeout);
    options->threads = 0;  // Gloo's threads would run collectives
    options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(address, false));
    gloo_ = c10::make_intrusive<ProcessGroupGloo>(store, host, hosts, options);
    canaries_.resize(static_cast<size_t>(hosts));
    for (int peer = 0; peer < hosts; ++peer) {
      if (peer != host)
        canaries_[static_cast<size_t>(peer)] = std::make_unique<Canary>(*gloo_, peer);
    }
  }

  // Posts under a lock, since Gloo counts its calls without one.
  template <class Post>
  std::unique_ptr<Piece> post(const Post& post) {
    const BrokenPipeScope survives;
    const std::lock_guard lock(posting_);
    return std::make_unique<GlooPiece>(post(*gloo_));
  }
  std::optional<std::string> trouble(int host) {
    const std::lock_guard lock(asking_);
    return canaries_[static_cast<size_t>(host)]->trouble();
  }
  void close() {
    const BrokenPipeScope survives;
    const std::lock_guard lock(asking_);
    for (const auto& canary : canaries_) {
      if (canary) canary->close();  // a connection that is broken already closes no other
    }
  }

 private:
  c10::intrusive_ptr<ProcessGroupGloo> gloo_;
  std::vector<std::unique_ptr<Canary>> canaries_;  // by host
  std::mutex posting_, asking_;
};

class GlooCarrier final : public Carrier {
 public:
  GlooCarrier(const c10::intrusive_ptr<c10d::Store>& store, int host, int hosts,
              const std::string& address, milliseconds timeout)
      : host_(host), description_(fmt::format("gloo over {} (tcp)", address)) {
    const auto connect = [&](size_t channel, std::string_view which) {
      const auto own =
          c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}/{}", which, channel), store);
      return std::make_unique<Line>(own, host, hosts, address, timeout);
    };
    for (size_t i = 0; i < kChannels; ++i) {
      lines_[i] = connect(i, "channel");
      if (goes_one_way(static_cast<Channel>(i))) downward_[i] = connect(i, "downward");
    }
  }

  std::unique_ptr<Piece> send(int host, Channel channel, int tag,
                              std::span<const std::byte> bytes) override {
    auto tensors = tensors_of(bytes);
    return line(channel, host_, host).post([&](auto& gloo) {
      return gloo.send(tensors, host, tag);
    });
  }
  std::unique_ptr<Piece> receive(int host, Channel channel, int tag,
                                 std::span<std::byte> bytes) override {
    auto tensors = tensors_of(bytes);
    return line(channel, host, host_).post([&](auto& gloo) {
      return gloo.recv(tensors, host, tag);
    });
  }
  bool watches() const override { return true; }
  std::optional<std::string> trouble(int host, Channel channel) override {
    // The line outward may have ended before the last bytes on the line inward have come.
    return line(channel, host, host_).trouble(host);
  }
  void close() override {
    for (const auto* lines : {&lines_, &downward_}) {
      for (const auto& line : *lines) {
        if (line) line->close();
      }
    }
  }
  std::string describe() const override { return description_; }

 private:
  // Returns the line that carries the channel's messages between two hosts.
  Line& line(Channel channel, int from, int to) {
    const auto i = static_cast<size_t>(channel);
    return goes_one_way(channel) && from > to ? *downward_[i] : *lines_[i];
  }

  int host_;
  std::string description_;
  std::array<std::unique_ptr<Line>, kChannels> lines_;
  std::array<std::unique_ptr<Line>, kChannels> downward_;  // Note [One way a connection]
};

std::string key(int host) { return fmt::format("address/{}", host); }

// Publishes `address` and returns all hosts'. Throws naming the hosts that do not come.
std::vector<std::string> exchange_addresses(c10d::Store& store, int host, int hosts,
                                            const std::string& address, milliseconds timeout) {
  const auto end = deadline_after(timeout);
  std::vector<std::string> all;
  std::vector<int> missing;
  try {
    store.set(key(host), std::vector<uint8_t>(address.begin(), address.end()));
    for (int peer = 0; peer < hosts; ++peer) {
      const auto left =
          std::chrono::duration_cast<milliseconds>(end - std::chrono::steady_clock::now());
      try {
        store.wait({key(peer)}, std::max(left, milliseconds(1)));
      } catch (const std::exception&) {
        if (!store.check({key(peer)})) {  // throws if the store does not answer
          missing.push_back(peer);
          continue;
        }
      }
      const auto bytes = store.get(key(peer));
      all.emplace_back(bytes.begin(), bytes.end());
    }
  } catch (...) {
    throw CommError(fmt::format("Host {} cannot use the store while the hosts connect: {}", host,
                                message_of(std::current_exception())));
  }
  if (!missing.empty()) {
    throw CommError(fmt::format(
        "Host {} waited {} s for host{} {} to connect. Is every host's program running?", host,
        std::chrono::duration<double>(timeout).count(), missing.size() == 1 ? "" : "s",
        fmt::join(missing, ", ")));
  }
  return all;
}

}  // namespace

bool has_gloo_rails() { return true; }

std::unique_ptr<Rail> gloo_rail(c10::intrusive_ptr<c10d::Store> store, int host, int hosts,
                                const std::string& address, PieceOptions options) {
  check_release();
  check_transport();
  const auto all = exchange_addresses(*store, host, hosts, address, options.timeout);
  const auto listens = reachable_address(address, all);
  std::unique_ptr<Carrier> carrier;
  try {
    // Gloo waits for a peer to connect until the time is up; the store may know that none will.
    carrier = answer_to(
        [=, timeout = options.timeout] {
          return std::make_unique<GlooCarrier>(store, host, hosts, listens, timeout);
        },
        [&] { (void)store->check({key(host)}); });
  } catch (const Error&) {
    throw;
  } catch (...) {
    throw CommError(fmt::format(
        "Host {} cannot connect to the others by gloo over {}: {} The hosts are at {}. Set "
        "ZERO_INTERFACE to the interface that joins them (`ip address` lists them), and see that "
        "no firewall stands between them.",
        host, listens, message_of(std::current_exception()), fmt::join(all, ", ")));
  }
  return piece_rail(std::move(carrier), host, hosts, options);
}

}  // namespace zero::comm
