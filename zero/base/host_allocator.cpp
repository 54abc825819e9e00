#include "zero/base/host_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "zero/base/error.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace zero {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
/// From here on a block is a mapping of its own.
constexpr size_t kMapped = size_t{64} << 10;
/// Cached blocks of this many bytes are always allowed.
constexpr int64_t kCacheAllowance = int64_t{64} << 20;
/// No system gives a process more than 2^57 bytes; beyond this, a size class would overflow.
constexpr size_t kLargest = size_t{1} << 60;

class Counter {
 public:
  void add(int64_t bytes) {
    const int64_t now = current_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t seen = peak_.load(std::memory_order_relaxed);
    while (now > seen && !peak_.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
    }
  }
  Usage usage() const { return {current_.load(), peak_.load()}; }
  void reset_peak() { peak_.store(current_.load()); }

 private:
  std::atomic<int64_t> current_{0};
  std::atomic<int64_t> peak_{0};
};

/// A mapping of `bytes` bytes that starts on a huge page's border if it has room for one; null if
/// the system refuses.
void* map_block(size_t bytes) {
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* mapping =
      mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  if (slack == 0) return mapping;
  auto* start = static_cast<std::byte*>(mapping);
  void* aligned = start;
  size_t room = bytes + slack;
  std::align(kHugePage, bytes, aligned, room);
  auto* data = static_cast<std::byte*>(aligned);
  const auto before = static_cast<size_t>(data - start);
  if (before > 0) munmap(start, before);
  if (slack - before > 0) munmap(data + bytes, slack - before);
  madvise(data, bytes, MADV_HUGEPAGE);  // a wish: without huge pages the block works as well
  return data;
}

}  // namespace

size_t host_size_class(size_t bytes) {
  const size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

struct HostAllocator::Impl {
  struct Block {
    size_t bytes;
    uint64_t freed_at = 0;
  };
  using Blocks = std::unordered_map<void*, Block>;

  std::mutex mutex;
  Blocks blocks;  // every mapping, in use or cached
  std::map<size_t, std::vector<Blocks::iterator>>
      cached;  // by size class; the longest unused first
  uint64_t clock = 0;
  Counter used;
  Counter reserved;
  std::atomic<int64_t> system_requests{0};

  void* take(size_t bytes);
  void* take_mapped(size_t bytes);
  void* take_small(size_t bytes);
  /// True if `data` is a mapping, which is then cached.
  bool give_back_mapped(void* data);
  void give_back_small(void* data);

  // The rest is called with the mutex held.
  void make_room(size_t bytes);
  void drop_oldest();
  void drop_all() {
    while (!cached.empty()) drop_oldest();
  }
};

void* HostAllocator::Impl::take(size_t bytes) {
  if (bytes < kMapped) return take_small(bytes);
  return bytes <= kLargest ? take_mapped(bytes) : nullptr;
}

void* HostAllocator::Impl::take_small(size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, bytes) != 0) {
    const std::lock_guard lock(mutex);
    drop_all();
    if (posix_memalign(&data, kAlignment, bytes) != 0) return nullptr;
  }
  const auto held = static_cast<int64_t>(malloc_usable_size(data));
  used.add(held);
  reserved.add(held);
  return data;
}

void* HostAllocator::Impl::take_mapped(size_t bytes) {
  const size_t size = host_size_class(bytes);
  const std::lock_guard lock(mutex);
  void* data = nullptr;
  if (const auto list = cached.find(size); list != cached.end() && !list->second.empty()) {
    data = list->second.back()->first;
    list->second.pop_back();
  } else {
    make_room(size);
    data = map_block(size);
    if (!data) {
      drop_all();
      data = map_block(size);
    }
    if (!data) return nullptr;
    system_requests.fetch_add(1, std::memory_order_relaxed);
    blocks.emplace(data, Block{.bytes = size});
    reserved.add(static_cast<int64_t>(size));
    ASAN_POISON_MEMORY_REGION(data, size);
  }
  // The rest of the class stays poisoned, so that writing past the request is found too.
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  used.add(static_cast<int64_t>(size));
  return data;
}

bool HostAllocator::Impl::give_back_mapped(void* data) {
  const std::lock_guard lock(mutex);
  const auto block = blocks.find(data);
  if (block == blocks.end()) return false;
  const size_t size = block->second.bytes;
  ASAN_POISON_MEMORY_REGION(data, size);
  block->second.freed_at = ++clock;
  cached[size].push_back(block);
  used.add(-static_cast<int64_t>(size));
  return true;
}

void HostAllocator::Impl::give_back_small(void* data) {
  const auto held = -static_cast<int64_t>(malloc_usable_size(data));
  used.add(held);
  reserved.add(held);
  std::free(data);  // NOLINT: from posix_memalign
}

void HostAllocator::Impl::make_room(size_t bytes) {
  const auto wanted = static_cast<int64_t>(bytes);
  const int64_t peak = std::max(used.usage().peak, used.usage().current + wanted);
  const int64_t limit = 2 * peak + kCacheAllowance;
  while (!cached.empty() && reserved.usage().current + wanted > limit) drop_oldest();
}

void HostAllocator::Impl::drop_oldest() {
  auto oldest = cached.end();
  for (auto list = cached.begin(); list != cached.end();) {
    if (list->second.empty()) {
      list = cached.erase(list);
      continue;
    }
    if (oldest == cached.end() ||
        list->second.front()->second.freed_at < oldest->second.front()->second.freed_at) {
      oldest = list;
    }
    ++list;
  }
  if (oldest == cached.end()) return;
  const auto block = oldest->second.front();
  oldest->second.erase(oldest->second.begin());
  if (oldest->second.empty()) cached.erase(oldest);
  ASAN_UNPOISON_MEMORY_REGION(block->first, block->second.bytes);
  munmap(block->first, block->second.bytes);
  reserved.add(-static_cast<int64_t>(block->second.bytes));
  blocks.erase(block);
}

HostAllocator::HostAllocator() : impl_(std::make_unique<Impl>()) {}

HostAllocator::~HostAllocator() = default;

HostAllocator& HostAllocator::instance() {
  static auto* allocator = new HostAllocator;  // NOLINT: see the class
  return *allocator;
}

c10::DataPtr HostAllocator::allocate(size_t bytes) {
  const c10::Device device(c10::DeviceType::CPU);
  if (bytes == 0) return {nullptr, nullptr, &release, device};
  void* data = impl_->take(bytes);
  if (!data) {
    const auto held = usage();
    throw OutOfMemory(fmt::format(
        "the system refused {} ({} bytes) for a tensor, while tensors hold {} (at most {} so far). "
        "A smaller micro-batch, a higher stage or more ranks need less.",
        format_bytes(static_cast<double>(bytes)), bytes,
        format_bytes(static_cast<double>(held.used.current)),
        format_bytes(static_cast<double>(held.used.peak))));
  }
  return {data, data, &release, device};
}

void HostAllocator::release(void* data) {
  if (!data) return;
  auto& impl = *instance().impl_;
  // Mappings start on a page; few small blocks do.
  const bool on_page = reinterpret_cast<uintptr_t>(data) % kPage == 0;  // NOLINT
  if (on_page && impl.give_back_mapped(data)) return;
  impl.give_back_small(data);
}

c10::DeleterFnPtr HostAllocator::raw_deleter() const { return &release; }

void HostAllocator::copy_data(void* destination, const void* source, size_t bytes) const {
  std::memcpy(destination, source, bytes);
}

HostMemory HostAllocator::usage() const {
  return {.used = impl_->used.usage(),
          .reserved = impl_->reserved.usage(),
          .system_requests = impl_->system_requests.load()};
}

void HostAllocator::trim() {
  const std::lock_guard lock(impl_->mutex);
  impl_->drop_all();
}

void HostAllocator::reset_peaks() {
  impl_->used.reset_peak();
  impl_->reserved.reset_peak();
}

void install_host_allocator() {
  auto& allocator = HostAllocator::instance();
  if (c10::GetCPUAllocator() == &allocator) return;
  c10::SetCPUAllocator(&allocator, 100);
  if (c10::GetCPUAllocator() != &allocator) {
    throw ConfigError(
        "a CPU allocator of a priority above 100 is installed in LibTorch, so libzero's cannot be");
  }
}

}  // namespace zero
