// Blocks of memory that free themselves. The ledger counts them while they live.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "zero/base/ledger.h"
#include "zero/comm/arena.h"
#include "zero/comm/transport.h"

namespace zero::comm {

/// A zero-filled block of a rank's region of the shared memory; keeps the memory mapped.
class SharedBlock {
 public:
  /// `bytes` > 0. Throws OutOfMemory.
  SharedBlock(std::shared_ptr<Arena> arena, int64_t bytes);
  /// Charges `bytes` without rounding them to pages.
  SharedBlock(std::shared_ptr<Arena> arena, int64_t bytes, const std::shared_ptr<Ledger>& ledger,
              Category category);
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  ~SharedBlock();
  int64_t offset() const { return offset_; }
  std::byte* data() const { return arena_->mapping()->at(offset_); }

 private:
  std::shared_ptr<Arena> arena_;
  int64_t offset_;
  Charge charge_;
};

/// Returns a 1-D tensor in a new block of the shared memory. Throws OutOfMemory.
at::Tensor shared_tensor(const std::shared_ptr<Arena>& arena, int64_t numel, at::ScalarType dtype,
                         const std::shared_ptr<Ledger>& ledger, Category category);

/// Gives tensors in the shared memory.
class ArenaMemory final : public Memory {
 public:
  ArenaMemory(std::shared_ptr<Arena> arena, std::shared_ptr<Ledger> ledger)
      : arena_(std::move(arena)), ledger_(std::move(ledger)) {}
  at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category) override {
    return shared_tensor(arena_, numel, dtype, ledger_, category);
  }

 private:
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Ledger> ledger_;
};

/// Returns a zero-filled tensor in memory of this process alone. From 2 MiB on it lies on huge
/// pages, since a disk takes memory on small ones in several requests.
at::Tensor private_tensor(int64_t numel, at::ScalarType dtype,
                          const std::shared_ptr<Ledger>& ledger, Category category);

}  // namespace zero::comm
