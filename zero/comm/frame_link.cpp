#include "zero/comm/frame_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace zero::comm {
namespace {

struct Header {
  uint32_t word = 0;  // kMagic and the kind
  int32_t origin = 0;
  uint32_t length = 0;
};

constexpr uint32_t kMagic = 0x5a574100;  // the last byte is the kind
constexpr size_t kMostUnsent = size_t{64} << 10;
/// The number of beats that follow every other frame: together they exceed the bytes that a
/// receiver lets gather.
constexpr size_t kPadding = FrameLink::kLetGather / sizeof(Header) + 1;

}  // namespace

FrameLink::FrameLink(Descriptor socket) : socket_(std::move(socket)) {
  const int flags = fcntl(socket_.get(), F_GETFL);
  fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
  const int on = 1;
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A link that fails for two seconds must not be silent for four because TCP doubles the interval
  // at each repeat. Systems that lack the first or the second option are a little less patient.
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
  constexpr int kLongestRepeat = 44;  // TCP_RTO_MAX_MS, of Linux 6.15
  const int milliseconds = 1000;
  setsockopt(socket_.get(), IPPROTO_TCP, kLongestRepeat, &milliseconds, sizeof milliseconds);
}

void FrameLink::let_beats_gather() {
  const int bytes = kLetGather;
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

void FrameLink::send(Frame::Kind kind, int origin, std::string_view text) {
  if (closed_ || unsent_.size() > kMostUnsent || (kind == Frame::Kind::beat && has_unsent())) {
    return;
  }
  text = text.substr(0, kLongestText);
  const Header header{kMagic | static_cast<uint32_t>(kind), origin,
                      static_cast<uint32_t>(text.size())};
  unsent_.append(reinterpret_cast<const char*>(&header), sizeof header).append(text);
  if (kind != Frame::Kind::beat) {
    const Header beat{kMagic | static_cast<uint32_t>(Frame::Kind::beat), 0, 0};
    for (size_t i = 0; i < kPadding; ++i) {
      unsent_.append(reinterpret_cast<const char*>(&beat), sizeof beat);
    }
  }
  flush();
}

void FrameLink::flush() {
  while (!closed_ && has_unsent()) {
    const auto sent = ::send(socket_.get(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      unsent_.erase(0, static_cast<size_t>(sent));
    } else if (errno != EINTR) {
      // A connection that is gone may still have bytes to read: `receive` finds its end.
      if (errno != EAGAIN) unsent_.clear();
      return;
    }
  }
}

std::vector<Frame> FrameLink::receive() {
  constexpr size_t kMostAtOnce = size_t{64} << 10;
  bool ended = closed_;
  while (!ended && received_.size() < kMostAtOnce) {
    std::array<char, 4096> bytes;
    const auto got = recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (got > 0) {
      received_.append(bytes.data(), static_cast<size_t>(got));
      // the connection's end will wake whoever polls
      if (static_cast<size_t>(got) < bytes.size()) break;
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      ended = true;
    } else if (errno == EAGAIN) {
      break;
    }
  }
  std::vector<Frame> frames;
  size_t at = 0;
  Header header;
  while (received_.size() - at >= sizeof header) {
    std::memcpy(&header, received_.data() + at, sizeof header);
    const auto kind = header.word & 0xffU;
    if ((header.word & ~0xffU) != kMagic || kind < static_cast<uint32_t>(Frame::Kind::hello) ||
        kind > static_cast<uint32_t>(Frame::Kind::leave) || header.length > kLongestText) {
      ended = true;
      break;
    }
    if (received_.size() - at < sizeof header + header.length) break;
    frames.push_back({static_cast<Frame::Kind>(kind), header.origin,
                      received_.substr(at + sizeof header, header.length)});
    at += sizeof header + header.length;
  }
  received_.erase(0, at);
  closed_ = ended;
  return frames;
}

void FrameLink::close() {
  if (!socket_) return;
  shutdown(socket_.get(), SHUT_WR);
  // Unread bytes would make the system take back bytes that are still on their way to the peer.
  std::array<char, 4096> bytes;
  while (recv(socket_.get(), bytes.data(), bytes.size(), 0) > 0) continue;
  socket_.close();
  closed_ = true;
}

}  // namespace zero::comm
