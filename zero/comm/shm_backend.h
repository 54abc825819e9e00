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
#include "zero/comm/call_queue.h"
#include "zero/comm/health.h"
#include "zero/comm/shm_collectives.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/transport.h"

namespace zero::comm {

/// Takes contiguous CPU tensors. Collectives with `asyncOp` run on a thread of the backend, in the
/// order of their issue, unless someone waits for them first: the waiting thread then runs them
/// itself. Only sums are reduced. Extension: the output of _reduce_scatter_base may be Float where
/// the input is BFloat16 or Half.
class ShmBackend final : public c10d::Backend {
 public:
  ShmBackend(Meeting meeting, std::chrono::milliseconds timeout, const Accounts& accounts);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "zero_shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { health_->abandon("The group was aborted."); }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  /// Equal splits only.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  /// What the next call is for.
  const std::shared_ptr<Announcements>& announcements() const { return announcements_; }
  const std::shared_ptr<Health>& health() const { return health_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  /// See Group::window. Collective.
  std::unique_ptr<Window> window(int64_t bytes, int64_t slots, Category category);

 private:
  c10::intrusive_ptr<IssuedCall> issue(Call call, const Announcement& announced, bool asynchronous,
                                       std::chrono::milliseconds timeout);
  /// What the queue runs: a failure poisons the group and is returned.
  std::exception_ptr run(Call& call) noexcept;
  void check(const at::Tensor& tensor, const char* what, Op op);
  void check_sum(const at::Tensor& input, const at::Tensor& output, const c10d::ReduceOp& reduce,
                 Op op);
  [[noreturn]] void refuse(Op op, const std::string& why);

  std::shared_ptr<Peers> peers_;
  std::shared_ptr<Health> health_;
  std::shared_ptr<Arena> arena_;
  Accounts accounts_;
  std::chrono::milliseconds timeout_;
  Collectives collectives_;
  std::shared_ptr<Announcements> announcements_ = std::make_shared<Announcements>();
  std::shared_ptr<CallQueue> queue_;
  OwnerProcess owner_;
};

/// All five roles, by the ranks that have met.
Transport shared_memory_transport(Meeting meeting, std::chrono::milliseconds timeout,
                                  const Accounts& accounts);

}  // namespace zero::comm
