// Runs ranks as threads of one process.
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/thread.h"
#include "zero/comm/agreement.h"
#include "zero/comm/group.h"
#include "zero/comm/hosts_group.h"
#include "zero/comm/peer_error.h"
#include "zero/comm/thread_rail.h"

namespace zero::comm {
namespace {

// Keeps the failure that run_as_threads rethrows: the first that did not come from another rank.
class FirstFailure {
 public:
  void report(std::exception_ptr error, bool own) {
    const std::lock_guard lock(mutex_);
    if (error_ && (own_ || !own)) return;
    error_ = std::move(error);
    own_ = own;
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  bool own_ = false;
};

// Returns true if `error` began with this rank, and another's failure has not caused it.
bool is_own(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerFailure&) {
    return false;
  } catch (const PeerError& known) {
    return known.origin() == rank;
  } catch (...) {
    return true;
  }
}

// The rails of ranks that are threads, by key.
class ThreadRails {
 public:
  std::shared_ptr<Rail> end(const std::string& key, const RailEnd& end) {
    const std::lock_guard lock(mutex_);
    auto& rail = rails_[key];
    if (rail.empty()) rail = thread_rail(end.hosts);
    return rail[static_cast<size_t>(end.host)];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::shared_ptr<Rail>>> rails_;
};

}  // namespace

void run_as_threads(int size, const std::function<void(std::shared_ptr<Group>)>& body,
                    GroupOptions options) {
  if (size < 1) throw CommError("run_as_threads needs at least one rank.");
  run_as_hosts(1, size, body, options);
}

void run_as_hosts(int hosts, int local_size,
                  const std::function<void(std::shared_ptr<Group>)>& body, GroupOptions options) {
  if (hosts < 1 || local_size < 1)
    throw CommError("run_as_hosts needs at least one host, and one rank on each.");
  const int size = hosts * local_size;
  if (size == 1) return body(std::make_shared<Group>(nullptr, options));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ThreadRails rails;
  FirstFailure failure;
  const auto run_rank = [&](int rank) {
    std::shared_ptr<Group> group;
    try {
      group = job_group(store,
                        {.rank = rank,
                         .size = size,
                         .topology = {.hosts = hosts,
                                      .host = rank / local_size,
                                      .local_size = local_size,
                                      .local_rank = rank % local_size},
                         .make_rail = [&](const std::string& key,
                                          const RailEnd& end) { return rails.end(key, end); },
                         .watched = false},
                        options);
      body(group);
    } catch (...) {
      const auto error = std::current_exception();
      failure.report(error, is_own(error, rank));
      if (group) group->abandon(message_of(error));
    }
  };
  // Ranks begin when all threads are there, since others would wait for a thread that is refused.
  std::promise<bool> all_there;
  const auto begin = all_there.get_future().share();
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < size; ++rank) {
      threads.push_back(
          start_thread<CommError>(fmt::format("rank {} of {}", rank, size), [&, rank] {
            if (begin.get()) run_rank(rank);
          }));
    }
  } catch (...) {
    all_there.set_value(false);
    for (auto& thread : threads) thread.join();
    throw;
  }
  all_there.set_value(true);
  for (auto& thread : threads) thread.join();
  failure.rethrow();
}

}  // namespace zero::comm
