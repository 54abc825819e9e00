#include "zero/engine/bucket_pool.h"

#include <algorithm>
#include <utility>

#include "zero/base/error.h"

namespace zero {

BucketPool::BucketPool(comm::Group& group, std::optional<c10::Stream> side, int64_t bucket_bytes,
                       int64_t slice_bytes)
    : group_(group),
      bucket_bytes_(bucket_bytes),
      slice_bytes_(std::min(slice_bytes, bucket_bytes)),
      side_(side) {}

at::Tensor BucketPool::take(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t whole = std::max(bytes, bytes <= slice_bytes_ ? slice_bytes_ : bucket_bytes_);
  at::Tensor memory;
  if (auto found = free_.extract(whole)) {
    found.mapped().wait();
    memory = found.mapped().take();
  } else {
    memory = make(whole);
  }
  return memory.narrow(0, 0, bytes).view(dtype);
}

at::Tensor BucketPool::make(int64_t bytes) {
  at::Tensor memory;
  StreamMark mark;
  {
    const StreamScope on(side_);
    try {
      memory = group_.empty(bytes, at::kByte, Category::gradient_buckets);
    } catch (const OutOfMemory&) {
      if (free_.empty()) throw;
      free_.clear();  // arrays of other sizes
      memory = group_.empty(bytes, at::kByte, Category::gradient_buckets);
    }
  }
  wait_for(side_, mark);  // `side_` may have used this memory before
  return memory;
}

void BucketPool::give(at::Tensor array) {
  const auto bytes = static_cast<int64_t>(array.storage().nbytes());
  StreamMemory memory(array.view(at::kByte).as_strided({bytes}, {1}, 0), side_);
  memory.used();
  free_.emplace(bytes, std::move(memory));
}

void BucketPool::give(Bucket bucket) {
  if (bucket.pooled) {
    give(std::move(bucket.array));
  } else {
    release(std::move(bucket.array), bucket.home);
  }
}

}  // namespace zero
