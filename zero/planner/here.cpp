#include "zero/planner/here.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <set>
#include <system_error>

#include "zero/base/error.h"
#include "zero/base/memory_limit.h"
#include "zero/models/layers/product_speed.h"
#include "zero/store/speed.h"

namespace zero::plan {
namespace {

/// Returns the least seconds that `work` takes, of several times after a first one.
template <class Work>
double least_seconds(const Work& work) {
  using Clock = std::chrono::steady_clock;
  constexpr int kTimes = 5;
  work();
  double least = 1e30;
  for (int i = 0; i < kTimes; ++i) {
    const auto begin = Clock::now();
    work();
    least = std::min(least, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return least;
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
  device.flops_fp32 = best_product_speed(at::kFloat) / share;
  device.flops = best_product_speed(at::kBFloat16) / share;
  // Larger than caches, and small beside memory.
  constexpr int64_t kElements = int64_t{1} << 24;
  constexpr double kBytes = 4.0 * kElements;
  const auto a = at::ones({kElements}, at::kFloat);
  const auto b = at::ones({kElements}, at::kFloat);
  auto c = at::empty({kElements}, at::kFloat);
  device.bandwidth = 3 * kBytes / least_seconds([&] { at::add_out(c, a, b); }) / share;
  // Ranks of a host read each other's memory: a message is a copy, of which all make theirs at
  // once.
  device.link = kBytes / least_seconds([&] { c.copy_(a); }) / share;
  device.pcie = device.link;
  device.per_host = ranks;
  device.network = device.link * share;
  const auto memory = static_cast<double>(available_memory().available);
  device.memory = memory / share;
  device.source = fmt::format("measured with {} threads", at::get_num_threads());
  auto cluster = cluster_of(device, 1, ranks);
  cluster.inside.efficiency = 1;
  cluster.host_memory = memory;
  cluster.host_update = device.bandwidth * share;
  if (!disks.empty()) {
    cluster.nvme = std::accumulate(disks.begin(), disks.end(), 0.0);
    cluster.nvme_bytes = free_bytes(disk_folders);
  }
  return cluster;
}

}  // namespace zero::plan
