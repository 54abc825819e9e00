#include "zero/store/disk_tier.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_memory.h"
#include "zero/base/parallel.h"
#include "zero/store/speed.h"

namespace zero::store {

namespace {

// Returns the fewest elements of an array that fill whole pages.
int64_t elements_of_pages(const DiskTier::Array& array) {
  const auto bytes = array.entries * static_cast<int64_t>(c10::elementSize(array.dtype));
  return DiskTier::kEntryBlock * (kAlignment / std::gcd(bytes, kAlignment));
}

struct BlockSizes {
  int64_t part_numel = DiskTier::kPartNumel;
  int64_t block_numel = 0;
  int64_t frame_bytes = 0;  // of a block of all arrays of a unit
};

BlockSizes block_sizes(const std::vector<DiskTier::Unit>& units) {
  BlockSizes sizes;
  int64_t most_bytes = 0;      // of kEntryBlock elements of all arrays of a unit that is updated
  int64_t pages = kAlignment;  // elements of any array that fill whole pages
  for (const auto& unit : units) {
    int64_t bytes = 0;
    for (const auto& array : unit.arrays) {
      bytes += array.entries * static_cast<int64_t>(c10::elementSize(array.dtype));
      pages = std::max(pages, elements_of_pages(array));
    }
    if (bytes == 0) continue;
    if (unit.updated) most_bytes = std::max(most_bytes, bytes);
    sizes.block_numel = std::max(sizes.block_numel, unit.numel);
  }
  // A block or a part of any array begins on a multiple of kAlignment bytes.
  sizes.part_numel = std::max(sizes.part_numel, pages);
  sizes.block_numel = std::min(DiskTier::kBlockNumel, at::round_up(sizes.block_numel, pages));
  // A frame is also the buffer for reading and writing single arrays.
  sizes.frame_bytes = std::max<int64_t>(most_bytes, 4 * DiskTier::kEntryBlock) *
                      (sizes.block_numel / DiskTier::kEntryBlock);
  return sizes;
}

}  // namespace

int64_t DiskTier::update_memory(const std::vector<Unit>& units, int64_t buffer_count) {
  const auto sizes = block_sizes(units);
  int64_t blocks = 0;
  for (const auto& unit : units) {
    if (unit.updated && !unit.arrays.empty() && unit.numel > 0)
      blocks += at::ceil_div(unit.numel, sizes.block_numel);
  }
  return std::min(blocks, buffer_count) * sizes.frame_bytes;
}

DiskTier::DiskTier(std::vector<Unit> units, const Options& options,
                   const std::shared_ptr<Ledger>& ledger)
    : units_(std::move(units)), options_(options), ledger_(ledger) {
  int64_t total = 0;
  for (int64_t u = 0; u < static_cast<int64_t>(units_.size()); ++u) {
    base_.push_back(total);
    front_.emplace_back(unit(u).arrays.size(), uint8_t{0});
    for (int64_t a = 0; a < static_cast<int64_t>(unit(u).arrays.size()); ++a) {
      total += whole_bytes(u, a) * (unit(u).arrays[static_cast<size_t>(a)].doubled ? 2 : 1);
      const auto& array = unit(u).arrays[static_cast<size_t>(a)];
      if (!array.write || (array.read && array.doubled)) ahead_to_next_step_ = false;
    }
  }
  const auto sizes = block_sizes(units_);
  part_numel_ = sizes.part_numel;
  block_numel_ = sizes.block_numel;
  frame_bytes_ = sizes.frame_bytes;
  std::vector<std::string> files;
  std::vector<std::string> made;
  for (const auto& folder : options_.folders) {
    folders_.push_back(std::make_unique<Folder>(folder));
    made.push_back(folders_.back()->path());
    files.push_back(made.back() + "/states");
  }
  constexpr int64_t kMeasured = 64 << 20;
  const auto shares =
      made.size() > 1 ? measure_speeds(made, kMeasured, options_.file) : std::vector<double>{};
  file_ = std::make_unique<File>(files, shares, total, options_.file);
  frames_.resize(static_cast<size_t>(total > 0 ? options_.buffer_count : 0));
  unwritten_.assign(units_.size(), 0);
}

DiskTier::FramesLock::FramesLock(DiskTier& tier) : tier_(tier) {
  tier_.mutex_.lock();
  const std::lock_guard lock(tier_.written_mutex_);
  tier_.frames_locked_ = true;
}

DiskTier::FramesLock::~FramesLock() {
  {
    const std::lock_guard lock(tier_.written_mutex_);
    tier_.frames_locked_ = false;
  }
  tier_.mutex_.unlock();
  tier_.written_.notify_all();
}

// Returns whether `for_each_block` has anything to update in this unit.
bool DiskTier::updates(int64_t unit) const {
  return this->unit(unit).updated && !this->unit(unit).arrays.empty() && this->unit(unit).numel > 0;
}

void* DiskTier::buffer(Frame& frame) {
  if (!frame.memory.defined())
    frame.memory = host_zeros(frame_bytes_, at::kByte, ledger_, Category::offload_buffers);
  return frame.memory.data_ptr();
}

void DiskTier::flip(int64_t unit, int64_t array) {
  auto& copy = front_[static_cast<size_t>(unit)][static_cast<size_t>(array)];
  copy = copy == 0 ? 1 : 0;
}

void DiskTier::wait_written(int64_t unit) {
  while (true) {
    {
      std::unique_lock lock(written_mutex_);
      const auto& left = unwritten_[static_cast<size_t>(unit)];
      // While a thread updates, it completes its frames as it goes on.
      written_.wait(lock, [&] { return left == 0 || !frames_locked_; });
      if (left == 0) return;
    }
    const FramesLock lock(*this);
    for (auto& frame : frames_) {
      if (frame.use == Use::writing && frame.position.unit == unit) finish(frame);
    }
  }
}

void DiskTier::settle() {
  const FramesLock lock(*this);
  for (auto& frame : frames_) {
    if (frame.use == Use::writing) finish(frame);
  }
}

void DiskTier::end_step() {
  if (ahead_to_next_step_) return;
  const FramesLock lock(*this);
  finish_all();
  for (auto& frame : frames_) frame.memory = at::Tensor();
}

int64_t DiskTier::entries_of(int64_t unit, int64_t array, int64_t elements) const {
  const int64_t entries = this->unit(unit).arrays[static_cast<size_t>(array)].entries;
  return entries == kEntryBlock ? elements : elements / kEntryBlock * entries;
}

int64_t DiskTier::array_bytes(int64_t unit, int64_t array, int64_t elements) const {
  return entries_of(unit, array, elements) *
         static_cast<int64_t>(
             c10::elementSize(this->unit(unit).arrays[static_cast<size_t>(array)].dtype));
}

int64_t DiskTier::whole_bytes(int64_t unit, int64_t array) const {
  return at::round_up(array_bytes(unit, array, this->unit(unit).numel), kAlignment);
}

int64_t DiskTier::blocks_of(int64_t unit) const {
  return at::ceil_div(this->unit(unit).numel, block_numel_);
}

// Returns the unit that is read `index` + 1 places after `unit`. If the next step may be read
// ahead, the first unit follows the last one.
std::optional<int64_t> DiskTier::next_in_order(int64_t unit, int64_t index) const {
  const int64_t next = unit + 1 + index;
  const auto units = static_cast<int64_t>(units_.size());
  return next < units || ahead_to_next_step_ ? std::optional(next % units) : std::nullopt;
}

int64_t DiskTier::offset(Position position, int64_t array, bool front) const {
  const auto u = static_cast<size_t>(position.unit);
  const auto& arrays = units_[u].arrays;
  int64_t at = base_[u];
  for (int64_t a = 0; a < array; ++a)
    at += whole_bytes(position.unit, a) * (arrays[static_cast<size_t>(a)].doubled ? 2 : 1);
  const auto a = static_cast<size_t>(array);
  if (arrays[a].doubled && (front_[u][a] == 0) != front) at += whole_bytes(position.unit, array);
  return at + array_bytes(position.unit, array, position.block * block_numel_);
}

int64_t DiskTier::bytes_of(Position position, int64_t array) const {
  const int64_t block_bytes = array_bytes(position.unit, array, block_numel_);
  return std::min(block_bytes, whole_bytes(position.unit, array) - position.block * block_bytes);
}

std::byte* DiskTier::memory(const Frame& frame, int64_t unit, int64_t array) const {
  auto* data = static_cast<std::byte*>(frame.memory.data_ptr());
  for (int64_t a = 0; a < array; ++a) data += array_bytes(unit, a, block_numel_);
  return data;
}

DiskTier::Frame* DiskTier::find(Position position, Use use) {
  for (auto& frame : frames_) {
    if (frame.use == use && frame.position == position) return &frame;
  }
  return nullptr;
}

void DiskTier::finish(Frame& frame) {
  // If one transfer fails, destroying the vector ends the others, so that none goes on in memory
  // that is used again.
  auto transfers = std::exchange(frame.transfers, {});
  const bool written = frame.use == Use::writing;
  if (written) frame.use = Use::none;
  std::exception_ptr failure;
  try {
    std::optional<comm::ClockedScope> counted;
    std::optional<Timeline::Scope> waiting;
    if (!transfers.empty() && !upcoming_) counted.emplace(clock_);
    if (!transfers.empty() && options_.file.timeline)
      waiting.emplace(*options_.file.timeline, Activity::wait_disk);
    for (auto& transfer : transfers) transfer.wait();
  } catch (...) {
    failure = std::current_exception();
    transfers.clear();
  }
  if (written) {
    {
      const std::lock_guard lock(written_mutex_);
      --unwritten_[static_cast<size_t>(frame.position.unit)];
    }
    written_.notify_all();
  }
  if (failure) std::rethrow_exception(failure);
}

void DiskTier::finish_all() {
  for (auto& frame : frames_) {
    finish(frame);
    frame.use = Use::none;
  }
}

// Returns a frame that is free without waiting, or null. It also frees every frame whose writes are
// done.
DiskTier::Frame* DiskTier::free_frame() {
  Frame* found = nullptr;
  for (auto& frame : frames_) {
    if (frame.use == Use::writing &&
        std::all_of(frame.transfers.begin(), frame.transfers.end(),
                    [](const auto& transfer) { return transfer.done(); }))
      finish(frame);
    if (frame.use == Use::none && found == nullptr) found = &frame;
  }
  return found;
}

// Returns the frame that holds a block, or into which it is being read.
DiskTier::Frame& DiskTier::take(Position position) {
  if (auto* frame = find(position, Use::reading)) return *frame;
  if (auto* frame = find(position, Use::writing)) finish(*frame);
  auto* frame = free_frame();
  if (frame == nullptr) {
    // The oldest frame that is being written is taken; if there is none, the oldest that was read
    // ahead for a unit that was then left out.
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

void DiskTier::start_reading(Frame& frame, Position position) {
  frame.position = position;
  frame.use = Use::reading;
  frame.turn = ++turn_;
  buffer(frame);
  const auto& arrays = unit(position.unit).arrays;
  frame.read_from.clear();
  for (int64_t a = 0; a < static_cast<int64_t>(arrays.size()); ++a) {
    frame.read_from.push_back(offset(position, a, arrays[static_cast<size_t>(a)].write));
    if (!arrays[static_cast<size_t>(a)].read) continue;
    frame.transfers.push_back(file_->read(frame.read_from.back(), memory(frame, position.unit, a),
                                          bytes_of(position, a), Checks::by_caller, position.unit));
  }
}

void DiskTier::start_writing(Frame& frame) {
  frame.use = Use::writing;
  frame.turn = ++turn_;
  const auto& here = frame.position;
  {
    const std::lock_guard lock(written_mutex_);
    ++unwritten_[static_cast<size_t>(here.unit)];
  }
  const auto& arrays = unit(here.unit).arrays;
  for (int64_t a = 0; a < static_cast<int64_t>(arrays.size()); ++a) {
    if (!arrays[static_cast<size_t>(a)].write) continue;
    frame.transfers.push_back(file_->write(offset(here, a, false), memory(frame, here.unit, a),
                                           bytes_of(here, a), Checks::by_caller, here.unit));
  }
}

// Reads as far ahead as there are buffers, and leaves one for writing.
void DiskTier::read_ahead(Position position) {
  const Position here = position;
  int64_t units_ahead = 0;
  for (int64_t ahead = 0; ahead + 2 < options_.buffer_count; ++ahead) {
    if (++position.block == blocks_of(position.unit)) {
      do {
        const int64_t index = units_ahead++;
        const auto next = upcoming_ ? upcoming_(index) : next_in_order(here.unit, index);
        if (!next) return;
        position = {*next, 0};
      } while (!updates(position.unit));
    }
    if (position == here || find(position, Use::writing) != nullptr) return;
    if (find(position, Use::reading) != nullptr) continue;
    auto* frame = free_frame();
    if (frame == nullptr) return;
    start_reading(*frame, position);
  }
}

// Checks and records the pages that begin in the part; the last of them may reach beyond its
// elements.
void DiskTier::update_part(const Frame& frame, int64_t part,
                           const std::function<void(const Block&)>& update) {
  const auto& here = frame.position;
  const auto& arrays = unit(here.unit).arrays;
  const auto count = static_cast<int64_t>(arrays.size());
  const int64_t first = part * part_numel_;
  const int64_t begin = here.block * block_numel_ + first;
  const int64_t end = here.block * block_numel_ + std::min(block_numel_, first + part_numel_);
  Block block{.begin = begin, .end = std::min(unit(here.unit).numel, end), .arrays = {}};
  const auto bytes = [&](int64_t a) {
    return std::min(array_bytes(here.unit, a, part_numel_),
                    bytes_of(here, a) - array_bytes(here.unit, a, first));
  };
  for (int64_t a = 0; a < count; ++a) {
    const int64_t at = array_bytes(here.unit, a, first);
    block.arrays.push_back(memory(frame, here.unit, a) + at);
    if (arrays[static_cast<size_t>(a)].read) {
      file_->verify(frame.read_from[static_cast<size_t>(a)] + at, block.arrays.back(), bytes(a));
    }
  }
  update(block);
  for (int64_t a = 0; a < count; ++a) {
    if (!arrays[static_cast<size_t>(a)].write) continue;
    file_->record(offset(here, a, false) + array_bytes(here.unit, a, first),
                  block.arrays[static_cast<size_t>(a)], bytes(a));
  }
}

void DiskTier::for_each_block(int64_t unit, const std::function<void(const Block&)>& update,
                              bool at_once) {
  const FramesLock lock(*this);
  const auto& u = this->unit(unit);
  for (int64_t b = 0; b < blocks_of(unit); ++b) {
    const Position here{unit, b};
    auto& frame = take(here);
    finish(frame);
    frame.use = Use::updating;
    if (options_.read_ahead) read_ahead(here);
    const int64_t numel = std::min(u.numel - b * block_numel_, block_numel_);
    const int64_t parts = at::ceil_div(numel, part_numel_);
    parallel_for(0, parts, at_once ? 1 : parts, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) update_part(frame, part, update);
    });
    start_writing(frame);
    if (!options_.write_behind) finish(frame);
  }
}

void DiskTier::for_each_part(
    int64_t unit, int64_t array, partition::Range entries, bool front,
    const std::function<void(partition::Range, const Pages&)>& visit) const {
  const auto element = static_cast<int64_t>(
      c10::elementSize(this->unit(unit).arrays[static_cast<size_t>(array)].dtype));
  const int64_t all = entries_of(unit, array, this->unit(unit).numel);
  ensure(entries.begin >= 0 && entries.end <= all, "a range lies within its array");
  if (entries.empty()) return;
  const int64_t of_block = entries_of(unit, array, block_numel_);
  for (int64_t block = entries.begin / of_block; block * of_block < entries.end; ++block) {
    const int64_t start = block * of_block;
    const auto part = partition::intersect(entries, {start, start + of_block});
    const int64_t begin = (part.begin - start) * element;
    const int64_t end = (part.end - start) * element;
    const int64_t first = begin / kAlignment * kAlignment;
    const int64_t last = at::round_up(end, kAlignment);
    visit(part, {.offset = offset({unit, block}, array, front) + first,
                 .bytes = last - first,
                 .begin = begin - first,
                 .filled = begin == first && (end == last || part.end == all)});
  }
}

at::Tensor DiskTier::read(int64_t unit, int64_t array, partition::Range entries) {
  return read_copy(unit, array, entries, true);
}

at::Tensor DiskTier::read_behind(int64_t unit, int64_t array, partition::Range entries) {
  return read_copy(unit, array, entries, false);
}

at::Tensor DiskTier::read_copy(int64_t unit, int64_t array, partition::Range entries, bool front) {
  const FramesLock lock(*this);
  finish_all();
  auto values =
      at::empty({entries.size()}, this->unit(unit).arrays[static_cast<size_t>(array)].dtype);
  auto* memory = static_cast<std::byte*>(buffer(frames_.front()));
  for_each_part(unit, array, entries, front, [&](partition::Range part, const Pages& pages) {
    const auto to = values.narrow(0, part.begin - entries.begin, part.size());
    file_->read(pages.offset, memory, pages.bytes).wait();
    std::memcpy(to.data_ptr(), memory + pages.begin, to.nbytes());
  });
  return values;
}

void DiskTier::write(int64_t unit, int64_t array, partition::Range entries,
                     const at::Tensor& values, Tier /*from*/) {
  write_copy(unit, array, entries, values, true);
}

void DiskTier::write_behind(int64_t unit, int64_t array, partition::Range entries,
                            const at::Tensor& values) {
  write_copy(unit, array, entries, values, false);
}

void DiskTier::write_copy(int64_t unit, int64_t array, partition::Range entries,
                          const at::Tensor& values, bool front) {
  ensure(values.numel() == entries.size(), "each entry has a value");
  const FramesLock lock(*this);
  finish_all();
  const auto contiguous =
      values.to(at::kCPU, this->unit(unit).arrays[static_cast<size_t>(array)].dtype).contiguous();
  auto* memory = static_cast<std::byte*>(buffer(frames_.front()));
  for_each_part(unit, array, entries, front, [&](partition::Range part, const Pages& pages) {
    const auto from = contiguous.narrow(0, part.begin - entries.begin, part.size());
    if (!pages.filled) file_->read(pages.offset, memory, pages.bytes).wait();
    std::memcpy(memory + pages.begin, from.const_data_ptr(), from.nbytes());
    file_->write(pages.offset, memory, pages.bytes).wait();
  });
}

void DiskTier::wait(Transfer& transfer) {
  const comm::ClockedScope counted(clock_);
  std::optional<Timeline::Scope> waiting;
  if (options_.file.timeline) waiting.emplace(*options_.file.timeline, Activity::wait_disk);
  transfer.wait();
}

Transfer DiskTier::start_write(int64_t unit, int64_t array, const void* from) {
  return file_->write(offset({unit, 0}, array), from, whole_bytes(unit, array), Checks::here, unit);
}

Transfer DiskTier::start_read(int64_t unit, int64_t array, void* to) {
  // A running update writes the other copy of a doubled array, so only other arrays must wait for
  // it.
  if (!this->unit(unit).arrays[static_cast<size_t>(array)].doubled) wait_written(unit);
  return file_->read(offset({unit, 0}, array), to, whole_bytes(unit, array), Checks::here, unit);
}

}  // namespace zero::store
