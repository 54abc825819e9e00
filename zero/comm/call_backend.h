// The common part of libzero's own backends: it checks a collective's tensors and makes a Call.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/call.h"
#include "zero/comm/transport.h"

namespace zero::comm {

/// Takes contiguous CPU tensors, and reduces by sums only. It extends c10d: the output of
/// _reduce_scatter_base may be Float if the input is BFloat16 or Half.
class CallBackend : public c10d::Backend {
 public:
  CallBackend(int rank, int size, std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size), timeout_(timeout) {}
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  /// All splits must be equal.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  /// Says what the next call is for.
  const std::shared_ptr<Announcements>& announcements() const { return announcements_; }
  /// Lets several backends of one rank be told of their calls in one place.
  void share_announcements(std::shared_ptr<Announcements> announcements) {
    announcements_ = std::move(announcements);
  }

 protected:
  /// Starts `call`. With `asynchronous` it goes on by itself, and the caller waits later or never.
  /// With `wake` a thread must be woken for it now.
  virtual c10::intrusive_ptr<c10d::Work> issue(Call call, bool asynchronous, bool wake) = 0;

  std::chrono::milliseconds timeout_;

 private:
  template <class CallOptions>
  c10::intrusive_ptr<c10d::Work> start(Call call, const CallOptions& options);
  void check(const at::Tensor& tensor, const char* what, Op op);
  void check_sum(const at::Tensor& input, const at::Tensor& output, const c10d::ReduceOp& reduce,
                 Op op);
  [[noreturn]] void refuse(Op op, const std::string& why);

  std::shared_ptr<Announcements> announcements_ = std::make_shared<Announcements>();
};

}  // namespace zero::comm
