#include "zero/engine/state_stream.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_memory.h"

namespace zero {

namespace {

// Large enough for a disk to be at its best, small enough that a few of them are little memory.
constexpr int64_t kBlockBytes = 4 << 20;

int64_t aligned(int64_t bytes) {
  return (bytes + store::kAlignment - 1) / store::kAlignment * store::kAlignment;
}

int64_t array_bytes(const StateStream::Unit& unit) { return aligned(unit.numel * 4); }

}  // namespace

StateStream::StateStream(std::vector<Unit> units, const Options& options,
                         const std::shared_ptr<Ledger>& ledger)
    : units_(std::move(units)), options_(options) {
  int64_t total = 0;
  int64_t most_arrays = 0;
  for (const auto& unit : units_) {
    base_.push_back(total);
    total += unit.arrays * array_bytes(unit);
    most_arrays = std::max(most_arrays, unit.arrays);
    if (unit.arrays > 0)
      block_bytes_ = std::max(block_bytes_, std::min(kBlockBytes, array_bytes(unit)));
  }
  folder_ = std::make_unique<store::Folder>(options_.folder);
  file_ = std::make_unique<store::File>(folder_->path() + "/optimizer", total, options_.file);
  frames_.resize(static_cast<size_t>(total > 0 ? options_.buffer_count : 0));
  for (auto& frame : frames_)
    frame.memory =
        host_zeros(most_arrays * block_bytes_ / 4, at::kFloat, ledger, Category::offload_buffers);
}

int64_t StateStream::blocks_of(int64_t unit) const {
  const auto& u = units_[static_cast<size_t>(unit)];
  return u.arrays == 0 ? 0 : (array_bytes(u) + block_bytes_ - 1) / block_bytes_;
}

// In the order of the update, and from its end to its beginning.
StateStream::Position StateStream::next(Position position) const {
  if (position.block + 1 < blocks_of(position.unit)) return {position.unit, position.block + 1};
  do position.unit = (position.unit + 1) % static_cast<int64_t>(units_.size());
  while (blocks_of(position.unit) == 0);
  return {position.unit, 0};
}

int64_t StateStream::offset(Position position, int64_t array) const {
  const auto unit = static_cast<size_t>(position.unit);
  return base_[unit] + array * array_bytes(units_[unit]) + position.block * block_bytes_;
}

int64_t StateStream::bytes_of(Position position) const {
  const auto& unit = units_[static_cast<size_t>(position.unit)];
  return std::min(block_bytes_, array_bytes(unit) - position.block * block_bytes_);
}

std::byte* StateStream::memory(Frame& frame, int64_t array) const {
  return static_cast<std::byte*>(frame.memory.data_ptr()) + array * block_bytes_;
}

StateStream::Frame* StateStream::find(Position position, Use use) {
  for (auto& frame : frames_) {
    if (frame.use == use && frame.position == position) return &frame;
  }
  return nullptr;
}

void StateStream::finish(Frame& frame) {
  // Where one fails the others end with the vector: none runs on in memory that is used again.
  auto transfers = std::exchange(frame.transfers, {});
  if (frame.use == Use::writing) frame.use = Use::none;
  for (auto& transfer : transfers) transfer.wait();
}

void StateStream::settle() {
  for (auto& frame : frames_) {
    finish(frame);
    frame.use = Use::none;
  }
}

// One that needs no waiting, or null.
StateStream::Frame* StateStream::free_frame() {
  for (auto& frame : frames_) {
    if (frame.use == Use::writing &&
        std::all_of(frame.transfers.begin(), frame.transfers.end(),
                    [](const auto& transfer) { return transfer.done(); }))
      finish(frame);
    if (frame.use == Use::none) return &frame;
  }
  return nullptr;
}

// The frame that holds, or is getting, a block.
StateStream::Frame& StateStream::take(Position position) {
  if (auto* frame = find(position, Use::reading)) return *frame;
  if (auto* frame = find(position, Use::writing)) finish(*frame);
  auto* frame = free_frame();
  if (frame == nullptr) {
    // The oldest that is written; else one that was read ahead for a unit that was left out.
    for (const auto use : {Use::writing, Use::reading}) {
      for (auto& candidate : frames_) {
        if (candidate.use == use && (frame == nullptr || candidate.turn < frame->turn))
          frame = &candidate;
      }
      if (frame != nullptr) break;
    }
    ensure(frame != nullptr, "no buffer is left for the optimizer's states");
    finish(*frame);
  }
  start_reading(*frame, position);
  return *frame;
}

void StateStream::start_reading(Frame& frame, Position position) {
  frame.position = position;
  frame.use = Use::reading;
  frame.turn = ++turn_;
  const auto arrays = units_[static_cast<size_t>(position.unit)].arrays;
  for (int64_t a = 0; a < arrays; ++a) {
    frame.transfers.push_back(
        file_->read(offset(position, a), memory(frame, a), bytes_of(position)));
  }
}

void StateStream::start_writing(Frame& frame) {
  frame.use = Use::writing;
  frame.turn = ++turn_;
  const auto arrays = units_[static_cast<size_t>(frame.position.unit)].arrays;
  for (int64_t a = 0; a < arrays; ++a) {
    frame.transfers.push_back(
        file_->write(offset(frame.position, a), memory(frame, a), bytes_of(frame.position)));
  }
}

// As far as there are buffers, of which one stays for what is written.
void StateStream::read_ahead(Position position) {
  const Position here = position;
  for (int64_t ahead = 0; ahead + 2 < options_.buffer_count; ++ahead) {
    position = next(position);
    if (position == here || find(position, Use::writing) != nullptr) return;
    if (find(position, Use::reading) != nullptr) continue;
    auto* frame = free_frame();
    if (frame == nullptr) return;
    start_reading(*frame, position);
  }
}

void StateStream::for_each_block(int64_t unit, const std::function<void(const Block&)>& update) {
  const auto& u = units_[static_cast<size_t>(unit)];
  for (int64_t b = 0; b < blocks_of(unit); ++b) {
    const Position here{unit, b};
    auto& frame = take(here);
    finish(frame);
    frame.use = Use::updating;
    if (options_.read_ahead) read_ahead(here);
    Block block{.begin = b * block_bytes_ / 4,
                .end = std::min(u.numel, (b + 1) * block_bytes_ / 4),
                .arrays = {}};
    for (int64_t a = 0; a < u.arrays; ++a)
      block.arrays.push_back(reinterpret_cast<float*>(memory(frame, a)));
    update(block);
    start_writing(frame);
    if (!options_.write_behind) finish(frame);
  }
}

at::Tensor StateStream::read(int64_t unit, int64_t array) {
  settle();
  const auto& u = units_[static_cast<size_t>(unit)];
  auto values = at::empty({u.numel}, at::kFloat);
  auto& frame = frames_.front();
  for (int64_t b = 0; b < blocks_of(unit); ++b) {
    const Position position{unit, b};
    file_->read(offset(position, array), memory(frame, 0), bytes_of(position)).wait();
    const int64_t begin = b * block_bytes_ / 4;
    const auto count = std::min(u.numel - begin, block_bytes_ / 4);
    std::memcpy(values.mutable_data_ptr<float>() + begin, memory(frame, 0),
                static_cast<size_t>(count) * 4);
  }
  return values;
}

void StateStream::write(int64_t unit, int64_t array, int64_t begin, const at::Tensor& values) {
  settle();
  const auto source = values.contiguous();
  const int64_t end = begin + source.numel();
  const int64_t block_numel = block_bytes_ / 4;
  const int64_t numel = units_[static_cast<size_t>(unit)].numel;
  auto& frame = frames_.front();
  for (int64_t b = begin / block_numel; b * block_numel < end; ++b) {
    const Position position{unit, b};
    const int64_t first = std::max(begin, b * block_numel);
    const int64_t last = std::min(end, (b + 1) * block_numel);
    const bool whole = first == b * block_numel && last == std::min(numel, (b + 1) * block_numel);
    if (!whole) file_->read(offset(position, array), memory(frame, 0), bytes_of(position)).wait();
    std::memcpy(memory(frame, 0) + (first - b * block_numel) * 4,
                source.const_data_ptr<float>() + (first - begin),
                static_cast<size_t>(last - first) * 4);
    file_->write(offset(position, array), memory(frame, 0), bytes_of(position)).wait();
  }
}

}  // namespace zero
