// Groups of a job's ranks, on one host or on several.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>

#include "zero/comm/group.h"
#include "zero/comm/open_rail.h"
#include "zero/comm/topology.h"

namespace zero::comm {

/// This rank's place in a job, and how the job's ranks meet.
struct HostsJob {
  int rank = 0;
  int size = 1;
  Topology topology{};    ///< regular
  std::string address{};  ///< this host's, by which it reaches the store: "10.0.0.2"
  /// Makes a group's rails; empty means open_rail. `key` is the rail's own in the job.
  std::function<std::shared_ptr<Rail>(const std::string& key, const RailEnd& end)> make_rail{};
  bool watched = true;  ///< a HostWatch looks after the ranks of several hosts
};

/// Returns the group of all ranks of `job`, which meet in `store`: over shared memory on one host,
/// and over rails between several. Collective. Its subgroups meet in `store` too.
std::shared_ptr<Group> job_group(c10::intrusive_ptr<c10d::Store> store, const HostsJob& job,
                                 GroupOptions options = {}, Accounts accounts = {});

}  // namespace zero::comm
