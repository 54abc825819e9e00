// Window over the shared-memory group: see Note [Epochs] in group.h.
#pragma once

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

/// Each rank's block holds its bytes, rounded up to whole cache lines, and then its epochs.
class ShmWindow final : public Window {
 public:
  ShmWindow(std::shared_ptr<Peers> peers, std::shared_ptr<Health> health,
            std::shared_ptr<Mapping> mapping, std::unique_ptr<SharedBlock> own,
            std::vector<int64_t> offsets, int64_t bytes, int64_t slots,
            std::chrono::milliseconds timeout, std::shared_ptr<WaitClock> clock);
  /// Bytes of a rank's block.
  static int64_t block_bytes(int64_t bytes, int64_t slots);

  at::Tensor local() override;
  at::Tensor peer(int rank) override;
  void publish(int64_t slot, uint64_t epoch) override;
  void wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) override;

 private:
  std::atomic<uint64_t>& epoch_of(int rank, int64_t slot) const;
  void check_rank(int rank) const;

  std::shared_ptr<Peers> peers_;
  std::shared_ptr<Health> health_;
  std::shared_ptr<Mapping> mapping_;
  std::shared_ptr<SharedBlock> own_;
  std::vector<int64_t> offsets_;
  int64_t bytes_;
  int64_t slots_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<WaitClock> clock_;
};

/// The window of a group of one: private memory.
class SingleWindow final : public Window {
 public:
  SingleWindow(int64_t bytes, int64_t slots, const std::shared_ptr<Ledger>& ledger,
               Category category);
  at::Tensor local() override { return memory_; }
  at::Tensor peer(int rank) override;
  void publish(int64_t slot, uint64_t epoch) override;
  void wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) override;

 private:
  at::Tensor memory_;
  std::vector<uint64_t> epochs_;
};

}  // namespace zero::comm
