// A TCP connection between two watches. It carries short messages, and nobody ever blocks on it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/descriptor.h"

namespace zero::comm {

struct Frame {
  enum class Kind : uint32_t {
    hello = 1,  ///< the sender connects, and sends the token that proves who it is
    beat,       ///< the sender lives
    report,     ///< the sender is in trouble; the origin is the rank that it blames
    verdict,    ///< the cause that all ranks report
    heard,      ///< the verdict has arrived
    leave,      ///< the sender ends in order
  };
  Kind kind = Kind::beat;
  int origin = 0;
  std::string text{};
};

class FrameLink {
 public:
  static constexpr size_t kLongestText = 2000;
  static constexpr int kLetGather = 256;  ///< bytes

  /// Takes a connected socket, which becomes non-blocking.
  explicit FrameLink(Descriptor socket);

  int socket() const { return socket_.get(); }
  /// True if the peer is gone or has sent bytes that are no frame. Earlier frames have been
  /// received.
  bool closed() const { return closed_; }
  bool has_unsent() const { return !unsent_.empty(); }

  /// From now on poll wakes for other frames and for the end, but not for each beat: a receiver of
  /// many connections looks for beats by the clock.
  void let_beats_gather();
  /// Sends as much as the system takes at once and keeps the rest for `flush`. Cuts longer texts.
  /// If a peer takes nothing it drops beats when too much is kept, and later all frames.
  void send(Frame::Kind kind, int origin = 0, std::string_view text = {});
  void flush();
  /// Returns the frames that have arrived.
  std::vector<Frame> receive();
  /// Ends the connection after all that has been sent.
  void close();

 private:
  Descriptor socket_;
  std::string unsent_;
  std::string received_;
  bool closed_ = false;
};

}  // namespace zero::comm
