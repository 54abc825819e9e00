// A c10d backend for the ranks of one host, over shared memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/owner_process.h"
#include "zero/comm/accounts.h"
#include "zero/comm/arena.h"
#include "zero/comm/call_backend.h"
#include "zero/comm/call_queue.h"
#include "zero/comm/group.h"
#include "zero/comm/health.h"
#include "zero/comm/shm_collectives.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/transport.h"

namespace zero::comm {

/// Collectives with `asyncOp` run on a thread of the backend, in the order of their issue, unless
/// someone waits for them first: the waiting thread then runs them itself.
class ShmBackend final : public CallBackend {
 public:
  ShmBackend(Meeting meeting, const GroupOptions& options, const Accounts& accounts);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "zero_shm"; }
  void abort() override { health_->abandon("The group was aborted."); }

  const std::shared_ptr<Health>& health() const { return health_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  std::shared_ptr<ActivitySlot> activity() const { return peers_->own_activity(); }
  /// See Group::window. Collective.
  std::unique_ptr<Window> window(int64_t bytes, int64_t slots, Category category);

 private:
  c10::intrusive_ptr<c10d::Work> issue(Call call, bool asynchronous, bool wake) override;
  c10::intrusive_ptr<IssuedCall> push(Call call, bool asynchronous, bool wake);
  /// Runs a queued call. A failure poisons the group and is returned.
  std::exception_ptr run(Call& call) noexcept;

  std::shared_ptr<Peers> peers_;
  std::shared_ptr<Health> health_;
  std::shared_ptr<Arena> arena_;
  Accounts accounts_;
  Collectives collectives_;
  std::shared_ptr<CallQueue> queue_;
  OwnerProcess owner_;
};

/// Returns a transport with all roles but subgroups, of the ranks that have met.
Transport shared_memory_transport(Meeting meeting, const GroupOptions& options,
                                  const Accounts& accounts);

}  // namespace zero::comm
