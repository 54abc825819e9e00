// The tiers of memory that states lie in, and the copies between a device and its host.
//
// Note [Tiers]
// Each state of a unit (parameters, gradients, optimizer) has a tier. A state on the device is used
// where it is. A state in the host's memory is used there by the update, which runs on the host
// too, and copied to the device when an operator needs it. A state on a disk passes through blocks
// of memory (DiskTier). Only DeviceCopier copies between device and host, and it counts the bytes:
// gradients down, parameters up. If the device is the CPU, both are its memory. On other devices a
// disk's blocks are in the host's memory, and the update of states on a disk runs on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>

#include "zero/device/stream.h"

namespace zero {

/// The memory that a state lies in.
enum class Tier : uint8_t { device, host, disk };

/// Bytes that one rank's device and its host have exchanged.
struct DeviceTraffic {
  int64_t down = 0;  ///< to the host
  int64_t up = 0;    ///< to the device
};

/// Copies between device and host, and counts them. Thread-safe.
class DeviceCopier {
 public:
  /// `device` is the device of Tier::device.
  explicit DeviceCopier(c10::Device device = c10::kCPU) : device_(device) {}
  /// Returns the device that has the memory of a tier. Blocks of a disk are in the host's memory.
  c10::Device device_of(Tier tier) const {
    return tier == Tier::device ? device_ : c10::Device(c10::kCPU);
  }
  /// Copies `bytes` bytes within or between host and device, on this thread's current stream, and
  /// counts them if the tiers differ. The two must not overlap. Without `done`, a copy that reads
  /// or writes the host's memory is finished when this returns. With `done` the copy is only
  /// enqueued and the mark is recorded behind it; the host must not touch pinned memory until the
  /// mark is reached.
  void copy(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes,
            StreamMark* done = nullptr);
  /// Copies a tensor to another of its dtype and size; both are contiguous on the CPU.
  void copy(const at::Tensor& to, Tier to_tier, const at::Tensor& from, Tier from_tier);
  void down(void* host, const void* device, int64_t bytes, StreamMark& done) {
    copy(host, Tier::host, device, Tier::device, bytes, &done);
  }
  void up(void* device, const void* host, int64_t bytes, StreamMark& done) {
    copy(device, Tier::device, host, Tier::host, bytes, &done);
  }
  /// Returns the counts since construction.
  DeviceTraffic counts() const { return {down_.load(), up_.load()}; }

 private:
  void count(Tier to_tier, Tier from_tier, int64_t bytes);
  void enqueue(void* to, Tier to_tier, const void* from, Tier from_tier, int64_t bytes,
               StreamMark* done) const;
  c10::Device device_;
  std::atomic<int64_t> down_{0};
  std::atomic<int64_t> up_{0};
};

}  // namespace zero
