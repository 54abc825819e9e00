// The memory of gradients on their way: arrays that are used again and again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

#include "zero/comm/group.h"

namespace zero {

/// Arrays of a few sizes, on which collectives work in place: full units' buckets, and slices,
/// which are many times smaller. Steps after the first two allocate nothing.
class BucketPool {
 public:
  /// `bucket_bytes`: of the largest ordinary unit; `slice_bytes`: of its slice, in the widest dtype
  /// that it comes in. Larger arrays are made as large as they are asked for.
  BucketPool(comm::Group& group, int64_t bucket_bytes, int64_t slice_bytes);

  /// An uninitialised array; its memory comes back with `give`.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  void give(at::Tensor array);
  int64_t bucket_bytes() const { return bucket_bytes_; }

 private:
  comm::Group& group_;
  int64_t bucket_bytes_;
  int64_t slice_bytes_;
  std::multimap<int64_t, at::Tensor> free_;  // by bytes
};

}  // namespace zero
