// This machine as a described one: its processors, memory and disk are measured in some seconds,
// and so is the network to hosts like it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/group.h"
#include "zero/planner/as_ranks.h"
#include "zero/planner/hardware.h"

namespace zero::plan {

/// The name of the device of a cluster that `measured_here` returns.
inline constexpr std::string_view kThisMachine = "this machine";

/// Measures this machine as one host of `ranks` ranks that share its processors: matrix products in
/// fp32 and bf16, operators that only pass over memory, copies of memory, and the disks of
/// `disk_folders` (store::measure_speeds) and what is free on them. It keeps all cores busy for
/// about three seconds, so it measures what other work on the machine leaves. A plan for it also
/// measures the operators of the model (Note [Operators measured here]). Its memory is what is
/// available now. The speed of its network is not known, and stays 0: a plan for several hosts
/// needs another. With `hosts`, all hosts measure at the same time, and each gets the means of
/// their speeds and the least of their memory and disks. Throws ConfigError for ranks below 1 and
/// for more than can be started, and StoreError for a folder that cannot be used.
Cluster measured_here(int64_t ranks, const std::vector<std::string>& disk_folders = {},
                      const OfHosts& hosts = {});

/// Measures the network between the hosts of a group by all-gathers, for a second or two: the
/// bandwidth of a host, the latency of a message, and the part of a rank's computing that messages
/// take away, as `Cluster::between` has them. Every rank gets the same figures. Collective. Throws
/// ConfigError for a group on one host, and for hosts that have different numbers of ranks.
Link measured_network(comm::Group& group);

/// Runs `work` on the first rank of each host, while the others take part in what it gives to
/// `hosts`. The work must call that as often on each host. Collective. Throws what `work` throws,
/// on the other ranks as comm::share_failure does; a mistake that all hosts find is told once.
void measure_together(comm::Group& group, const std::function<void(const OfHosts& hosts)>& work);

}  // namespace zero::plan
