// What joins hosts: bytes between this rank and the ranks at its place on the other hosts.
//
// Note [Rails]
// Inside a host ranks share memory. Between hosts rank r of one host speaks to rank r of each other
// host alone: R ranks a host are R rails, each of which carries 1/R of the bytes. So a host's link
// carries what the hosts need of each other once, however many ranks a host has
// (hosts_backend.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace zero::comm {

/// Messages of one channel between two hosts arrive in the order of their posting; those of
/// different channels know nothing of each other. Whoever posts from threads of his own takes a
/// channel of his own.
enum class Channel : uint8_t {
  gather,    ///< slices, and the records of all calls
  reduce,    ///< parts of sums
  homeward,  ///< what a call's second phase sends
  control,
  rest,  ///< what of an array did not fit into messages of a length that was known before
};
inline constexpr size_t kChannels = 5;

/// A message under way.
class Passage {
 public:
  virtual ~Passage() = default;
  /// Blocks until the bytes have left this rank's memory (send) or are in it (receive); waiting
  /// again returns at once. Throws CommError where the rail is aborted, the peer's end is gone, or
  /// the rail's timeout is over.
  virtual void wait() = 0;
};

/// Sends and receives go on by themselves once they are posted: no thread of the caller's has to
/// help. Thread-safe, but for sends, and for receives, of one channel.
class Rail {
 public:
  virtual ~Rail() = default;
  virtual int host() const = 0;
  virtual int hosts() const = 0;
  /// Starts to send `bytes` to this rank's counterpart on `host`. They must stay as they are until
  /// the passage has been waited for, or the rail is gone.
  virtual std::unique_ptr<Passage> send(int host, Channel channel,
                                        std::span<const std::byte> bytes) = 0;
  /// Starts to receive the next message of `channel` from `host`, which has as many bytes.
  virtual std::unique_ptr<Passage> receive(int host, Channel channel,
                                           std::span<std::byte> bytes) = 0;
  /// Every passage under way, and every later one, throws. Thread-safe.
  virtual void abort() = 0;
  /// Bytes that have been posted to be sent.
  virtual int64_t sent_bytes() const = 0;
  /// For logs and errors: "gloo over 10.0.0.1 (tcp)".
  virtual std::string describe() const = 0;
};

}  // namespace zero::comm
