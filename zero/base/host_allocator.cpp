#include "zero/base/host_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/base/host_space.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace zero {
namespace {

constexpr size_t kAlignment = 64;
/// This much resident memory above the peak of the used memory is always kept.
constexpr int64_t kSlack = int64_t{16} << 20;

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

}  // namespace

struct HostAllocator::Impl {
  mutable std::mutex mutex;
  HostSpace space;
  Counter used;  // without blocks that ledgers count
  Counter held;  // with those blocks
  Counter reserved;
  int64_t resident = 0;  // the part of `space` that `reserved` counts
  std::unordered_map<void*, std::shared_ptr<BlockSource>> elsewhere;  // blocks of other sources
  std::atomic<size_t> elsewhere_count{0};
  std::mutex limits_mutex;  // guards `limits`; taken before any other mutex
  std::vector<DeviceLimit*> limits;
  std::atomic<size_t> limit_count{0};
  // This thread's source; null for the host space.
  static thread_local std::shared_ptr<BlockSource> source;

  // The user of a `charged` block counts it in a ledger, which asks the limits.
  void* take(size_t bytes, bool charged) {
    const bool small = bytes < HostAllocator::kPaged;
    if (!charged) {
      if (!small && source) return take_elsewhere(bytes);
      if (limit_count != 0) return take_within_limits(bytes);
    }
    return small ? take_small(bytes, charged) : take_large(bytes, charged);
  }
  void* take_within_limits(size_t bytes);
  void* take_elsewhere(size_t bytes);
  bool give_back_elsewhere(void* data);
  void* take_large(size_t bytes, bool charged);
  void* take_small(size_t bytes, bool charged);
  void give_back_large(void* data, bool charged);
  void give_back_small(void* data, bool charged);
  void count(int64_t bytes, bool charged) {
    held.add(bytes);
    if (!charged) used.add(bytes);
  }

  // Keeps resident memory within `bytes`, and counts it. The caller holds the mutex.
  void limit(size_t bytes) {
    space.limit_resident(bytes);
    const auto now = static_cast<int64_t>(space.resident());
    reserved.add(now - std::exchange(resident, now));
  }
};

thread_local std::shared_ptr<BlockSource> HostAllocator::Impl::source;

void* HostAllocator::Impl::take_elsewhere(size_t bytes) {
  void* data = source->take(bytes);
  const std::lock_guard lock(mutex);
  elsewhere.emplace(data, source);
  elsewhere_count = elsewhere.size();
  return data;
}

void HostAllocator::check(void* data) {
  if (impl_->elsewhere_count == 0) return;
  std::shared_ptr<BlockSource> owner;
  {
    const std::lock_guard lock(impl_->mutex);
    const auto block = impl_->elsewhere.find(data);
    if (block == impl_->elsewhere.end()) return;
    owner = block->second;
  }
  owner->check(data);
}

// Gives a block back to its source. Returns false if it belongs to no other source.
bool HostAllocator::Impl::give_back_elsewhere(void* data) {
  if (elsewhere_count == 0) return false;
  std::shared_ptr<BlockSource> owner;
  {
    const std::lock_guard lock(mutex);
    const auto block = elsewhere.find(data);
    if (block == elsewhere.end()) return false;
    owner = std::move(block->second);
    elsewhere.erase(block);
    elsewhere_count = elsewhere.size();
  }
  owner->give(data);
  return true;
}

// Takes a block if all limits admit it. Their locks are held until the block is counted.
void* HostAllocator::Impl::take_within_limits(size_t bytes) {
  const std::lock_guard lock(limits_mutex);
  const bool small = bytes < HostAllocator::kPaged;
  const size_t counted =
      small ? bytes : (bytes + HostSpace::kPage - 1) / HostSpace::kPage * HostSpace::kPage;
  c10::SmallVector<std::unique_lock<std::mutex>, 4> admitted;
  for (auto* limit : limits)
    admitted.push_back(limit->admit(static_cast<int64_t>(counted), "a tensor"));
  return small ? take_small(bytes, false) : take_large(bytes, false);
}

void* HostAllocator::Impl::take_small(size_t bytes, bool charged) {
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, bytes) != 0) {
    const std::lock_guard lock(mutex);
    limit(0);
    if (posix_memalign(&data, kAlignment, bytes) != 0) return nullptr;
  }
  const auto size = static_cast<int64_t>(malloc_usable_size(data));
  count(size, charged);
  reserved.add(size);
  return data;
}

void* HostAllocator::Impl::take_large(size_t bytes, bool charged) {
  const std::lock_guard lock(mutex);
  void* data = space.take(bytes, charged);
  if (data == nullptr) return nullptr;
  const size_t size = space.size_of(data);
  count(static_cast<int64_t>(size), charged);
  limit(static_cast<size_t>(held.usage().peak / 8 * 9 + kSlack));
  // The rest of the last page stays poisoned, so that writing past the request is found too.
  ASAN_POISON_MEMORY_REGION(data, size);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  return data;
}

void HostAllocator::Impl::give_back_large(void* data, bool charged) {
  const std::lock_guard lock(mutex);
  const size_t size = space.size_of(data);
  ensure(size > 0, "a block of the host allocator is freed twice");
  ASAN_POISON_MEMORY_REGION(data, size);
  space.give(data);
  count(-static_cast<int64_t>(size), charged);
}

void HostAllocator::Impl::give_back_small(void* data, bool charged) {
  const auto size = -static_cast<int64_t>(malloc_usable_size(data));
  count(size, charged);
  reserved.add(size);
  std::free(data);  // NOLINT: from posix_memalign
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
  void* data = take(bytes, false);
  return {data, data, &release, device};
}

void* HostAllocator::take(size_t bytes, bool charged) {
  void* data = impl_->take(bytes, charged);
  if (!data) {
    const auto held = usage();
    throw OutOfMemory(fmt::format(
        "the system refused {} ({} bytes) for a tensor, while tensors hold {} (at most {} so far). "
        "A smaller micro-batch, a higher stage or more ranks need less.",
        format_bytes(static_cast<double>(bytes)), bytes,
        format_bytes(static_cast<double>(held.used.current)),
        format_bytes(static_cast<double>(held.used.peak))));
  }
  return data;
}

void* HostAllocator::take_charged(size_t bytes) { return take(bytes, true); }

void HostAllocator::give_charged(void* data) {
  if (impl_->space.contains(data)) {
    impl_->give_back_large(data, true);
  } else {
    impl_->give_back_small(data, true);
  }
}

void* HostAllocator::keep_charged(c10::DataPtr& data, size_t begin, size_t end) {
  auto& impl = *impl_;
  if (data.get_deleter() != &release || !impl.space.contains(data.get())) return nullptr;
  const std::lock_guard lock(impl.mutex);
  auto* const block = static_cast<std::byte*>(data.release_context());
  data.clear();
  const size_t size = impl.space.size_of(block);
  ensure(size >= end && begin < end, "the part to keep is not in the block of the host allocator");
  auto* const kept = static_cast<std::byte*>(impl.space.keep(block, begin, end));
  const size_t kept_size = impl.space.size_of(kept);
  ASAN_POISON_MEMORY_REGION(block, static_cast<size_t>(kept - block));
  ASAN_POISON_MEMORY_REGION(kept + kept_size, size - kept_size - static_cast<size_t>(kept - block));
  impl.used.add(-static_cast<int64_t>(size));
  impl.held.add(-static_cast<int64_t>(size - kept_size));
  return kept;
}

void HostAllocator::release(void* data) {
  if (!data) return;
  auto& impl = *instance().impl_;
  if (impl.space.contains(data)) {
    impl.give_back_large(data, false);
  } else if (!impl.give_back_elsewhere(data)) {
    impl.give_back_small(data, false);
  }
}

c10::DeleterFnPtr HostAllocator::raw_deleter() const { return &release; }

void HostAllocator::copy_data(void* destination, const void* source, size_t bytes) const {
  std::memcpy(destination, source, bytes);
}

HostMemory HostAllocator::usage() const {
  int64_t requests = 0;
  {
    const std::lock_guard lock(impl_->mutex);
    requests = impl_->space.system_requests();
  }
  return {.used = impl_->used.usage(),
          .reserved = impl_->reserved.usage(),
          .system_requests = requests};
}

int64_t HostAllocator::used() const { return impl_->used.usage().current; }

Usage HostAllocator::held() const { return impl_->held.usage(); }

void HostAllocator::add_limit(DeviceLimit* limit) {
  const std::lock_guard lock(impl_->limits_mutex);
  impl_->limits.push_back(limit);
  impl_->limit_count = impl_->limits.size();
}

void HostAllocator::remove_limit(DeviceLimit* limit) {
  const std::lock_guard lock(impl_->limits_mutex);
  std::erase(impl_->limits, limit);
  impl_->limit_count = impl_->limits.size();
}

void HostAllocator::trim() {
  const std::lock_guard lock(impl_->mutex);
  impl_->limit(0);
}

void HostAllocator::reset_peaks() {
  impl_->used.reset_peak();
  impl_->held.reset_peak();
  impl_->reserved.reset_peak();
}

BlockRedirect::BlockRedirect(std::shared_ptr<BlockSource> source)
    : before_(std::exchange(HostAllocator::Impl::source, std::move(source))) {}

BlockRedirect::~BlockRedirect() { HostAllocator::Impl::source = std::move(before_); }

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
