// Moves whole tensors between their owners and the other ranks, many tensors to a collective.
//
// Note [Owner buckets]
// Every tensor has one owner. Each owner's tensors of one dtype, laid end to end, make a stream;
// bucket b is elements [b * slice, (b + 1) * slice) of every owner's stream, side by side in rank
// order. So a reduce-scatter of a bucket sums each element to its owner, and an all-gather sends it
// back to all. Streams of different lengths leave padding in the last buckets, which is moved like
// the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "zero/comm/group.h"

namespace zero {

class OwnerBuckets {
 public:
  struct Item {
    at::ScalarType dtype = at::ScalarType::Float;  ///< Float, Double, BFloat16 or Half
    int64_t numel = 0;
    int owner = 0;
    friend bool operator==(const Item&, const Item&) = default;
  };

  /// Makes buckets of at most `bucket_bytes` bytes (at least one element a rank), charged as
  /// communication.
  OwnerBuckets(std::shared_ptr<comm::Group> group, int64_t bucket_bytes);

  /// Sets the items, which must be the same on every rank. Cheap when nothing has changed.
  void plan(const std::vector<Item>& items);

  /// Tensor i is item i: contiguous, 1-D. Collective; returns when done. Tensors that this rank
  /// owns become the mean over all ranks, summed in rank order in fp32 (fp64 for fp64) and rounded
  /// once; the others do not change.
  void reduce(std::span<const at::Tensor> tensors);

  /// Sends tensors the other way: tensor i of each rank becomes equal to that of its owner.
  void share(std::span<const at::Tensor> tensors);

 private:
  /// Elements [from, from + numel) of an item, which lie at `at` in its owner's slice of a bucket.
  struct Piece {
    size_t item;
    int64_t from;
    int64_t numel;
    int64_t at;
  };
  struct Bucket {
    at::ScalarType dtype;
    int64_t slice;
    std::vector<Piece> pieces;
  };

  void plan_dtype(at::ScalarType dtype);
  at::Tensor buffer_of(const Bucket& bucket);

  std::shared_ptr<comm::Group> group_;
  int64_t bucket_bytes_;
  std::vector<Item> items_;
  std::vector<Bucket> buckets_;
  at::Tensor buffer_;  // bytes, for each bucket in turn
  at::Tensor sums_;    // fp32 sums of a low-precision bucket
};

}  // namespace zero
