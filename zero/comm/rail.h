// A rail carries bytes between this rank and the ranks at its place on the other hosts.
//
// Note [Rails]
// Inside a host ranks share memory. Between hosts rank r of one host speaks only to rank r of each
// other host: R ranks a host are R rails, each of which carries 1/R of the bytes. So a host's link
// carries the bytes that the hosts need of each other once, however many ranks a host has
// (hosts_collectives.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace zero::comm {

/// Messages of one channel between two hosts arrive in the order of their posting; different
/// channels have no common order. A thread that posts takes a channel of its own.
enum class Channel : uint8_t {
  gather,    ///< slices, and the records of all calls
  reduce,    ///< parts of sums
  homeward,  ///< messages of a call's second phase
  control,
  rest,  ///< values that found no room in a message whose length was known before
};
inline constexpr size_t kChannels = 5;

/// A message on its way.
class Passage {
 public:
  virtual ~Passage() = default;
  /// Blocks until the bytes have left this rank's memory (send) or are in it (receive); waiting
  /// again returns at once. Throws CommError if the rail is aborted, the peer's end is gone, or the
  /// rail's timeout is over.
  virtual void wait() = 0;
};

/// Sends and receives go on by themselves once they are posted, without a thread of the caller's.
/// Thread-safe, except that one channel may have one sending and one receiving thread at a time.
class Rail {
 public:
  virtual ~Rail() = default;
  virtual int host() const = 0;
  virtual int hosts() const = 0;
  /// Starts to send `bytes` to this rank's counterpart on `host`. They must not change until the
  /// passage has been waited for, or the rail is gone.
  virtual std::unique_ptr<Passage> send(int host, Channel channel,
                                        std::span<const std::byte> bytes) = 0;
  /// Starts to receive the next message of `channel` from `host`, which must have as many bytes.
  virtual std::unique_ptr<Passage> receive(int host, Channel channel,
                                           std::span<std::byte> bytes) = 0;
  /// Makes every passage under way, and every later one, throw. Thread-safe.
  virtual void abort() = 0;
  /// Returns the bytes that have been posted to be sent.
  virtual int64_t sent_bytes() const = 0;
  /// Returns, for logs and errors, "gloo over 10.0.0.1 (tcp)".
  virtual std::string describe() const = 0;
};

}  // namespace zero::comm
