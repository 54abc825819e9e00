// Collectives of ranks that are threads of this process, each with tensors on a device: tasks on
// the devices, ordered by events and in the checker's sight, as a transport of GPUs does it.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "tests/device/clock.h"

namespace zero::simulated {

/// Each call enqueues its part on the caller's current stream of its tensor's device and returns
/// when all ranks have called; the host waits for no work of a device. The part begins when what
/// the ranks enqueued on their streams before it is done, and what they enqueue there afterwards
/// begins when all parts are done. Ranks call the same collectives in the same order; a call that
/// does not fit the others' throws c10::Error on all ranks, and so does one that some rank has not
/// joined for a minute. Tensors are contiguous. As elsewhere, a tensor that is freed while a
/// collective on another stream than its own uses it needs record_stream.
class Collectives {
 public:
  explicit Collectives(int ranks) : parts_(static_cast<size_t>(ranks)) {}

  /// `whole` has the slices of all ranks in their order.
  void all_gather(int rank, const at::Tensor& slice, const at::Tensor& whole);
  /// Sums are added in the order of the ranks and rounded once: in fp32, of doubles in fp64.
  void reduce_scatter(int rank, const at::Tensor& whole, const at::Tensor& slice);
  void all_reduce(int rank, const at::Tensor& tensor);
  /// Sends `root`'s tensor to all.
  void broadcast(int rank, const at::Tensor& tensor, int root);

 private:
  struct Part {
    std::string call;    // its name and its root
    at::Tensor in, out;  // in: what others read
    int host = 0;        // the device whose host the rank's thread is
    int stream = 0;
    Mark before{};  // what the rank enqueued there before
  };
  /// One rank's part: the task, with what it reads and writes.
  struct Work {
    std::vector<Range> ranges;
    std::function<void()> body;
  };
  using MakeWork = std::function<Work(size_t rank, const std::vector<Part>& parts)>;
  void meet(int rank, Part part, const MakeWork& make);
  std::string mismatch() const;
  void enqueue(const MakeWork& make);

  std::mutex mutex_;
  std::condition_variable all_here_;
  std::vector<Part> parts_;
  size_t arrived_ = 0;
  int64_t round_ = 0;
  std::string failure_;  // of the last round
};

}  // namespace zero::simulated
