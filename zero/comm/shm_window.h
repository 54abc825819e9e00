// A window over the shared-memory group: see Note [Epochs] in group.h.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "zero/comm/arena.h"
#include "zero/comm/group.h"
#include "zero/comm/health.h"
#include "zero/comm/memory_block.h"
#include "zero/comm/peers.h"
#include "zero/comm/wait_clock.h"

namespace zero::comm {

/// Every rank's block holds its epochs; rank 0's begins with the array.
class ShmWindow final : public Window {
 public:
  struct Shape {
    int64_t bytes = 0;
    int64_t slots = 0;
    int64_t epochs_offset(int rank) const;
    int64_t epochs_bytes() const;
    int64_t block_bytes(int rank) const { return epochs_offset(rank) + epochs_bytes(); }
  };
  /// `offsets` are the ranks' blocks'; `charges` are for this rank's share, and for its epochs.
  ShmWindow(std::shared_ptr<Peers> peers, std::shared_ptr<Health> health,
            std::shared_ptr<Mapping> mapping, std::unique_ptr<SharedBlock> own,
            std::vector<int64_t> offsets, Shape shape, std::array<Charge, 2> charges,
            std::chrono::milliseconds timeout, std::shared_ptr<WaitClock> clock);

  at::Tensor memory() override;
  at::Tensor view() override;
  void discard() override;
  void publish(int64_t slot, uint64_t epoch, const Published& what) override;
  void wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) override;

 private:
  std::atomic<uint64_t>& epoch_of(int rank, int64_t slot) const;
  void check_rank(int rank) const;

  std::shared_ptr<Peers> peers_;
  std::shared_ptr<Health> health_;
  std::shared_ptr<Mapping> mapping_;
  std::shared_ptr<SharedBlock> own_;
  std::vector<int64_t> offsets_;
  Shape shape_;
  std::array<Charge, 2> charges_;
  std::shared_ptr<PrivateView> view_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<WaitClock> clock_;
};

/// The window of a group of one: private memory, which is its own view.
class SingleWindow final : public Window {
 public:
  SingleWindow(int64_t bytes, int64_t slots, const std::shared_ptr<Ledger>& ledger,
               Category category);
  at::Tensor memory() override { return memory_; }
  at::Tensor view() override { return memory_; }
  void discard() override {}
  void publish(int64_t slot, uint64_t epoch, const Published& what) override;
  void wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) override;

 private:
  at::Tensor memory_;
  std::vector<uint64_t> epochs_;
};

}  // namespace zero::comm
