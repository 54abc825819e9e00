// Where the bytes of a state live, and the way between a device and its host.
//
// Note [Tiers]
// Each state of a unit (parameters, gradients, optimizer) has a tier. What lies on the device is
// used where it is. What lies in the host's memory is used there by the update, which runs on the
// host too, and copied to the device when an operator needs it. What lies on a disk passes through
// blocks (DiskTier). Device and host meet in HostLink alone, whose copies are counted: gradients
// down, parameters up. Where the device is the CPU both are memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

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
  /// Copies `bytes` bytes; they must not overlap. Counted where the tiers differ. On this thread's
  /// current stream; done when it returns where the host's memory takes part.
  void copy(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes);
  /// The same of tensors of one dtype and size, contiguous on the CPU.
  void copy(const at::Tensor& to, Tier to_tier, const at::Tensor& from, Tier from_tier);
  void down(void* host, const void* device, int64_t bytes) {
    copy(host, Tier::host, device, Tier::device, bytes);
  }
  void up(void* device, const void* host, int64_t bytes) {
    copy(device, Tier::device, host, Tier::host, bytes);
  }
  /// Since construction.
  HostTraffic counts() const { return {down_.load(), up_.load()}; }

 private:
  void count(Tier to_tier, Tier from_tier, int64_t bytes);
  void copy_on_device(void* to, Tier to_tier, const void* from, Tier from_tier,
                      int64_t bytes) const;
  c10::Device device_;
  std::atomic<int64_t> down_{0};
  std::atomic<int64_t> up_{0};
};

}  // namespace zero
