#include "zero/planner/here.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <set>
#include <system_error>

#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/comm/gather_records.h"
#include "zero/models/layers/matmul.h"
#include "zero/planner/as_ranks.h"
#include "zero/store/speed.h"

namespace zero::plan {
namespace {

/// Returns what a rank reaches in the product of matrices of a size that suits it, FLOPs a second.
double product_speed(at::ScalarType dtype, int64_t ranks) {
  double best = 0;
  for (const int64_t size : {512, 1024, 1536}) {
    const double seconds = seconds_as_ranks(ranks, [&]() -> Work {
      const auto a = at::full({size, size}, 0.5, dtype);
      const auto b = at::full({size, size}, 0.25, dtype);
      return [a, b] { (void)product(a, b); };
    });
    const auto n = static_cast<double>(size);
    best = std::max(best, 2 * n * n * n / seconds);
  }
  return best;
}

/// Returns the bytes that are free on the disks of these folders, each disk once.
double free_bytes(const std::vector<std::string>& folders) {
  std::set<dev_t> disks;
  double bytes = 0;
  for (const auto& folder : folders) {
    struct stat status {};
    if (stat(folder.c_str(), &status) != 0 || !disks.insert(status.st_dev).second) continue;
    std::error_code ignored;
    bytes += static_cast<double>(std::filesystem::space(folder, ignored).available);
  }
  return bytes;
}

/// Returns the median of the seconds of an all-gather of `bytes` bytes of each rank, which the
/// slowest rank takes. The calls go on for about `seconds`. Collective.
double seconds_of_gather(comm::Group& group, int64_t bytes, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLeast = 3, kMost = 100;
  auto whole = group.empty(bytes * group.size(), at::kByte, Category::communication);
  whole.zero_();
  const auto mine = whole.narrow(0, bytes * group.rank(), bytes);
  const auto once = [&] {
    const auto begin = Clock::now();
    group.all_gather(whole, mine, "a measurement of the network").wait();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  once();
  const auto slowest = [&](double own) {
    const auto all = comm::gather_records(group, own, "time");
    return *std::ranges::max_element(all);
  };
  const double first = slowest(once());
  const int count = std::clamp(static_cast<int>(seconds / std::max(first, 1e-9)), kLeast, kMost);
  std::vector<double> times;
  for (int i = 0; i < count; ++i) times.push_back(once());
  std::ranges::nth_element(times, times.begin() + count / 2);
  return slowest(times[static_cast<size_t>(count / 2)]);
}

}  // namespace

Link measured_network(comm::Group& group) {
  const auto& topology = group.topology();
  if (topology.hosts == 1)
    throw ConfigError("There is no network to measure: the ranks are on one host.");
  if (!topology.regular) {
    throw ConfigError(
        "A plan is for hosts that have as many ranks each, which follow one another; the hosts of "
        "this job do not. Start as many on each.");
  }
  constexpr int64_t kFew = 8, kMost = int64_t{4} << 20, kOfAll = int64_t{64} << 20;
  constexpr double kSeconds = 0.2;
  const int64_t many = std::clamp(kOfAll / group.size(), kFew, kMost) / kFew * kFew;
  const double latency = seconds_of_gather(group, kFew, kSeconds / 4);
  const double seconds = seconds_of_gather(group, many, kSeconds);
  const double leaves = static_cast<double>(many) * (topology.hosts - 1) * topology.local_size;
  return {.bandwidth = leaves / std::max(seconds - latency, seconds / 10),
          .latency = latency / std::ceil(std::log2(topology.hosts))};
}

Cluster measured_here(int64_t ranks, const std::vector<std::string>& disk_folders) {
  if (ranks < 1) throw ConfigError(fmt::format("There are {} ranks; give 1 or more.", ranks));
  const auto share = static_cast<double>(ranks);
  // The disks come first, since their folders may be wrong.
  const auto disks =
      disk_folders.empty() ? std::vector<double>() : store::measure_speeds(disk_folders);
  Device device;
  device.name = kThisMachine;
  device.products = 1;
  device.streams = 1;
  device.cpu = true;
  device.flops_fp32 = product_speed(at::kFloat, ranks);
  device.flops = product_speed(at::kBFloat16, ranks);
  // Larger than caches, and small beside memory.
  constexpr int64_t kElements = int64_t{1} << 24;
  constexpr double kBytes = 4.0 * kElements;
  const auto numbers = [] { return at::ones({kElements}, at::kFloat); };
  device.bandwidth =
      3 * kBytes / seconds_as_ranks(ranks, [&]() -> Work {
        return [a = numbers(), b = numbers(), c = numbers()]() mutable { at::add_out(c, a, b); };
      });
  // Ranks of a host read each other's memory: a message is a copy, of which all make theirs at
  // once.
  device.link = kBytes / seconds_as_ranks(ranks, [&]() -> Work {
                  return [a = numbers(), c = numbers()] { c.copy_(a); };
                });
  device.pcie = device.link;
  device.per_host = ranks;
  device.network = device.link * share;
  const auto memory = static_cast<double>(available_memory().available);
  device.memory = memory / share;
  device.source = fmt::format("measured on {} ranks at once", ranks);
  auto cluster = cluster_of(device, 1, ranks);
  cluster.inside.efficiency = 1;
  cluster.measured = true;
  cluster.host_memory = memory;
  cluster.host_update = device.bandwidth * share;
  if (!disks.empty()) {
    cluster.nvme = std::accumulate(disks.begin(), disks.end(), 0.0);
    cluster.nvme_bytes = free_bytes(disk_folders);
  }
  return cluster;
}

}  // namespace zero::plan
