// A c10d backend for the ranks of one host, over shared memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/arena.h"
#include "zero/comm/call_queue.h"
#include "zero/comm/health.h"
#include "zero/comm/shm_collectives.h"
#include "zero/comm/shm_meeting.h"
#include "zero/comm/transport.h"
#include "zero/comm/wait_clock.h"

namespace zero::comm {

/// Takes contiguous CPU tensors. Collectives with `asyncOp` run on a thread of the backend, in the
/// order of their issue, unless someone waits for them first: the waiting thread then runs them
/// itself. Only sums are reduced. Extension: the output of _reduce_scatter_base may be Float where
/// the input is BFloat16 or Half.
class ShmBackend final : public c10d::Backend, public Transport {
 public:
  ShmBackend(Meeting meeting, std::chrono::milliseconds timeout);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "zero_shm"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { abandon("The group was aborted."); }

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

  void announce(std::string_view label, Collective counted, bool awaited) override;
  at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category) override;
  std::unique_ptr<Window> window(int64_t bytes, int64_t slots, Category category) override;
  void abandon(std::string_view why) override { health_->abandon(why); }
  const std::shared_ptr<Traffic>& traffic() const override { return traffic_; }
  const std::shared_ptr<Ledger>& ledger() const override { return ledger_; }
  const std::shared_ptr<WaitClock>& clock() const override { return clock_; }

 private:
  /// What the next call is for.
  struct Announcement {
    FixedText<72> label{};
    std::optional<Collective> counted{};
    bool awaited = false;
  };
  /// It serves one call, be that issued or refused.
  Announcement take_announcement();
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
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();
  std::shared_ptr<WaitClock> clock_ = std::make_shared<WaitClock>();
  std::chrono::milliseconds timeout_;
  Collectives collectives_;
  std::mutex mutex_;  // of the next one
  Announcement announced_;
  std::shared_ptr<CallQueue> queue_;
};

}  // namespace zero::comm
