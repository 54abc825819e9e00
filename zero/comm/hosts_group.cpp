#include "zero/comm/hosts_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "zero/base/error.h"
#include "zero/comm/gloo_rail.h"
#include "zero/comm/host_watch.h"
#include "zero/comm/hosts_backend.h"
#include "zero/comm/rail_address.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/watched_store.h"

namespace zero::comm {
namespace {

PeerError error_of(const Verdict& verdict) {
  return {verdict.origin, verdict.message, verdict.message};
}

/// Brings the watch's verdict to the group, whichever is there first.
class Alarm {
 public:
  void ring(const Verdict& verdict) {
    const std::lock_guard lock(mutex_);
    verdict_ = verdict;
    if (const auto health = health_.lock()) health->hear(error_of(verdict));
  }
  void connect(const std::shared_ptr<HostsHealth>& health) {
    const std::lock_guard lock(mutex_);
    health_ = health;
    if (verdict_) health->hear(error_of(*verdict_));
  }

 private:
  std::mutex mutex_;
  std::optional<Verdict> verdict_;
  std::weak_ptr<HostsHealth> health_;
};

std::shared_ptr<Group> make_group(const c10::intrusive_ptr<c10d::Store>& keys, const HostsJob& job,
                                  const GroupOptions& options,
                                  const std::shared_ptr<HostWatch>& watch, Alarm& alarm) {
  const auto& topology = job.topology;
  const auto part = [&](std::string name) {
    return c10::make_intrusive<WatchedStore>(std::move(name), keys, [watch] {
      if (const auto verdict = watch->verdict()) throw error_of(*verdict);
    });
  };
  HostsParts parts;
  parts.topology = topology;
  parts.report = [watch](const PeerError& trouble) {
    return error_of(watch->report(trouble.origin(), trouble.cause()));
  };
  parts.leave = [watch] { watch->leave(); };
  if (topology.local_size > 1) {
    const auto of_host = part(fmt::format("host/{}", topology.host));
    parts.local = meet(*of_host, topology.local_rank, topology.local_size, options.timeout,
                       topology.host * topology.local_size);
  }
  parts.rail =
      gloo_rail(part(fmt::format("rail/{}", topology.local_rank)), topology.host, topology.hosts,
                rail_address(job.store_address), {.timeout = options.timeout});
  const Accounts accounts;
  auto made = hosts_transport(std::move(parts), options.timeout, accounts);
  alarm.connect(made.health);
  return std::make_shared<Group>(std::move(made.transport), options, accounts);
}

}  // namespace

std::shared_ptr<Group> hosts_group(c10::intrusive_ptr<c10d::Store> store, const HostsJob& job,
                                   GroupOptions options) {
  const auto& topology = job.topology;
  if (!topology.regular || topology.hosts * topology.local_size != job.size) {
    throw CommError(fmt::format("Rank {} of {}: {} hosts must have as many ranks each, in order.",
                                job.rank, job.size, topology.hosts));
  }
  // A store may serve several groups, one after the other: each has its own generation of keys.
  const auto generation = store->add(fmt::format("zero/hosts/generation/{}", job.rank), 1);
  const auto keys = c10::make_intrusive<c10d::PrefixStore>(fmt::format("zero/hosts/{}", generation),
                                                           std::move(store));
  const auto alarm = std::make_shared<Alarm>();
  HostWatch::Settings settings{
      .rank = job.rank, .size = job.size, .topology = topology, .address = job.address};
  settings.arrival = std::min(settings.arrival, options.timeout);
  const auto watch = std::make_shared<HostWatch>(
      std::move(settings), *keys, [alarm](const Verdict& verdict) { alarm->ring(verdict); });
  try {
    return make_group(keys, job, options, watch, *alarm);
  } catch (const std::exception& error) {
    const auto verdict = watch->report(
        job.rank, fmt::format("Rank {} failed while the hosts joined: {}", job.rank, error.what()));
    if (verdict.origin == job.rank) throw;
    throw error_of(verdict);
  }
}

}  // namespace zero::comm
