#include "zero/planner/here.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <system_error>

#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
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

}  // namespace

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
