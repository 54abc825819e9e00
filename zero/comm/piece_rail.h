// A rail over a carrier of single pieces of memory between hosts.
//
// Note [Pieces]
// A message is cut into pieces, all of which are posted at once. So the carrier always has the next
// piece at hand, and a message need not be whole before its first bytes leave. Both ends cut alike:
// a piece is told by its tag, which is made of the channel, the piece's number between the two
// hosts, and a few bits of its size. So ends that disagree about a message's size wait for pieces
// that never come, and report it when the time is up, instead of writing one message into another's
// memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "zero/comm/rail.h"

namespace zero::comm {

/// A piece under way. Once it is destroyed nobody touches its memory any more.
class Piece {
 public:
  virtual ~Piece() = default;
  /// Blocks until the piece has left this rank's memory, or is in it. Returns false if it was
  /// aborted; throws any exception if it failed or the time is up.
  virtual bool wait(std::chrono::milliseconds timeout) = 0;
  /// Makes the wait under way, or else the next one, return false. Thread-safe.
  virtual void abort() = 0;
};

/// Carries pieces. Sends and receives match by host, channel and tag, and, if these are equal, in
/// the order of posting. Calls of one channel may come from another thread than those of another.
class Carrier {
 public:
  virtual ~Carrier() = default;
  /// Returns the bits of a tag: 2^bits tags can be told apart, at least 2^14 beside the channels.
  virtual int tag_bits() const { return 28; }
  /// Post a piece of at least one byte. They may throw any exception.
  virtual std::unique_ptr<Piece> send(int host, Channel channel, int tag,
                                      std::span<const std::byte> bytes) = 0;
  virtual std::unique_ptr<Piece> receive(int host, Channel channel, int tag,
                                         std::span<std::byte> bytes) = 0;
  /// Returns true if `trouble` can tell anything. It is then asked a few times a second.
  virtual bool watches() const { return false; }
  /// Returns why no more of `channel` will come from `host`, if known: Note [Lost hosts].
  virtual std::optional<std::string> trouble(int /*host*/, Channel /*channel*/) {
    return std::nullopt;
  }
  /// Ends all connections. Pieces under way touch their memory no more. Thread-safe.
  virtual void close() = 0;
  /// See Rail::describe.
  virtual std::string describe() const = 0;
};

struct PieceOptions {
  /// A piece that does not move at all for so long is reported.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// A message is cut into pieces of this many bytes, the same on all hosts. With smaller ones the
  /// threads of two hosts wake each other more often, which costs a fast link a tenth.
  size_t piece_bytes = size_t{4} << 20;
  /// The first piece's number, the same on all hosts; tests let numbers begin again.
  uint64_t first_piece = 0;
};

/// Returns the rail of `host`, one of `hosts`, over `carrier`. A message of no bytes is not sent,
/// and both its ends are over at once. A passage that is dropped before it has been waited for
/// aborts the rail, since its message would stop all that come after it.
std::unique_ptr<Rail> piece_rail(std::unique_ptr<Carrier> carrier, int host, int hosts,
                                 PieceOptions options);

}  // namespace zero::comm
