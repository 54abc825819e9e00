#include "zero/engine/placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/error.h"

namespace zero {

namespace {

void check_shard_size(int64_t size, const comm::Group& all) {
  const int64_t local = all.local_size();
  const auto suits = [&](int64_t s) {
    return all.size() % s == 0 && (local % s == 0 || s % local == 0);
  };
  if (suits(size)) return;
  std::vector<int64_t> choices;
  for (int64_t s = 1; s <= all.size(); ++s)
    if (suits(s)) choices.push_back(s);
  throw ConfigError(fmt::format(
      "zero_optimization.mics_shard_size is {}, but this job has {} ranks, {} on each host: it "
      "must divide all ranks, and divide those of a host or be a multiple of them. Use one of {}.",
      size, all.size(), local, fmt::join(choices, ", ")));
}

// With hpZ the ranks of a host share an array of the whole parameters, or their devices have equal
// parts of them.
void check_kept(const Config& config, const comm::Group& all) {
  const int64_t size = config.hpz_partition_size;
  if (size == 1) return;
  const int local = all.local_size();
  if (size != local) {
    throw ConfigError(fmt::format(
        "zero_optimization.zero_hpz_partition_size is {}, but this job has {} ranks on each host: "
        "those of a host keep parameters together. Use {}, or leave it out.",
        size, local, local));
  }
  if (all.topology().hosts == 1) return;
  const auto refuse = [&](std::string_view other, std::string_view why) {
    throw ConfigError(fmt::format(
        "zero_optimization.zero_hpz_partition_size is {} on {} hosts, and {}: {} Leave one of them "
        "out.",
        size, all.topology().hosts, other, why));
  };
  if (!all.has_windows() && all.device().is_cpu())
    refuse("its group is carried by another backend than libzero's",
           "ranks of a host share no memory there.");
  if (config.offload_param.device != OffloadDevice::none)
    refuse("offload_param is given", "each host would keep in memory what is to be elsewhere.");
  if (config.device_memory > 0)
    refuse("device_memory is given", "a device cannot read units where a host's ranks share them.");
}

// Makes the groups among which the devices of several hosts keep all parameters.
void keep_on_devices(const Config& config, Placement& placement) {
  auto& all = *placement.all;
  if (config.hpz_partition_size == 1 || all.topology().hosts == 1 || all.has_windows()) return;
  const int local = all.local_size();
  std::vector<int> host;
  std::vector<int> same_place;
  for (int rank = 0; rank < all.size(); ++rank) {
    if (rank / local == all.rank() / local) host.push_back(rank);
    if (rank % local == all.rank() % local) same_place.push_back(rank);
  }
  placement.host = all.subgroup(host);
  placement.same_place = all.subgroup(same_place);
}

}  // namespace

// A backend that is not libzero's may span hosts of different sizes. Everything that it sends
// counts as leaving a host, as in the ledger of traffic: each rank counts as a host of its own.
PlannedRanks Placement::planned() const {
  const auto& topology = all->topology();
  const int64_t ranks_a_host = topology.regular ? topology.local_size : 1;
  const auto widens = [](const comm::Group& group) {
    return group.sent_dtype(at::kBFloat16, at::kFloat) == at::kFloat;
  };
  return {.grid = {.hosts = all->size() / ranks_a_host,
                   .ranks_a_host = ranks_a_host,
                   .shards = shards->size()},
          .rank = all->rank(),
          .widens_in_shard_group = widens(*shards),
          .widens_to_replicas = widens(*replicas)};
}

Placement place(const Config& config, std::shared_ptr<comm::Group> all) {
  check_kept(config, *all);
  Placement placement{.sharded = {}, .all = std::move(all)};
  keep_on_devices(config, placement);
  const auto& group = *placement.all;
  if (config.mics_shard_size < 0) return placement;
  check_shard_size(config.mics_shard_size, group);
  const auto size = static_cast<int>(config.mics_shard_size);
  if (size == group.size()) return placement;
  std::vector<int> shard_group;
  std::vector<int> same_place;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank / size == group.rank() / size) shard_group.push_back(rank);
    if (rank % size == group.rank() % size) same_place.push_back(rank);
  }
  placement.shards = placement.all->subgroup(shard_group);
  placement.replicas = placement.all->subgroup(same_place);
  return placement;
}

}  // namespace zero
