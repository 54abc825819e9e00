// Ranks as threads of one process.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/agreement.h"
#include "zero/comm/group.h"
#include "zero/comm/shm_backend.h"
#include "zero/comm/shm_meeting.h"

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

}  // namespace

void run_as_threads(int size, const std::function<void(std::shared_ptr<Group>)>& body,
                    GroupOptions options) {
  if (size < 1) throw CommError("run_as_threads needs at least one rank.");
  if (size == 1) return body(std::make_shared<Group>(nullptr, options));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  FirstFailure failure;
  const auto run_rank = [&](int rank) {
    c10::intrusive_ptr<ShmBackend> backend;
    try {
      backend = c10::make_intrusive<ShmBackend>(meet(*store, rank, size, options.timeout),
                                                options.timeout);
      body(std::make_shared<Group>(backend, options));
    } catch (...) {
      const auto error = std::current_exception();
      failure.report(error, is_own(error, rank));
      if (backend) backend->abandon(message_of(error));
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  failure.rethrow();
}

}  // namespace zero::comm
