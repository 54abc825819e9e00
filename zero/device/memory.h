// Memory of a device, and memory of the host that a device copies from and to.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "zero/base/ledger.h"
#include "zero/device/stream.h"

namespace zero {

/// An uninitialised 1-D tensor of `numel` elements on `device`, charged to `category` as long as
/// its storage lives. On the CPU host_empty (base/host_memory.h); elsewhere of LibTorch's
/// allocator, which hands it out again, when it is freed, on the stream on which it was taken.
/// Throws OutOfMemory, with what is held there and the advice of the ledger's DeviceLimit.
at::Tensor device_empty(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category);

/// The same, filled with zeros. On the CPU host_zeros, of that colour.
at::Tensor device_zeros(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category, int64_t colour = 0);

/// A 1-D tensor of zeros in the host's memory, pinned where `device` is another: copies between the
/// two then run on the device's streams. Charged to `category`. Throws OutOfMemory.
at::Tensor pinned_zeros(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category, int64_t colour = 0);

/// The memory of a device, bytes.
struct DeviceMemory {
  Usage tensors;         ///< of this process, and the most since `reset_peak_memory`
  int64_t reserved = 0;  ///< taken from the device for tensors, and kept for the next ones
  int64_t free = 0;      ///< of the device, for anybody
  int64_t total = 0;     ///< of the device; 0 where its allocator does not say
  /// What this process may have, if others keep what they have.
  int64_t available() const { return std::min(total, free + reserved); }
};
/// Of a device with memory of its own: by LibTorch's allocator. Zeros on the CPU, and with LibTorch
/// before 2.9.
DeviceMemory device_memory(c10::Device device);

/// What LibTorch's tensors take beside what `ledger` counts on `device`: of a process's CPU all
/// that the allocator of tensors holds, of other devices the rest of what their allocator has
/// given. Its peak there is the allocator's, without what the ledger counts now.
Usage other_tensors(c10::Device device, const Ledger& ledger);
/// Sets the peak of that to the current value.
void reset_peak_memory(c10::Device device);

/// Memory that several streams of a device use in turn: Note [Streams]. Move-only. On the CPU a
/// tensor.
class StreamMemory {
 public:
  StreamMemory() = default;
  /// `memory` was taken on the stream on which this thread enqueues work for its device.
  explicit StreamMemory(at::Tensor memory);
  /// It was taken on `home`.
  StreamMemory(at::Tensor memory, std::optional<c10::Stream> home)
      : memory_(std::move(memory)), home_(home) {}
  StreamMemory(StreamMemory&&) noexcept = default;
  StreamMemory& operator=(StreamMemory&& other) noexcept;
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  /// Gives it back to the stream on which it was taken, after its last users. On a device that has
  /// failed, which cannot say when they end, the memory stays taken.
  ~StreamMemory();

  const at::Tensor& tensor() const { return memory_; }
  /// The tensor, for a user that follows the last ones (`wait`) and gives it back itself.
  at::Tensor take() { return std::move(memory_); }
  /// The stream, or this thread's current one, has used it, up to now.
  void used(const c10::Stream& stream) { last_uses_.record(stream); }
  void used();
  /// What this thread enqueues from now on runs after its last users.
  void wait() { last_uses_.wait(); }

 private:
  void release() noexcept;
  at::Tensor memory_;
  std::optional<c10::Stream> home_;
  StreamMarks last_uses_;
};

/// `numel` elements at `data`, memory of `device` that lives elsewhere, as a 1-D tensor.
at::Tensor tensor_at(void* data, int64_t numel, at::ScalarType dtype, c10::Device device);

}  // namespace zero
