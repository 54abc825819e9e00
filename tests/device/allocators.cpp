#include "tests/device/allocators.h"

#include <cstring>
#include <utility>

#include "tests/device/machine.h"

namespace zero::simulated {

namespace {

void release_device(void* pointer) { Machine::instance().release(pointer); }
void release_pinned(void* pointer) { Machine::instance().release_pinned(pointer); }

c10::CachingAllocator::Stat stat(size_t current, size_t peak) {
  c10::CachingAllocator::Stat stat;
  stat.current = static_cast<int64_t>(current);
  stat.peak = static_cast<int64_t>(peak);
  return stat;
}

class SimulatedAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int own = current_device();
    void* data = Machine::instance().allocate(bytes, current_actor(own));
    return {data, data, &release_device, device(own)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    launch("copy_data", {{from, bytes, false}, {to, bytes, true}},
           [to = backing(to), from = backing(from), bytes] { std::memcpy(to, from, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override { Machine::instance().empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Machine::instance().record_stream(data.get(), actor_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto usage = Machine::instance().usage(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[kAll] = stats.active_bytes[kAll] = stat(usage.allocated, usage.peak);
    stats.reserved_bytes[kAll] = stat(usage.reserved, usage.reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override { Machine::instance().reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t limit = Machine::instance().memory_limit();
    return {limit - std::min(limit, Machine::instance().usage(device).reserved), limit};
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = Machine::instance().allocate_pinned(bytes);
    return {data, data, &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new SimulatedAllocator;
  return *allocator;
}

c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

}  // namespace zero::simulated
