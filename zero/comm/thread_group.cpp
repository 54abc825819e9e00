// Ranks as threads of one process.
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/thread.h"
#include "zero/comm/agreement.h"
#include "zero/comm/group.h"
#include "zero/comm/hosts_backend.h"
#include "zero/comm/shm_backend.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/thread_rail.h"

namespace zero::comm {
namespace {

// The failure that run_as_threads rethrows: the first that did not come from another rank.
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

// Whether `error` began with this rank, and is not what another's failure has led to.
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

// A rank's transport, made beside the others'.
using MakeTransport = std::function<Transport(int rank, const Accounts& accounts)>;

void run_ranks(int size, const MakeTransport& make,
               const std::function<void(std::shared_ptr<Group>)>& body, GroupOptions options) {
  FirstFailure failure;
  const auto run_rank = [&](int rank) {
    Transport transport;
    try {
      const Accounts accounts;
      transport = make(rank, accounts);
      body(std::make_shared<Group>(transport, options, accounts));
    } catch (...) {
      const auto error = std::current_exception();
      failure.report(error, is_own(error, rank));
      if (transport.liveness) transport.liveness->abandon(message_of(error));
    }
  };
  // They begin when all are there: a rank whose thread is refused would be waited for.
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

}  // namespace

void run_as_threads(int size, const std::function<void(std::shared_ptr<Group>)>& body,
                    GroupOptions options) {
  if (size < 1) throw CommError("run_as_threads needs at least one rank.");
  if (size == 1) return body(std::make_shared<Group>(nullptr, options));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(
      size,
      [&](int rank, const Accounts& accounts) {
        return shared_memory_transport(meet(*store, rank, size, options.timeout), options,
                                       accounts);
      },
      body, options);
}

void run_as_hosts(int hosts, int local_size,
                  const std::function<void(std::shared_ptr<Group>)>& body, GroupOptions options) {
  if (hosts < 1 || local_size < 1)
    throw CommError("run_as_hosts needs at least one host, and one rank on each.");
  if (hosts == 1) return run_as_threads(local_size, body, options);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::vector<std::shared_ptr<Rail>>> rails;
  for (int r = 0; r < local_size; ++r) rails.push_back(thread_rail(hosts));
  run_ranks(
      hosts * local_size,
      [&](int rank, const Accounts& accounts) {
        HostsParts parts;
        const int host = rank / local_size;
        parts.topology = {.hosts = hosts,
                          .host = host,
                          .local_size = local_size,
                          .local_rank = rank % local_size};
        parts.rail = rails[static_cast<size_t>(rank % local_size)][static_cast<size_t>(host)];
        if (local_size > 1) {
          c10d::PrefixStore of_host(fmt::format("host/{}", host), store);
          parts.local =
              meet(of_host, rank % local_size, local_size, options.timeout, host * local_size);
        }
        return hosts_transport(std::move(parts), options.timeout, accounts).transport;
      },
      body, options);
}

}  // namespace zero::comm
