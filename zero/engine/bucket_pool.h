// The memory of gradients on their way to the sums over ranks.
//
// Note [Buckets]
// Buckets of ordinary units have one size and are used again and again: while one is reduced, the
// next one fills. A parameter that is too large for them is a unit by itself. If its gradient has
// the unit's shape it needs no bucket: it is reduced in autograd's own memory, through the group's
// small staging buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "zero/comm/group.h"
#include "zero/device/memory.h"

namespace zero {

/// An array of gradients on its way to a reduction.
struct Bucket {
  at::Tensor array;
  /// The array is the pool's. Otherwise it is a gradient that autograd has made.
  bool pooled = true;
  /// The stream of a device on which a gradient's memory was taken.
  std::optional<c10::Stream> home{};
};

/// Hands out arrays of a few sizes, on which collectives work in place: full units' buckets, and
/// slices, which are many times smaller. Steps after the first two allocate nothing.
class BucketPool {
 public:
  /// On a device memory is taken on `side`, and work on an array runs after the work of its earlier
  /// user. `bucket_bytes` is the size of the largest ordinary unit, `slice_bytes` that of its slice
  /// in the widest dtype that slices have. A larger array gets the size that is asked for.
  BucketPool(comm::Group& group, std::optional<c10::Stream> side, int64_t bucket_bytes,
             int64_t slice_bytes);

  /// Returns an uninitialised array for this thread's current stream. Its memory comes back with
  /// `give`, on the stream that uses it last.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  void give(at::Tensor array);
  /// Gives an array back to the pool, or a gradient's memory to the stream on which it was taken.
  void give(Bucket bucket);
  /// Frees an array: its memory goes back to `home`, the stream on which it was taken.
  static void release(at::Tensor array, const std::optional<c10::Stream>& home) {
    StreamMemory(std::move(array), home).used();
  }
  int64_t bucket_bytes() const { return bucket_bytes_; }

 private:
  at::Tensor make(int64_t bytes);
  comm::Group& group_;
  int64_t bucket_bytes_;
  int64_t slice_bytes_;
  std::optional<c10::Stream> side_;
  std::multimap<int64_t, StreamMemory> free_;  // by bytes; if equal, the oldest first
};

}  // namespace zero
