#include "zero/comm/launch_store.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <sstream>

#include "zero/base/error.h"
#include "zero/comm/rendezvous.h"
#include "zero/comm/token.h"
#include "zero/comm/watched_store.h"

namespace zero::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::minutes kPatience(5);
constexpr const char* kAttempt = "zero/launch/attempt";
constexpr const char* kRefused = "zero/launch/refused";
constexpr const char* kFinished = "zero/launch/finished";

}  // namespace

LaunchStore::LaunchStore(const LaunchOptions& options)
    : options_(options),
      address_(options.nnodes == 1 ? kLoopback : options.master_addr),
      port_(options.master_port),
      hosted_here_(options.node_rank == 0),
      nodes_(options.nnodes) {
  if (options.nnodes == 1) {
    auto local = host_local_store(kPatience);
    store_ = std::move(local.store);
    port_ = local.port;
  } else if (hosted_here_) {
    store_ = host_store(address_, port_, kPatience);
  } else if (options.max_restarts > 0) {
    store_ = reach_store(address_, port_, kPatience);
    if (!store_) {
      throw CommError(
          fmt::format("Node 0's launcher does not answer at {}:{}. Start it there, or give the "
                      "address at which "
                      "this host reaches it (--master-addr, --master-port).",
                      address_, port_));
    }
  }
  job_ = random_token();
  if (options.nnodes == 1 || !store_) return;
  const std::vector<uint8_t> mine(job_.begin(), job_.end());
  const auto first = store_->compareSet("zero/launch/job", {}, mine);
  job_.assign(first.begin(), first.end());
}

std::string LaunchStore::key(int attempt, const std::string& what) const {
  return fmt::format("zero/launch/{}/{}", attempt, what);
}

bool LaunchStore::has(const std::string& key) const { return store_->check({key}); }

int LaunchStore::first_attempt() {
  if (options_.nnodes == 1 || options_.max_restarts == 0 || hosted_here_) return 0;
  const bool first = store_->add(fmt::format("zero/launch/starts/{}", options_.node_rank), 1) == 1;
  const auto current = static_cast<int>(store_->add(kAttempt, 0));
  if (first && current == 0) return 0;
  const auto nodes = named(current);
  if (current > 0 && nodes.empty()) return current;  // node 0 still waits for those that come
  if (current == 0 || std::ranges::count(nodes, options_.node_rank) > 0)
    store_->set(key(current, "doomed"), "yes");
  return current + 1;
}

bool LaunchStore::doomed() const {
  try {
    return store_ && has(key(attempt_, "doomed"));
  } catch (const c10::Error&) {  // node 0 has ended, which the ranks find out
    return false;
  }
}

// Returns the nodes that take part in an attempt; none while it is not said.
std::vector<int> LaunchStore::named(int attempt) const {
  const auto said = key(attempt, "nodes");
  std::vector<int> nodes;
  if (!has(said)) return nodes;
  std::istringstream words(store_->get_to_str(said));
  for (int node = 0; words >> node;) nodes.push_back(node);
  return nodes;
}

std::optional<LaunchAttempt> LaunchStore::join(int attempt, const std::function<bool()>& pause) {
  LaunchAttempt joined{.number = attempt, .nproc = options_.nproc};
  joined.nodes = options_.nnodes;
  joined.node = options_.node_rank;
  if (options_.nnodes == 1 || attempt == 0) return joined;
  for (;; ++joined.number) {
    const auto nodes = nodes_of(joined.number, pause);
    if (!nodes) return std::nullopt;
    const auto mine = std::find(nodes->begin(), nodes->end(), options_.node_rank);
    if (mine == nodes->end()) continue;
    joined.node = static_cast<int>(mine - nodes->begin());
    joined.nodes = nodes_ = static_cast<int>(nodes->size());
    attempt_ = joined.number;
    return joined;
  }
}

// Signs in for an attempt, and waits until it is said which nodes take part.
std::optional<std::vector<int>> LaunchStore::nodes_of(int attempt,
                                                      const std::function<bool()>& pause) {
  try {
    // An attempt that this launcher has no part in goes on.
    if (attempt_ == attempt - 1) store_->set(key(attempt_, "doomed"), "yes");
    store_->set(key(attempt, std::to_string(options_.node_rank)), "here");
    if (hosted_here_) name_nodes(attempt, pause);
    for (;;) {
      if (auto nodes = named(attempt); !nodes.empty()) return nodes;
      if (has(kFinished)) {  // this launcher takes the place of one that was killed as it left
        attempt_ = static_cast<int>(store_->add(kAttempt, 0));
        return std::nullopt;
      }
      if (has(kRefused) || !pause()) return std::nullopt;
    }
  } catch (const c10::Error&) {
    if (hosted_here_) throw;
    return std::nullopt;  // node 0's launcher has ended
  }
}

// Says which nodes take part in an attempt: those that sign in before the patience is over.
void LaunchStore::name_nodes(int attempt, const std::function<bool()>& pause) {
  store_->add(kAttempt, 1);
  const auto deadline = Clock::now() + options_.rejoin;
  std::vector<int> nodes;
  do {
    nodes.clear();
    for (int node = 0; node < options_.nnodes; ++node) {
      if (has(key(attempt, std::to_string(node)))) nodes.push_back(node);
    }
  } while (static_cast<int>(nodes.size()) < options_.nnodes && Clock::now() < deadline &&
           !has(kRefused) && pause());
  const int ranks = static_cast<int>(nodes.size()) * options_.nproc;
  const int all = options_.nnodes * options_.nproc;
  if (ranks < (options_.min_ranks > 0 ? options_.min_ranks : all)) {
    refuse();
    throw CommError(fmt::format(
        "After the failure node{} {} came back within {}: {} ranks, and {} are needed. Give "
        "--rejoin more time, or go on with fewer ranks by --min-ranks.",
        nodes.size() == 1 ? "" : "s", fmt::join(nodes, ", "),
        seconds(std::chrono::duration_cast<std::chrono::milliseconds>(options_.rejoin)), ranks,
        options_.min_ranks > 0 ? options_.min_ranks : all));
  }
  store_->set(key(attempt, "nodes"), fmt::format("{}", fmt::join(nodes, " ")));
}

void LaunchStore::refuse() {
  if (options_.nnodes == 1 || !store_) return;
  try {
    store_->set(kRefused, "yes");
  } catch (const c10::Error&) {  // node 0 has ended
  }
}

bool LaunchStore::all_done(const std::function<bool()>& pause) {
  if (options_.nnodes == 1 || options_.max_restarts == 0) return true;
  const auto deadline = Clock::now() + kPatience;  // a host may have been lost
  const auto done = key(attempt_, "done");
  const auto left = key(attempt_, "ended");
  try {
    store_->add(done, 1);
    for (;;) {
      // A launcher that has left says no more, so this look comes first.
      const bool some_left = store_->add(left, 0) > 0;
      if (store_->add(done, 0) >= nodes_) {
        store_->set(kFinished, "yes");
        return true;
      }
      if (doomed()) return false;
      if (some_left || has(kRefused) || Clock::now() >= deadline || !pause()) return true;
    }
  } catch (const c10::Error&) {  // node 0's launcher has ended
    if (hosted_here_) throw;
    return true;
  }
}

void LaunchStore::leave() {
  constexpr std::chrono::seconds kMoment(1);
  if (options_.nnodes == 1) return;
  if (!store_) store_ = reach_store(address_, port_, kMoment);
  if (!store_) return;
  const auto deadline = Clock::now() + kMoment;
  try {
    answer_to([store = store_, ended = key(attempt_, "ended")] { return store->add(ended, 1); },
              [deadline] {
                if (Clock::now() >= deadline) throw CommError("Node 0 does not answer.");
              });
  } catch (const std::exception&) {  // node 0 has ended before, or is stopped
  }
}

bool LaunchStore::needed() const {
  return options_.nnodes > 1 && hosted_here_ && store_->add(key(attempt_, "ended"), 0) < nodes_;
}

}  // namespace zero::comm
