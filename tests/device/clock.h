// Vector clocks: what a stream or a host knows to have happened before its next work.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/device/device.h"

namespace zero::simulated {

/// A stream (device * kStreams + id) or a host (kAllStreams + device).
using Actor = int;
inline constexpr Actor kAllStreams = kDevices * kStreams;
inline constexpr Actor kActors = kAllStreams + kDevices;

inline Actor actor_of(const c10::Stream& stream) {
  return stream.device_index() * kStreams + static_cast<Actor>(stream.id());
}
inline Actor host_of(int device) { return kAllStreams + device; }
inline bool is_host(Actor actor) { return actor >= kAllStreams; }
inline int device_of(Actor actor) {
  return is_host(actor) ? actor - kAllStreams : actor / kStreams;
}

/// "stream 2 of device 0" or "the host of device 0".
inline std::string name_of(Actor actor) {
  const auto device = " of device " + std::to_string(device_of(actor));
  return is_host(actor) ? "the host" + device
                        : "stream " + std::to_string(actor % kStreams) + device;
}

/// For each actor, how much of its work has happened before.
class Clock {
 public:
  uint64_t& operator[](Actor actor) { return ticks_[static_cast<size_t>(actor)]; }
  uint64_t operator[](Actor actor) const { return ticks_[static_cast<size_t>(actor)]; }
  void join(const Clock& other) {
    for (size_t i = 0; i < ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }
  /// Returns what both clocks know.
  void meet(const Clock& other) {
    for (size_t i = 0; i < ticks_.size(); ++i) ticks_[i] = std::min(ticks_[i], other.ticks_[i]);
  }

 private:
  std::array<uint64_t, kActors> ticks_{};
};

/// A place in a stream's work, as an event records it: after its task number `task`.
struct Mark {
  Actor stream = -1;  ///< -1: nothing was recorded
  uint64_t task = 0;
  Clock clock;
};

}  // namespace zero::simulated
