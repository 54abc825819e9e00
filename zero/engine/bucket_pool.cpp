#include "zero/engine/bucket_pool.h"

#include <algorithm>
#include <utility>

#include "zero/base/error.h"

namespace zero {

BucketPool::BucketPool(comm::Group& group, int64_t bucket_bytes, int64_t slice_bytes)
    : group_(group),
      bucket_bytes_(bucket_bytes),
      slice_bytes_(std::min(slice_bytes, bucket_bytes)) {}

at::Tensor BucketPool::take(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t whole = std::max(bytes, bytes <= slice_bytes_ ? slice_bytes_ : bucket_bytes_);
  at::Tensor memory;
  if (const auto found = free_.find(whole); found != free_.end()) {
    memory = std::move(found->second);
    free_.erase(found);
  } else {
    try {
      memory = group_.empty(whole, at::kByte, Category::gradient_buckets);
    } catch (const OutOfMemory&) {
      if (free_.empty()) throw;
      free_.clear();  // of other sizes
      memory = group_.empty(whole, at::kByte, Category::gradient_buckets);
    }
  }
  return memory.narrow(0, 0, bytes).view(dtype);
}

void BucketPool::give(at::Tensor array) {
  const auto bytes = static_cast<int64_t>(array.storage().nbytes());
  free_.emplace(bytes, array.view(at::kByte).as_strided({bytes}, {1}, 0));
}

}  // namespace zero
