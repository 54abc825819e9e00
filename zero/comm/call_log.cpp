#include "zero/comm/call_log.h"

#include <utility>

namespace zero::comm {

double CallTimes::algorithm_bandwidth() const {
  if (in_place || nanoseconds == 0) return 0;
  return static_cast<double>(calls) * static_cast<double>(message) /
         static_cast<double>(nanoseconds);
}

double CallTimes::bus_bandwidth() const {
  const double share = static_cast<double>(ranks - 1) / ranks;
  switch (collective) {
    case Collective::all_reduce:
      return algorithm_bandwidth() * 2 * share;
    case Collective::all_gather:
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return algorithm_bandwidth() * share;
    default:
      return algorithm_bandwidth();
  }
}

void CallLog::start(std::function<bool(Collective)> wanted,
                    std::function<void(const CallTime&)> told) {
  const std::lock_guard lock(mutex_);
  times_.clear();
  wanted_ = std::move(wanted);
  told_ = std::move(told);
  on_ = true;
}

void CallLog::add(const CallTime& call) {
  if (!on() || (wanted_ && !wanted_(call.collective))) return;
  {
    const std::lock_guard lock(mutex_);
    auto& times = times_[{call.collective, call.in_place, call.message, call.ranks}];
    times.collective = call.collective;
    times.ranks = call.ranks;
    times.in_place = call.in_place;
    times.message = call.message;
    ++times.calls;
    times.nanoseconds += call.nanoseconds;
  }
  if (told_) told_(call);
}

std::vector<CallTimes> CallLog::times() const {
  const std::lock_guard lock(mutex_);
  std::vector<CallTimes> all;
  for (const auto& [key, times] : times_) all.push_back(times);
  return all;
}

}  // namespace zero::comm
