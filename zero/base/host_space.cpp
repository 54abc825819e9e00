#include "zero/base/host_space.h"

#include <ATen/ceil_div.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <fstream>

namespace zero {

namespace {

// What a limit on address space (ulimit -v) leaves, or the largest number.
size_t addresses_left() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const size_t used = pages * HostSpace::kPage;
  return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

}  // namespace

HostSpace::HostSpace() {
  struct sysinfo info {};
  sysinfo(&info);
  machine_ = (info.totalram + info.totalswap) * info.mem_unit;
  // Half of what a limit leaves is for everything else.
  size_t wanted = at::round_up(std::min(4 * machine_, addresses_left() / 2), kHugePage);
  void* memory = MAP_FAILED;
  for (; wanted >= kHugePage; wanted = at::round_up(wanted / 2, kHugePage)) {
    reserved_bytes_ = wanted + kHugePage;
    memory = mmap(nullptr, reserved_bytes_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED || wanted == kHugePage) break;
  }
  if (memory == MAP_FAILED) return;  // every `take` is refused
  reserved_ = static_cast<std::byte*>(memory);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  base_ = reserved_ + (at::round_up(address, kHugePage) - address);
  bytes_ = wanted;
  madvise(base_, bytes_, MADV_HUGEPAGE);  // a wish: without huge pages it works as well
  resident_pages_.assign(bytes_ / kHugePage, false);
  add_hole(base_, bytes_);
}

HostSpace::~HostSpace() {
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
}

void* HostSpace::take(size_t bytes, bool lasting) {
  if (bytes > machine_) return nullptr;
  const size_t rounded = at::round_up(std::max<size_t>(bytes, 1), kPage);
  if (used_ + rounded > machine_) return nullptr;
  auto* begin = lasting ? high_end(rounded) : nullptr;
  if (begin == nullptr) begin = best_fit(rounded);
  if (begin == nullptr) return nullptr;
  const auto hole = std::prev(holes_.upper_bound(begin));
  auto* const hole_begin = hole->first;
  auto* const hole_end = hole_begin + hole->second;
  remove_hole(hole);
  if (hole_begin < begin) add_hole(hole_begin, static_cast<size_t>(begin - hole_begin));
  if (begin + rounded < hole_end)
    add_hole(begin + rounded, static_cast<size_t>(hole_end - begin) - rounded);
  if (touch(begin, rounded)) ++system_requests_;
  blocks_.emplace(begin, rounded);
  used_ += rounded;
  return begin;
}

// The front of the smallest hole that has as many bytes; null if none has.
std::byte* HostSpace::best_fit(size_t bytes) const {
  const auto best = holes_by_size_.lower_bound({bytes, nullptr});
  return best == holes_by_size_.end() ? nullptr : best->second;
}

// The last bytes of the last hole that has as many where memory has been touched; null if none has.
std::byte* HostSpace::high_end(size_t bytes) const {
  auto* const touched = base_ + resident_end_ * kHugePage;
  for (auto hole = holes_.rbegin(); hole != holes_.rend(); ++hole) {
    auto* const end = std::min(hole->first + hole->second, touched);
    if (end >= hole->first + bytes) return end - bytes;
  }
  return nullptr;
}

size_t HostSpace::size_of(void* data) const {
  const auto block = blocks_.find(data);
  return block == blocks_.end() ? 0 : block->second;
}

void HostSpace::give(void* data) {
  const auto block = blocks_.find(data);
  auto* begin = static_cast<std::byte*>(data);
  size_t length = block->second;
  used_ -= length;
  blocks_.erase(block);
  auto next = holes_.lower_bound(begin);
  if (next != holes_.end() && next->first == begin + length) {
    length += next->second;
    remove_hole(next++);
  }
  next = holes_.lower_bound(begin);
  if (next != holes_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      length += previous->second;
      remove_hole(previous);
    }
  }
  add_hole(begin, length);
}

void* HostSpace::keep(void* data, size_t begin, size_t end) {
  const auto block = blocks_.find(data);
  auto* const first = static_cast<std::byte*>(data);
  const size_t length = block->second;
  const size_t from = begin / kPage * kPage;
  const size_t to = std::min(length, at::round_up(end, kPage));
  blocks_.erase(block);
  blocks_.emplace(first + from, to - from);
  // What is before and behind becomes blocks of its own, which are given back.
  if (from > 0) {
    blocks_.emplace(first, from);
    give(first);
  }
  if (to < length) {
    blocks_.emplace(first + to, length - to);
    give(first + to);
  }
  return first + from;
}

void HostSpace::limit_resident(size_t bytes) {
  for (auto hole = holes_by_size_.rbegin();
       hole != holes_by_size_.rend() && resident_ > bytes && hole->first >= kHugePage; ++hole)
    release(hole->second, hole->first, resident_ - bytes);
}

void HostSpace::add_hole(std::byte* begin, size_t bytes) {
  holes_.emplace(begin, bytes);
  holes_by_size_.emplace(bytes, begin);
}

void HostSpace::remove_hole(Holes::iterator hole) {
  holes_by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

// Notes that a range is about to be touched; true if some of it was not resident.
bool HostSpace::touch(std::byte* begin, size_t bytes) {
  bool fresh = false;
  const auto first = static_cast<size_t>(begin - base_) / kHugePage;
  const auto last = (static_cast<size_t>(begin - base_) + bytes - 1) / kHugePage;
  for (size_t page = first; page <= last; ++page) {
    if (resident_pages_[page]) continue;
    resident_pages_[page] = fresh = true;
    resident_ += kHugePage;
  }
  resident_end_ = std::max(resident_end_, last + 1);
  return fresh;
}

// Gives back resident huge pages that lie whole in a hole, at least `most` bytes if there are as
// many: the last ones, since blocks are cut from a hole's front.
void HostSpace::release(std::byte* begin, size_t bytes, size_t most) {
  const auto from = static_cast<size_t>(begin - base_);
  const size_t first = at::round_up(from, kHugePage) / kHugePage;
  size_t page = (from + bytes) / kHugePage;
  for (size_t released = 0; page-- > first && released < most;) {
    if (!resident_pages_[page]) continue;
    madvise(base_ + page * kHugePage, kHugePage, MADV_DONTNEED);
    resident_pages_[page] = false;
    resident_ -= kHugePage;
    released += kHugePage;
  }
  while (resident_end_ > 0 && !resident_pages_[resident_end_ - 1]) --resident_end_;
}

}  // namespace zero
