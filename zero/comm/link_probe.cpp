#include "zero/comm/link_probe.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "zero/comm/gather_records.h"
#include "zero/comm/group.h"

namespace zero::comm {
namespace {

constexpr int64_t kFewBytes = 8;               // of a small call
constexpr int64_t kOfHost = int64_t{1} << 20;  // bytes that a host sends in a large one

class LinkProbe {
 public:
  LinkProbe(Group& group, const std::function<Work(at::Tensor, at::Tensor)>& gather, int64_t most)
      : group_(group),
        gather_(gather),
        all_(group.empty(most * group.size(), at::kByte, Category::communication)) {
    all_.zero_();
  }

  /// Returns the seconds that the best of `times` all-gathers of `bytes` a rank takes on the
  /// slowest rank. Collective.
  double best_of(int times, int64_t bytes) {
    const auto output = all_.narrow(0, 0, bytes * group_.size());
    const auto input = output.narrow(0, bytes * group_.rank(), bytes);
    double best = 0;
    for (int i = 0; i < times; ++i) {
      group_.barrier("the link's probe");
      const auto begin = std::chrono::steady_clock::now();
      gather_(output, input).wait();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      best = i == 0 ? took.count() : std::min(best, took.count());
    }
    return std::ranges::max(gather_records(group_, best, "the link's probe"));
  }

 private:
  Group& group_;
  const std::function<Work(at::Tensor, at::Tensor)>& gather_;
  at::Tensor all_;
};

}  // namespace

LinkSpeed probe_link(Group& group,
                     const std::function<Work(at::Tensor output, at::Tensor input)>& gather) {
  const auto& topology = group.topology();
  const int64_t messages = (topology.hosts - 1) * topology.local_size;  // that leave a host
  const int64_t bytes = std::max(kFewBytes, kOfHost / messages / kFewBytes * kFewBytes);
  LinkProbe probe(group, gather, bytes);
  LinkSpeed speed{.latency = probe.best_of(4, kFewBytes)};
  (void)probe.best_of(1, bytes);
  const double seconds = probe.best_of(2, bytes);
  const double moving = std::max({seconds - speed.latency, seconds / 10, 1e-9});
  speed.bandwidth = static_cast<double>(bytes * messages) / moving;
  return speed;
}

}  // namespace zero::comm
