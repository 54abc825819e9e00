// The memory of gradients on their way: arrays that are used again and again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "zero/comm/group.h"
#include "zero/device/memory.h"

namespace zero {

/// Arrays of a few sizes, on which collectives work in place: full units' buckets, and slices,
/// which are many times smaller. Steps after the first two allocate nothing.
class BucketPool {
 public:
  /// On a device memory is taken on `side`, and whoever takes an array runs after who had it
  /// before. `bucket_bytes`: of the largest ordinary unit; `slice_bytes`: of its slice, in the
  /// widest dtype that it comes in. Larger arrays are made as large as they are asked for.
  BucketPool(comm::Group& group, std::optional<c10::Stream> side, int64_t bucket_bytes,
             int64_t slice_bytes);

  /// An uninitialised array, for this thread's current stream; its memory comes back with `give`,
  /// on the stream that uses it last.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  void give(at::Tensor array);
  /// The same of an array that is a gradient itself, whose memory goes back to `home`, the stream
  /// on which it was taken.
  static void release(at::Tensor gradient, const std::optional<c10::Stream>& home) {
    StreamMemory(std::move(gradient), home).used();
  }
  int64_t bucket_bytes() const { return bucket_bytes_; }

 private:
  at::Tensor make(int64_t bytes);
  comm::Group& group_;
  int64_t bucket_bytes_;
  int64_t slice_bytes_;
  std::optional<c10::Stream> side_;
  std::multimap<int64_t, StreamMemory> free_;  // by bytes; of equal ones the oldest first
};

}  // namespace zero
