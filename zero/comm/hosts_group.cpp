#include "zero/comm/hosts_group.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/host_watch.h"
#include "zero/comm/hosts_backend.h"
#include "zero/comm/hosts_window.h"
#include "zero/comm/link_clock.h"
#include "zero/comm/shm_backend.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/watched_store.h"

namespace zero::comm {
namespace {

PeerError error_of(const Verdict& verdict) {
  return {verdict.origin, verdict.message, verdict.message};
}

// Passes word of trouble between the job's watch and the groups of a rank.
class Ear {
 public:
  struct Member {
    std::function<void(const PeerError&)> hear;           // told of trouble elsewhere
    std::function<std::optional<Peers::Trouble>()> look;  // finds trouble here; may be empty
  };
  // Tells a group of trouble while `alive` lives.
  void add(std::weak_ptr<void> alive, Member member) {
    std::optional<Verdict> known;
    {
      const std::lock_guard lock(mutex_);
      known = verdict_;
      members_.emplace_back(std::move(alive), member);
    }
    if (known) member.hear(error_of(*known));
  }
  void hear(const Verdict& verdict) {
    std::vector<std::pair<std::weak_ptr<void>, Member>> members;
    {
      const std::lock_guard lock(mutex_);
      verdict_ = verdict;
      members = members_;
    }
    for (const auto& [alive, member] : members)
      if (const auto held = alive.lock()) member.hear(error_of(verdict));
  }
  std::optional<Verdict> look() {
    const std::lock_guard lock(mutex_);
    std::erase_if(members_, [](const auto& entry) { return entry.first.expired(); });
    for (const auto& [alive, member] : members_) {
      const auto held = alive.lock();
      if (!held || !member.look) continue;
      if (const auto trouble = member.look()) return Verdict{trouble->origin, trouble->message};
    }
    return std::nullopt;
  }
  std::optional<Verdict> verdict() const {
    const std::lock_guard lock(mutex_);
    return verdict_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Verdict> verdict_;
  std::vector<std::pair<std::weak_ptr<void>, Member>> members_;
};

// Makes groups of the job's ranks, and lives as long as the last of them.
class JobGroups final : public Subgroups, public std::enable_shared_from_this<JobGroups> {
 public:
  JobGroups(c10::intrusive_ptr<c10d::Store> store, const HostsJob& job,
            std::chrono::milliseconds timeout)
      : store_(std::move(store)),
        job_(job),
        link_(job.topology.hosts > 1 ? std::make_shared<LinkClock>() : nullptr) {
    if (job_.topology.hosts == 1 || !job_.watched) return;
    watch_ = std::make_shared<HostWatch>(
        HostWatch::Settings{.rank = job_.rank,
                            .size = job_.size,
                            .topology = job_.topology,
                            .address = job_.address,
                            .arrival = std::min(HostWatch::Settings().arrival, timeout)},
        *store_, [ear = ear_](const Verdict& verdict) { ear->hear(verdict); },
        [ear = ear_] { return ear->look(); });
  }

  std::shared_ptr<Group> make(std::span<const int> ranks, const GroupOptions& options,
                              const Accounts& accounts) override {
    const auto members = members_of(ranks);
    Transport transport;
    try {
      if (members.topology.hosts == 1) {
        // The whole job meets in the store itself, where a wait does not hear of trouble.
        const bool all = ranks.size() == static_cast<size_t>(job_.size);
        const auto store = all ? store_ : part_of(keys_of(ranks), "host");
        transport = on_one_host(members, *store, options, accounts);
      } else {
        transport = on_hosts(ranks, members, keys_of(ranks), options, accounts);
      }
    } catch (const std::exception& error) {
      if (!watch_) throw;
      const auto verdict = watch_->report(
          job_.rank,
          fmt::format("Rank {} failed while a group was made: {}", job_.rank, error.what()));
      if (verdict.origin == job_.rank) throw;
      throw error_of(verdict);
    }
    transport.number = job_.rank;
    transport.link = link_;
    transport.store = [job = weak_from_this(),
                       members = std::vector<int>(ranks.begin(), ranks.end())] {
      const auto held = job.lock();
      return held->part_of(held->keys_of(members), "meeting");
    };
    transport.subgroups =
        std::make_shared<Within>(shared_from_this(), std::vector<int>(ranks.begin(), ranks.end()));
    return std::make_shared<Group>(std::move(transport), options, accounts);
  }

 private:
  // Makes groups of a group's ranks, by their numbers there.
  class Within final : public Subgroups {
   public:
    Within(std::shared_ptr<JobGroups> job, std::vector<int> ranks)
        : job_(std::move(job)), ranks_(std::move(ranks)) {}
    std::shared_ptr<Group> make(std::span<const int> ranks, const GroupOptions& options,
                                const Accounts& accounts) override {
      std::vector<int> of_job;
      for (const int rank : ranks) of_job.push_back(ranks_[static_cast<size_t>(rank)]);
      return job_->make(of_job, options, accounts);
    }

   private:
    std::shared_ptr<JobGroups> job_;
    std::vector<int> ranks_;
  };

  // Makes a window on each host of a group, for its ranks there.
  class HostWindows final : public Windows {
   public:
    HostWindows(std::shared_ptr<JobGroups> job, std::vector<int> local,
                c10::intrusive_ptr<HostsBackend> backend, const Topology& topology,
                const GroupOptions& options, Accounts accounts)
        : job_(std::move(job)),
          local_(std::move(local)),
          backend_(std::move(backend)),
          topology_(topology),
          options_(options),
          accounts_(std::move(accounts)) {}
    std::unique_ptr<Window> make(int64_t bytes, int64_t slots, Category category) override {
      auto host = local_.size() == 1 ? std::make_shared<Group>(Transport{}, options_, accounts_)
                                     : job_->make(local_, options_, accounts_);
      auto window = host->window(bytes, slots, category);
      return std::make_unique<HostsWindow>(std::move(host), std::move(window), slots, backend_,
                                           topology_, accounts_);
    }

   private:
    std::shared_ptr<JobGroups> job_;
    std::vector<int> local_;
    c10::intrusive_ptr<HostsBackend> backend_;
    Topology topology_;
    GroupOptions options_;
    Accounts accounts_;
  };

  struct Members {
    int rank = 0;            // this rank's place among them
    Topology topology;       // the members'
    std::vector<int> local;  // the members on this host, by their numbers in the job
  };

  Members members_of(std::span<const int> ranks) const {
    Members members;
    std::vector<int64_t> hosts;
    for (const int rank : ranks) hosts.push_back(rank / job_.topology.local_size);
    members.rank =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), job_.rank) - ranks.begin());
    members.topology = Topology::of(hosts, members.rank);
    if (!members.topology.regular) {
      throw CommError(
          fmt::format("A group of {} ranks from rank {} on must have equally many on each host.",
                      ranks.size(), ranks.front()));
    }
    for (size_t i = 0; i < ranks.size(); ++i)
      if (hosts[i] == job_.topology.host) members.local.push_back(ranks[i]);
    return members;
  }

  // Returns the keys of a group in the store, which differ for groups of the same ranks.
  std::string keys_of(std::span<const int> ranks) {
    const auto name = fmt::format("zero/group/{}", fmt::join(ranks, "."));
    const auto generation = part_of(name, "generation")->add(std::to_string(job_.rank), 1);
    return fmt::format("{}/{}", name, generation);
  }

  Transport on_one_host(const Members& members, c10d::Store& store, const GroupOptions& options,
                        const Accounts& accounts) {
    auto meeting = meet(store, members.rank, static_cast<int>(members.local.size()),
                        options.timeout, members.local);
    auto made = shared_memory_transport(std::move(meeting), options, accounts);
    if (watch_) {
      const auto health = std::dynamic_pointer_cast<Health>(made.liveness);
      ear_->add(health, {.hear =
                             [raw = health.get()](const PeerError& trouble) {
                               raw->fail(std::make_exception_ptr(trouble));
                             },
                         .look = [raw = health.get()] { return raw->trouble(); }});
    }
    return made;
  }

  Transport on_hosts(std::span<const int> ranks, const Members& members, const std::string& keys,
                     const GroupOptions& options, const Accounts& accounts) {
    const auto& topology = members.topology;
    HostsParts parts;
    parts.topology = topology;
    parts.link = link_;
    parts.numbers.assign(ranks.begin(), ranks.end());
    if (topology.local_size > 1) {
      const auto of_host = part_of(keys, fmt::format("host/{}", topology.host));
      parts.local =
          meet(*of_host, topology.local_rank, topology.local_size, options.timeout, members.local);
    }
    RailEnd end{.host = topology.host, .hosts = topology.hosts, .address = job_.address};
    for (int host = 0; host < topology.hosts; ++host) {
      const int member = host * topology.local_size + topology.local_rank;
      end.ranks.push_back(ranks[static_cast<size_t>(member)]);
    }
    const auto rail = fmt::format("rail/{}", topology.local_rank);
    parts.rail = job_.make_rail ? job_.make_rail(fmt::format("{}/{}", keys, rail), end)
                                : open_rail(part_of(keys, rail), end, {.timeout = options.timeout});
    if (watch_) {
      parts.lasting = watch_;
      parts.report = [watch = std::weak_ptr<HostWatch>(watch_)](const PeerError& trouble) {
        const auto held = watch.lock();
        return held ? error_of(held->report(trouble.origin(), trouble.cause())) : trouble;
      };
    }
    auto made = hosts_transport(std::move(parts), options.timeout, accounts);
    if (watch_) {
      ear_->add(
          made.health,
          {.hear = [raw = made.health.get()](const PeerError& trouble) { raw->hear(trouble); },
           .look =
               [raw = made.local.get()] {
                 return raw == nullptr ? std::nullopt : raw->trouble();
               }});
    }
    made.transport.windows = std::make_shared<HostWindows>(
        shared_from_this(), members.local, std::move(made.data), topology, options, accounts);
    return std::move(made.transport);
  }

  // Returns a store for a part of a group's keys. A rank that waits in it hears of trouble.
  c10::intrusive_ptr<c10d::Store> part_of(const std::string& keys, const std::string& name) const {
    const auto prefix = fmt::format("{}/{}", keys, name);
    if (!watch_) return c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
    return c10::make_intrusive<WatchedStore>(prefix, store_, [ear = ear_] {
      if (const auto verdict = ear->verdict()) throw error_of(*verdict);
    });
  }

  c10::intrusive_ptr<c10d::Store> store_;
  HostsJob job_;
  std::shared_ptr<LinkClock> link_;  // of all groups; null on one host
  std::shared_ptr<Ear> ear_ = std::make_shared<Ear>();
  std::shared_ptr<HostWatch> watch_;
};

}  // namespace

std::shared_ptr<Group> job_group(c10::intrusive_ptr<c10d::Store> store, const HostsJob& job,
                                 GroupOptions options, Accounts accounts) {
  if (job.size < 1 || job.rank < 0 || job.rank >= job.size)
    throw CommError(fmt::format("There is no rank {} in a group of {}.", job.rank, job.size));
  if (job.size == 1) return std::make_shared<Group>(Transport{}, options, std::move(accounts));
  ensure(job.topology.regular && job.topology.hosts * job.topology.local_size == job.size,
         "the hosts of a job have as many ranks each, in order");
  options.timeout = within_a_year(options.timeout);
  const auto groups = std::make_shared<JobGroups>(std::move(store), job, options.timeout);
  std::vector<int> all(static_cast<size_t>(job.size));
  std::iota(all.begin(), all.end(), 0);
  return groups->make(all, options, accounts);
}

std::shared_ptr<Group> shared_memory_group(c10::intrusive_ptr<c10d::Store> store, int rank,
                                           int size, GroupOptions options) {
  return job_group(std::move(store),
                   {.rank = rank, .size = size, .topology = Topology::of_one_host(size, rank)},
                   options);
}

}  // namespace zero::comm
