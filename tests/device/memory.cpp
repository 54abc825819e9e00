#include "tests/device/memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>

namespace zero::simulated {

namespace {

// The memory of all devices together; it is nothing but addresses until it is used.
constexpr size_t kAddresses = size_t{1} << 33U;
constexpr size_t kGranule = 512;

}  // namespace

Memory::Memory() {
  void* base =
      mmap(nullptr, 2 * kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(base != MAP_FAILED, "simulated device: the system has no ", 2 * kAddresses,
              " bytes of addresses");
  base_ = next_ = static_cast<char*>(base);
  TORCH_CHECK(mprotect(base_ + kAddresses, kAddresses, PROT_READ | PROT_WRITE) == 0,
              "simulated device: the system refuses memory");
}

bool Memory::owns(const void* pointer) const {
  return pointer >= base_ && pointer < base_ + kAddresses;
}

char* Memory::backing(const void* pointer) {
  return static_cast<char*>(const_cast<void*>(pointer)) + kAddresses;
}

const Memory::Block& Memory::take(size_t bytes, Actor stream, size_t limit, bool poison) {
  const size_t size = (bytes + kGranule - 1) / kGranule * kGranule;
  auto& usage = usage_[static_cast<size_t>(device_of(stream))];
  auto& list = free_[{stream, size}];
  Block block{.data = nullptr, .bytes = size, .stream = stream, .used_on = {}};
  if (!list.empty()) {
    block = list.back();
    list.pop_back();
  } else {
    if (usage.reserved + size > limit) empty_cache();
    TORCH_CHECK_WITH(OutOfMemoryError, usage.reserved + size <= limit,
                     "simulated device: out of memory. Tried to allocate ", size, " bytes; device ",
                     device_of(stream), " has ", limit, ", of which ", usage.allocated,
                     " are allocated.");
    TORCH_CHECK(owns(next_ + size), "simulated device: its addresses are used up");
    block.data = next_;
    next_ += size;
    usage.reserved += size;
    // Nobody has ever had it, so the host may write it.
    if (poison) std::memset(backing(block.data), 0xff, size);
  }
  usage.allocated += size;
  usage.peak = std::max(usage.peak, usage.allocated);
  return live_.emplace(block.data, block).first->second;
}

Memory::Block* Memory::find(const void* pointer) {
  auto after = live_.upper_bound(static_cast<const char*>(pointer));
  if (after == live_.begin()) return nullptr;
  Block& block = (--after)->second;
  return pointer < block.data + block.bytes ? &block : nullptr;
}

Memory::Block Memory::remove(void* pointer) {
  auto node = live_.extract(static_cast<char*>(pointer));
  TORCH_CHECK(!node.empty(), "simulated device: ", pointer, " is freed, but not allocated");
  usage_[static_cast<size_t>(device_of(node.mapped().stream))].allocated -= node.mapped().bytes;
  return std::move(node.mapped());
}

void Memory::give_back(const Block& block) {
  auto& list = free_[{block.stream, block.bytes}];
  list.push_back(block);
  list.back().used_on.clear();
}

void Memory::empty_cache() {
  for (auto& [key, list] : free_) {
    for (const Block& block : list) {
      usage_[static_cast<size_t>(device_of(block.stream))].reserved -= block.bytes;
    }
    list.clear();
  }
}

void Memory::reset_peak(int device) {
  auto& usage = usage_[static_cast<size_t>(device)];
  usage.peak = usage.allocated;
}

}  // namespace zero::simulated
