#include "zero/comm/traffic.h"

#include <array>
#include <cstdint>
#include <mutex>
#include <string_view>

namespace zero::comm {

std::string_view name(Collective collective) {
  static constexpr std::array<std::string_view, kCollectives> kNames{
      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "control"};
  return kNames[static_cast<size_t>(collective)];
}

TrafficCount& TrafficCount::operator+=(const TrafficCount& other) {
  calls += other.calls;
  logical_bytes += other.logical_bytes;
  copied_bytes += other.copied_bytes;
  link_bytes += other.link_bytes;
  return *this;
}

TrafficCount& TrafficCount::operator-=(const TrafficCount& other) {
  calls -= other.calls;
  logical_bytes -= other.logical_bytes;
  copied_bytes -= other.copied_bytes;
  link_bytes -= other.link_bytes;
  return *this;
}

void Traffic::add(Collective collective, int64_t logical_bytes, int64_t copied_bytes) {
  const std::lock_guard lock(mutex_);
  counts_[static_cast<size_t>(collective)] += {1, logical_bytes, copied_bytes, 0};
}

void Traffic::add_copied(Collective collective, int64_t copied_bytes) {
  const std::lock_guard lock(mutex_);
  counts_[static_cast<size_t>(collective)].copied_bytes += copied_bytes;
}

void Traffic::add_link(Collective collective, int64_t link_bytes) {
  const std::lock_guard lock(mutex_);
  counts_[static_cast<size_t>(collective)].link_bytes += link_bytes;
}

TrafficCount Traffic::count(Collective collective) const {
  const std::lock_guard lock(mutex_);
  return counts_[static_cast<size_t>(collective)];
}

TrafficCount Traffic::total() const {
  const std::lock_guard lock(mutex_);
  TrafficCount sum;
  for (size_t i = 0; i < kCollectives; ++i) {
    if (static_cast<Collective>(i) != Collective::control) sum += counts_[i];
  }
  return sum;
}

void Traffic::reset() {
  const std::lock_guard lock(mutex_);
  counts_ = {};
}

}  // namespace zero::comm
