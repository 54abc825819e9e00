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
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/models/layers/matmul.h"
#include "zero/planner/as_ranks.h"
#include "zero/store/speed.h"

namespace zero::plan {
namespace {

/// Returns what a rank reaches in the product of matrices of a size that suits it, FLOPs a second.
double product_speed(at::ScalarType dtype, int64_t ranks, const OfHosts& hosts) {
  double best = 0;
  for (const int64_t size : {512, 1024, 1536}) {
    const auto prepare = [&]() -> Work {
      const auto a = at::full({size, size}, 0.5, dtype);
      const auto b = at::full({size, size}, 0.25, dtype);
      return [a, b] { (void)product(a, b); };
    };
    const double seconds = seconds_as_ranks(ranks, prepare, hosts);
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

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// All-gathers of `bytes` bytes of each rank, as measurements of the network.
class Gathers {
 public:
  Gathers(comm::Group& group, int64_t bytes)
      : group_(group),
        whole_(group.empty(bytes * group.size(), at::kByte, Category::communication)),
        mine_(whole_.narrow(0, bytes * group.rank(), bytes)) {
    whole_.zero_();
  }

  comm::Work start() { return group_.all_gather(whole_, mine_, "a measurement of the network"); }

  /// Returns the median of the seconds that one takes on the slowest rank. They go on for about
  /// `seconds`. Collective.
  double median(double seconds) {
    const auto once = [&] {
      const auto begin = Clock::now();
      start().wait();
      return seconds_since(begin);
    };
    once();
    const int count = count_in(seconds, largest(group_, once()));
    std::vector<double> times;
    for (int i = 0; i < count; ++i) times.push_back(once());
    std::ranges::nth_element(times, times.begin() + count / 2);
    return largest(group_, times[static_cast<size_t>(count / 2)]);
  }

  /// Returns the part of a rank's computing that one takes away, over the `alone` seconds that it
  /// takes while nothing is computed: the mean of all ranks, at most 1. Collective.
  double lost_computing(double alone) {
    constexpr int64_t kSize = 256;  // a product of some tenths of a millisecond
    constexpr double kSeconds = 0.1;
    constexpr int kTurns = 2;
    const auto a = at::full({kSize, kSize}, 0.5), b = at::full({kSize, kSize}, 0.25);
    const int count = count_in(kSeconds, alone);
    double computed = 0, quiet = 0;  // products, and seconds, without gathers
    double beside = 0, busy = 0;     // the same beside gathers
    for (int turn = 0; turn < kTurns; ++turn) {
      start().wait();  // ranks begin together
      auto begin = Clock::now();
      for (; seconds_since(begin) < kSeconds; ++computed) (void)product(a, b);
      quiet += seconds_since(begin);
      start().wait();
      begin = Clock::now();
      for (int i = 0; i < count; ++i) {
        auto work = start();
        for (; !work.done(); ++beside) (void)product(a, b);
        work.wait();
      }
      busy += seconds_since(begin);
    }
    const double lost = busy - beside * quiet / std::max(computed, 1.0);
    const auto all = comm::gather_records(group_, lost / (kTurns * count * alone), "time");
    const double sum = std::accumulate(all.begin(), all.end(), 0.0);
    return std::clamp(sum / static_cast<double>(all.size()), 0.0, 1.0);
  }

 private:
  static int count_in(double seconds, double of_one) {
    constexpr int kLeast = 3, kMost = 100;
    return std::clamp(static_cast<int>(seconds / std::max(of_one, 1e-9)), kLeast, kMost);
  }
  static double largest(comm::Group& group, double own) {
    const auto all = comm::gather_records(group, own, "time");
    return *std::ranges::max_element(all);
  }

  comm::Group& group_;
  at::Tensor whole_, mine_;
};

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
  constexpr int64_t kFew = 8, kMost = int64_t{16} << 20, kOfAll = int64_t{64} << 20;
  constexpr double kSeconds = 0.2;
  const int64_t many = std::clamp(kOfAll / group.size(), kFew, kMost) / kFew * kFew;
  const double latency = Gathers(group, kFew).median(kSeconds / 4);
  Gathers gathers(group, many);
  const double seconds = gathers.median(kSeconds);
  const double leaves = static_cast<double>(many) * (topology.hosts - 1) * topology.local_size;
  return {.bandwidth = leaves / std::max(seconds - latency, seconds / 10),
          .latency = latency / std::ceil(std::log2(topology.hosts)),
          .processors = gathers.lost_computing(seconds)};
}

void measure_together(comm::Group& group, const std::function<void(const OfHosts& hosts)>& work) {
  enum class State : uint8_t { goes_on, done, failed };
  struct Said {
    double value;
    State state;
  };
  bool over = false, failed = false;  // on some host
  const auto exchange = [&](double value, State state) {
    std::vector<double> values;
    const auto all = comm::gather_records(group, Said{value, state}, "measuring together");
    for (size_t rank = 0; rank < all.size(); rank += static_cast<size_t>(group.local_size())) {
      values.push_back(all[rank].value);
      over = over || all[rank].state != State::goes_on;
      failed = failed || all[rank].state == State::failed;
    }
    return values;
  };
  std::exception_ptr failure;
  if (group.local_rank() == 0) {
    try {
      work([&](double mine) {
        auto values = over ? std::vector<double>() : exchange(mine, State::goes_on);
        if (over) throw Error("Another host has ended its measurements before this one.");
        return values;
      });
    } catch (const CommError&) {
      throw;
    } catch (...) {
      if (!failed) failure = std::current_exception();
    }
    if (!over) exchange(0, failure ? State::failed : State::done);
  } else {
    while (!over) exchange(0, State::goes_on);
  }
  constexpr const char* kWhat = "Planning the run";
  // A mistake that all hosts find is told once.
  comm::share_failure<ConfigError>(group, kWhat, group.rank() == 0 ? failure : nullptr);
  comm::share_failure<ConfigError>(group, kWhat, failure);
}

Cluster measured_here(int64_t ranks, const std::vector<std::string>& disk_folders,
                      const OfHosts& hosts) {
  if (ranks < 1 || ranks > kMostRanks)
    throw ConfigError(fmt::format("There are {} ranks; give 1 to {}.", ranks, kMostRanks));
  const auto share = static_cast<double>(ranks);
  // The disks come first, since their folders may be wrong.
  const auto disks =
      disk_folders.empty() ? std::vector<double>() : store::measure_speeds(disk_folders);
  Device device;
  device.name = kThisMachine;
  device.products = 1;
  device.streams = 1;
  device.cpu = true;
  device.flops_fp32 = product_speed(at::kFloat, ranks, hosts);
  device.flops = product_speed(at::kBFloat16, ranks, hosts);
  // Larger than caches, and small beside memory.
  constexpr int64_t kElements = int64_t{1} << 24;
  constexpr double kBytes = 4.0 * kElements;
  const auto numbers = [] { return at::ones({kElements}, at::kFloat); };
  const auto add = [&]() -> Work {
    return [a = numbers(), b = numbers(), c = numbers()]() mutable { at::add_out(c, a, b); };
  };
  const auto copy = [&]() -> Work { return [a = numbers(), c = numbers()] { c.copy_(a); }; };
  device.bandwidth = 3 * kBytes / seconds_as_ranks(ranks, add, hosts);
  // Ranks of a host read each other's memory: a message is a copy, of which all make theirs at
  // once.
  device.link = kBytes / seconds_as_ranks(ranks, copy, hosts);
  device.pcie = device.link;
  device.per_host = ranks;  // its network stays 0, since nothing here tells it
  const auto least = [&](double mine) { return hosts ? std::ranges::min(hosts(mine)) : mine; };
  const auto memory = least(static_cast<double>(available_memory().available));
  device.memory = memory / share;
  device.source = fmt::format("measured on {} ranks at once", ranks);
  auto cluster = cluster_of(device, 1, ranks);
  cluster.inside.efficiency = 1;
  cluster.measured = true;
  cluster.host_memory = memory;
  cluster.host_update = device.bandwidth * share;
  if (!disks.empty()) {
    cluster.nvme = least(std::accumulate(disks.begin(), disks.end(), 0.0));
    cluster.nvme_bytes = least(free_bytes(disk_folders));
  }
  return cluster;
}

}  // namespace zero::plan
