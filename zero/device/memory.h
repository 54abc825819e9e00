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

/// Returns an uninitialised 1-D tensor of `numel` elements on `device`, charged to `category` as
/// long as its storage lives. On the CPU it is host_empty's (base/host_memory.h). Elsewhere it is
/// of LibTorch's allocator, which hands freed memory out again on the stream on which it was taken.
/// Throws OutOfMemory, with what is held there and the advice of the ledger's DeviceLimit.
at::Tensor device_empty(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category);

/// Returns such a tensor filled with zeros. On the CPU it is host_zeros', of that colour.
at::Tensor device_zeros(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category, int64_t colour = 0);

/// Returns a 1-D tensor of zeros in the host's memory, charged to `category`. It is pinned if
/// `device` is another than the CPU: copies between the two then run on the device's streams.
/// Throws OutOfMemory.
at::Tensor pinned_zeros(int64_t numel, at::ScalarType dtype, c10::Device device,
                        std::shared_ptr<Ledger> ledger, Category category, int64_t colour = 0);

/// The memory of a device in bytes.
struct DeviceMemory {
  Usage tensors;         ///< this process's, and the most since `reset_peak_memory`
  int64_t reserved = 0;  ///< taken from the device for tensors, and kept for the next ones
  int64_t free = 0;      ///< free on the device, for anybody
  int64_t total = 0;     ///< the device's; 0 where its allocator does not say
  /// Returns how much this process may have, if others keep what they have.
  int64_t available() const { return std::min(total, free + reserved); }
};
/// Returns the memory of a device that has its own, as LibTorch's allocator knows it. Zeros on the
/// CPU, and with LibTorch before 2.9.
DeviceMemory device_memory(c10::Device device);

/// Returns the bytes of LibTorch's tensors beside those that `ledger` counts on `device`. On the
/// CPU they are all that the process's allocator of tensors holds; on other devices the rest of
/// what their allocator has given. The peak there is the allocator's, without what the ledger
/// counts now.
Usage other_tensors(c10::Device device, const Ledger& ledger);
/// Sets that peak to the current value.
void reset_peak_memory(c10::Device device);

/// Memory that several streams of a device use in turn: Note [Streams]. Move-only. On the CPU it is
/// just a tensor.
class StreamMemory {
 public:
  StreamMemory() = default;
  /// `memory` was taken on the stream on which this thread enqueues work for its device.
  explicit StreamMemory(at::Tensor memory);
  /// `memory` was taken on `home`.
  StreamMemory(at::Tensor memory, std::optional<c10::Stream> home)
      : memory_(std::move(memory)), home_(home) {}
  StreamMemory(StreamMemory&&) noexcept = default;
  StreamMemory& operator=(StreamMemory&& other) noexcept;
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  /// Gives it back to the stream on which it was taken, after its last users. If the device has
  /// failed, it cannot say when they end, and the memory stays taken.
  ~StreamMemory();

  const at::Tensor& tensor() const { return memory_; }
  /// Returns the tensor, for a user that follows the last ones (`wait`) and gives it back itself.
  at::Tensor take() { return std::move(memory_); }
  /// Says that the stream, or this thread's current one, has used it up to now.
  void used(const c10::Stream& stream) { last_uses_.record(stream); }
  void used();
  /// Lets all that this thread enqueues from now on run after its last users.
  void wait() { last_uses_.wait(); }

 private:
  void release() noexcept;
  at::Tensor memory_;
  std::optional<c10::Stream> home_;
  StreamMarks last_uses_;
};

/// Returns `numel` elements at `data`, memory of `device` that lives elsewhere, as a 1-D tensor.
at::Tensor tensor_at(void* data, int64_t numel, at::ScalarType dtype, c10::Device device);

}  // namespace zero
