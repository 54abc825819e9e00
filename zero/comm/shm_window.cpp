#include "zero/comm/shm_window.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <utility>

#include "zero/base/error.h"

namespace zero::comm {
namespace {

void check_slot(int64_t slot, size_t slots) {
  if (slot < 0 || slot >= static_cast<int64_t>(slots)) {
    throw CommError(fmt::format("A window of {} slots has no slot {}.", slots, slot));
  }
}

void check_epoch(int64_t slot, uint64_t now, uint64_t epoch) {
  if (epoch < now) {
    throw CommError(fmt::format("Slot {} of a window is at epoch {}; it cannot go back to {}.",
                                slot, now, epoch));
  }
}

}  // namespace

int64_t ShmWindow::Shape::epochs_offset(int rank) const {
  return rank == 0 ? (bytes + 63) / 64 * 64 : 0;  // on a cache line of their own
}

int64_t ShmWindow::Shape::epochs_bytes() const {
  return std::max<int64_t>(1, slots) * static_cast<int64_t>(sizeof(std::atomic<uint64_t>));
}

ShmWindow::ShmWindow(std::shared_ptr<Peers> peers, std::shared_ptr<Health> health,
                     std::shared_ptr<Mapping> mapping, std::unique_ptr<SharedBlock> own,
                     std::vector<int64_t> offsets, Shape shape, std::array<Charge, 2> charges,
                     std::chrono::milliseconds timeout, std::shared_ptr<WaitClock> clock)
    : peers_(std::move(peers)),
      health_(std::move(health)),
      mapping_(std::move(mapping)),
      own_(std::move(own)),
      offsets_(std::move(offsets)),
      shape_(shape),
      charges_(std::move(charges)),
      view_(std::make_shared<PrivateView>(*mapping_, offsets_[0], shape.bytes)),
      timeout_(timeout),
      clock_(std::move(clock)) {}

// A fresh block is zero, as atomic zeros are. Peers may look before the owner gets here.
std::atomic<uint64_t>& ShmWindow::epoch_of(int rank, int64_t slot) const {
  auto* first = reinterpret_cast<std::atomic<uint64_t>*>(
      mapping_->at(offsets_[static_cast<size_t>(rank)] + shape_.epochs_offset(rank)));
  return first[slot];
}

at::Tensor ShmWindow::memory() {
  return at::from_blob(
      mapping_->at(offsets_[0]), {shape_.bytes}, [mapping = mapping_](void*) {},
      at::TensorOptions(at::kByte));
}

at::Tensor ShmWindow::view() {
  return at::from_blob(
      view_->data(), {shape_.bytes}, [view = view_](void*) {}, at::TensorOptions(at::kByte));
}

void ShmWindow::discard() { view_->discard(); }

void ShmWindow::publish(int64_t slot, uint64_t epoch, const Published& /*what*/) {
  check_slot(slot, static_cast<size_t>(shape_.slots));
  auto& mine = epoch_of(peers_->rank(), slot);
  check_epoch(slot, mine.load(std::memory_order_relaxed), epoch);
  mine.store(epoch, std::memory_order_release);
  futex_wake(&mine);  // the low half of the epoch is the futex
}

void ShmWindow::wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) {
  check_rank(rank);
  check_slot(slot, static_cast<size_t>(shape_.slots));
  const auto& theirs = epoch_of(rank, slot);
  const auto look = [&]() -> std::optional<uint32_t> {
    const auto now = theirs.load(std::memory_order_acquire);
    if (now >= epoch) return std::nullopt;
    return static_cast<uint32_t>(now);
  };
  const ClockedScope clocked(*clock_);
  if (!look()) return;  // also if the group has failed since, for the bytes are there
  health_->check();
  try {
    peers_->wait(rank, &theirs, look, deadline_after(timeout_), [&] {
      return fmt::format("a read of window slot {}{} at epoch {} (rank {} is at {})", slot,
                         label.empty() ? "" : fmt::format(" '{}'", label), epoch,
                         peers_->number(rank), theirs.load(std::memory_order_relaxed));
    });
  } catch (...) {
    health_->fail(std::current_exception());
    throw;
  }
}

void ShmWindow::check_rank(int rank) const {
  if (rank < 0 || rank >= peers_->size()) {
    throw CommError(fmt::format("A window of {} ranks has no rank {}.", peers_->size(), rank));
  }
}

SingleWindow::SingleWindow(int64_t bytes, int64_t slots, const std::shared_ptr<Ledger>& ledger,
                           Category category)
    : memory_(private_tensor(bytes, at::kByte, ledger, category)),
      epochs_(static_cast<size_t>(slots)) {}

void SingleWindow::publish(int64_t slot, uint64_t epoch, const Published& /*what*/) {
  check_slot(slot, epochs_.size());
  auto& mine = epochs_[static_cast<size_t>(slot)];
  check_epoch(slot, mine, epoch);
  mine = epoch;
}

void SingleWindow::wait(int64_t slot, int rank, uint64_t epoch, std::string_view label) {
  check_slot(slot, epochs_.size());
  if (rank == 0 && epochs_[static_cast<size_t>(slot)] >= epoch) return;
  throw CommError(fmt::format(
      "A read of window slot {} '{}' of rank {} at epoch {} would wait forever in a group of one.",
      slot, label, rank, epoch));
}

}  // namespace zero::comm
