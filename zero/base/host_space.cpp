#include "zero/base/host_space.h"

#include <ATen/ceil_div.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <optional>

namespace zero {

namespace {

// Returns how much a limit on address space (ulimit -v) leaves, or the largest number.
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
  // Half of the addresses that a limit leaves are for everything else.
  size_t wanted = at::round_up(std::min(4 * machine_, addresses_left() / 2), kHugePage);
  for (; wanted >= kHugePage; wanted = at::round_up(wanted / 2, kHugePage)) {
    mapping_ = MemoryMapping({.bytes = wanted, .alignment = kHugePage, .counted = false});
    if (mapping_ || wanted == kHugePage) break;
  }
  if (!mapping_) return;  // every `take` is refused
  mapping_.advise_huge(mapping_.bytes());
  resident_pages_.assign(mapping_.bytes() / kHugePage, false);
  heap_ = RangeHeap(0, mapping_.bytes());
}

size_t HostSpace::offset_of(const void* data) const {
  return static_cast<size_t>(static_cast<const std::byte*>(data) - mapping_.data());
}

void* HostSpace::take(size_t bytes, bool lasting) {
  if (bytes > machine_) return nullptr;
  const size_t rounded = at::round_up(std::max<size_t>(bytes, 1), kPage);
  if (used() + rounded > machine_) return nullptr;
  std::optional<size_t> begin;
  if (lasting) begin = heap_.last_fit(rounded, resident_end_ * kHugePage);
  if (!begin) begin = heap_.best_fit(rounded);
  if (!begin) return nullptr;
  heap_.take(*begin, rounded);
  if (touch(*begin, rounded)) ++system_requests_;
  return mapping_.data() + *begin;
}

size_t HostSpace::size_of(void* data) const {
  return contains(data) ? heap_.size_of(offset_of(data)) : 0;
}

void HostSpace::give(void* data) { heap_.give(offset_of(data)); }

void* HostSpace::keep(void* data, size_t begin, size_t end) {
  const size_t from = begin / kPage * kPage;
  heap_.keep(offset_of(data), from, std::min(size_of(data), at::round_up(end, kPage)));
  return static_cast<std::byte*>(data) + from;
}

void HostSpace::limit_resident(size_t bytes) {
  const auto& holes = heap_.holes();
  for (auto hole = holes.rbegin();
       hole != holes.rend() && resident_ > bytes && hole->first >= kHugePage; ++hole)
    release(hole->second, hole->first, resident_ - bytes);
}

// Notes that a range is about to be touched. Returns true if some of it was not resident.
bool HostSpace::touch(size_t begin, size_t bytes) {
  bool fresh = false;
  const size_t first = begin / kHugePage;
  const size_t last = (begin + bytes - 1) / kHugePage;
  for (size_t page = first; page <= last; ++page) {
    if (resident_pages_[page]) continue;
    resident_pages_[page] = fresh = true;
    resident_ += kHugePage;
  }
  resident_end_ = std::max(resident_end_, last + 1);
  return fresh;
}

// Gives back resident huge pages that lie completely in a hole: at least `most` bytes if there are
// that many. It takes the last pages, since blocks are cut from a hole's front.
void HostSpace::release(size_t begin, size_t bytes, size_t most) {
  const size_t first = at::round_up(begin, kHugePage) / kHugePage;
  size_t page = (begin + bytes) / kHugePage;
  for (size_t released = 0; page-- > first && released < most;) {
    if (!resident_pages_[page]) continue;
    mapping_.discard(page * kHugePage, kHugePage);
    resident_pages_[page] = false;
    resident_ -= kHugePage;
    released += kHugePage;
  }
  while (resident_end_ > 0 && !resident_pages_[resident_end_ - 1]) --resident_end_;
}

}  // namespace zero
