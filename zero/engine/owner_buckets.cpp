#include "zero/engine/owner_buckets.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"

namespace zero {
namespace {

bool low_precision(at::ScalarType dtype) {
  return dtype == at::ScalarType::BFloat16 || dtype == at::ScalarType::Half;
}

}  // namespace

OwnerBuckets::OwnerBuckets(std::shared_ptr<comm::Group> group, int64_t bucket_bytes)
    : group_(std::move(group)), bucket_bytes_(bucket_bytes) {}

void OwnerBuckets::plan(const std::vector<Item>& items) {
  if (items == items_) return;
  items_ = items;
  buckets_.clear();
  for (const auto dtype : {at::ScalarType::Float, at::ScalarType::Double, at::ScalarType::BFloat16,
                           at::ScalarType::Half}) {
    plan_dtype(dtype);
  }
  int64_t bytes = 0;
  int64_t sums = 0;
  for (const auto& bucket : buckets_) {
    bytes = std::max(bytes, group_->size() * bucket.slice *
                                static_cast<int64_t>(c10::elementSize(bucket.dtype)));
    if (low_precision(bucket.dtype)) sums = std::max(sums, bucket.slice);
  }
  if (!buffer_.defined() || buffer_.numel() < bytes) {
    buffer_ = group_->empty(bytes, at::ScalarType::Byte, Category::communication);
  }
  if (sums > 0 && (!sums_.defined() || sums_.numel() < sums)) {
    sums_ = group_->empty(sums, at::ScalarType::Float, Category::communication);
  }
}

void OwnerBuckets::plan_dtype(at::ScalarType dtype) {
  const int64_t slice = std::max<int64_t>(
      1, bucket_bytes_ / (group_->size() * static_cast<int64_t>(c10::elementSize(dtype))));
  const size_t first = buckets_.size();
  std::vector<int64_t> stream(static_cast<size_t>(group_->size()), 0);
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].dtype != dtype) continue;
    auto& position = stream[static_cast<size_t>(items_[i].owner)];
    for (int64_t from = 0; from < items_[i].numel;) {
      const size_t bucket = first + static_cast<size_t>(position / slice);
      const int64_t at = position % slice;
      const int64_t numel = std::min(items_[i].numel - from, slice - at);
      while (buckets_.size() <= bucket) buckets_.push_back({dtype, 0, {}});
      buckets_[bucket].pieces.push_back({i, from, numel, at});
      buckets_[bucket].slice = std::max(buckets_[bucket].slice, at + numel);
      from += numel;
      position += numel;
    }
  }
}

at::Tensor OwnerBuckets::buffer_of(const Bucket& bucket) {
  const int64_t bytes =
      group_->size() * bucket.slice * static_cast<int64_t>(c10::elementSize(bucket.dtype));
  return buffer_.narrow(0, 0, bytes).view(bucket.dtype);
}

void OwnerBuckets::reduce(std::span<const at::Tensor> tensors) {
  ensure(tensors.size() == items_.size(), "one tensor for each item of the plan");
  if (group_->size() == 1) return;
  for (const auto& bucket : buckets_) {
    const auto buffer = buffer_of(bucket);
    for (const auto& piece : bucket.pieces) {
      buffer.narrow(0, items_[piece.item].owner * bucket.slice + piece.at, piece.numel)
          .copy_(tensors[piece.item].narrow(0, piece.from, piece.numel));
    }
    auto sum = low_precision(bucket.dtype)
                   ? sums_.narrow(0, 0, bucket.slice)
                   : buffer.narrow(0, group_->rank() * bucket.slice, bucket.slice);
    group_->reduce_scatter(sum, buffer, "gradients").wait();
    sum.div_(group_->size());
    for (const auto& piece : bucket.pieces) {
      if (items_[piece.item].owner != group_->rank()) continue;
      tensors[piece.item]
          .narrow(0, piece.from, piece.numel)
          .copy_(sum.narrow(0, piece.at, piece.numel));
    }
  }
}

void OwnerBuckets::share(std::span<const at::Tensor> tensors) {
  ensure(tensors.size() == items_.size(), "one tensor for each item of the plan");
  if (group_->size() == 1) return;
  for (const auto& bucket : buckets_) {
    const auto buffer = buffer_of(bucket);
    const auto in_buffer = [&](const Piece& piece) {
      return buffer.narrow(0, items_[piece.item].owner * bucket.slice + piece.at, piece.numel);
    };
    for (const auto& piece : bucket.pieces) {
      if (items_[piece.item].owner != group_->rank()) continue;
      in_buffer(piece).copy_(tensors[piece.item].narrow(0, piece.from, piece.numel));
    }
    const auto own = buffer.narrow(0, group_->rank() * bucket.slice, bucket.slice);
    group_->all_gather(buffer, own, "parameters").wait();
    for (const auto& piece : bucket.pieces) {
      if (items_[piece.item].owner == group_->rank()) continue;
      tensors[piece.item].narrow(0, piece.from, piece.numel).copy_(in_buffer(piece));
    }
  }
}

}  // namespace zero
