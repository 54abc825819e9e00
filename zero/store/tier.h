// Where the bytes of a state live, and the way between a device and its host.
//
// Note [Tiers]
// Each state of a unit (parameters, gradients, optimizer) has a tier. What lies on the device is
// used where it is. What lies in the host's memory is used there by the update, which runs on the
// host too, and copied to the device when an operator needs it. What lies on a disk passes through
// blocks (DiskTier). Device and host meet in HostLink alone, whose copies are counted: gradients
// down, parameters up. Where the device is the CPU both are memory. Elsewhere a disk's blocks are
// in the host's memory, and the update of what lies there runs on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

#include "zero/device/stream.h"

namespace zero {

/// Where the bytes of a state live.
enum class Tier : uint8_t { device, host, disk };

/// Bytes that one rank's device and its host have exchanged.
struct HostTraffic {
  int64_t down = 0;  ///< to the host
  int64_t up = 0;    ///< to the device
};

/// Copies between device and host, and counts them. Thread-safe.
class HostLink {
 public:
  /// `device` is where the tier of that name lies.
  explicit HostLink(c10::Device device = c10::kCPU) : device_(device) {}
  /// Where the memory of a tier lies; a disk's blocks are the host's.
  c10::Device device_of(Tier tier) const {
    return tier == Tier::device ? device_ : c10::Device(c10::kCPU);
  }
  /// Copies `bytes` bytes, of host and device; they must not overlap. Counted where the tiers
  /// differ. On this thread's current stream. Where the host's memory takes part it is done when
  /// this returns; with `done`, which is recorded behind it, it is only enqueued: until the mark is
  /// reached the host leaves pinned memory alone.
  void copy(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes,
            StreamMark* done = nullptr);
  /// The same of tensors of one dtype and size, contiguous on the CPU.
  void copy(const at::Tensor& to, Tier to_tier, const at::Tensor& from, Tier from_tier);
  void down(void* host, const void* device, int64_t bytes, StreamMark& done) {
    copy(host, Tier::host, device, Tier::device, bytes, &done);
  }
  void up(void* device, const void* host, int64_t bytes, StreamMark& done) {
    copy(device, Tier::device, host, Tier::host, bytes, &done);
  }
  /// Since construction.
  HostTraffic counts() const { return {down_.load(), up_.load()}; }

 private:
  void count(Tier to_tier, Tier from_tier, int64_t bytes);
  void enqueue(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes,
               StreamMark* done) const;
  c10::Device device_;
  std::atomic<int64_t> down_{0};
  std::atomic<int64_t> up_{0};
};

}  // namespace zero
