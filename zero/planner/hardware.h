// The machines that a plan is for: devices, links, disks, as numbers.
//
// Note [Efficiency]
// An operator takes flops / (peak x products) or bytes / (bandwidth x streams), whichever is
// longer. `products` is what large matrix products reach of the peak, and `attention` is what fused
// attention reaches of it. They belong to a stack of software as much as to a device, so a measured
// value is better than a preset's (docs/zero-plan.md). On this machine each operator is measured
// instead (operator_speed.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/planner/stragglers.h"

namespace zero::plan {

/// A level of links between ranks: within a host, or between hosts.
struct Link {
  double bandwidth = 0;   ///< bytes a second, one way: of a device, or of a host
  double latency = 0;     ///< seconds of a message
  double efficiency = 1;  ///< the part of the bandwidth that large messages reach
  double processors = 0;  ///< the part of a rank's computing that is lost while the link is busy
};

/// Speeds are in bytes a second and one way, unless another unit is named.
struct Device {
  std::string name;
  double flops = 0;       ///< dense matrix products in bf16, FLOPs a second
  double flops_fp32 = 0;  ///< the same in fp32 (with TF32 where there is)
  double memory = 0;      ///< bytes
  double bandwidth = 0;   ///< of its memory
  double link = 0;        ///< to the other devices of its host
  double pcie = 0;        ///< to the host, all devices busy
  int64_t per_host = 8;   ///< devices of a usual host
  double network = 0;     ///< of a usual host, to other hosts
  double products = 0.7;  ///< Note [Efficiency]
  double attention = 0;   ///< 0: as `products`
  double streams = 0.8;
  bool bf16 = true;    ///< else 16 bits are fp16
  bool cpu = false;    ///< the host's memory is the device's
  std::string source;  ///< where the figures come from
};

/// The devices that are known by name.
const std::vector<Device>& devices();
/// Returns the device of that name, in any case ("h100"). Throws ConfigError with the nearest name.
const Device& device_named(std::string_view name);

struct Cluster {
  Device device{};
  int64_t hosts = 1;
  int64_t per_host = 1;
  Link inside{};   ///< of a device to those of its host
  Link between{};  ///< of a host to others
  double host_memory = 1e12;
  double nvme = 0;             ///< bytes a second of a host's disks, reads and writes; 0: no disk
  double nvme_bytes = 20e12;   ///< their size
  double host_update = 100e9;  ///< bytes a second that updates on a host pass over
  SpeedsDiffer speeds_differ{};
  bool measured = false;  ///< it is the machine that this process runs on

  int64_t ranks() const { return hosts * per_host; }
  /// Returns the bytes that a rank's device has; of a CPU, its share of the host's memory.
  double memory_of_rank() const {
    return device.cpu ? host_memory / static_cast<double>(per_host) : device.memory;
  }
};

/// Returns the bytes that a rank can use: of a device without what its context, its libraries and
/// its allocator's fragments take.
double usable(const Cluster& cluster);

/// Returns hosts of a device as they usually are. `per_host` 0: as many as usual.
Cluster cluster_of(const Device& device, int64_t hosts, int64_t per_host = 0);

/// The most ranks that a plan is made for.
inline constexpr int64_t kMostRanks = int64_t{1} << 20;

/// Throws ConfigError naming what is missing where ranks would send over a link whose speed is not
/// known (0), and where the cluster has more than kMostRanks ranks. Every plan asks for it.
void check(const Cluster& cluster);

/// The least speed in bytes or FLOPs a second that a number without a unit can mean. One below it
/// is taken for a number of another unit.
inline constexpr double kLeastSpeed = 1e6;

/// Reads a cluster from JSON, with the keys of docs/zero-plan.md. Throws ConfigError naming a key.
/// Speeds of links that are absent for a device that is not known stay 0: see check().
Cluster cluster_from_json(std::string_view json, std::string_view source);
std::string to_json(const Cluster& cluster);

/// Collectives over `ranks` ranks that have `inside` links, and `between` links of the hosts that
/// they are on. The algorithms: a ring inside a host, and one ring over hosts that each rank's
/// share of the host's link carries; with few bytes a tree.
struct Collective {
  const Cluster& cluster;
  /// Returns the seconds of an all-gather or a reduce-scatter, in which a rank sends `sent` bytes
  /// in all, of which `leaves` leave its host, among `ranks` ranks on `hosts` hosts. All other
  /// ranks of the cluster do the same meanwhile, so a host's link is shared by all its ranks.
  double seconds(double sent, double leaves, int64_t ranks, int64_t hosts) const;
};

}  // namespace zero::plan
