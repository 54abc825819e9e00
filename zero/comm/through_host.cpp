#include "zero/comm/through_host.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/error.h"

namespace zero::comm {

namespace {

// A collective of copies on the host. The first wait fills the tensor of the device, if this rank
// receives one.
class HostWork final : public c10d::Work {
 public:
  HostWork(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> held, at::Tensor result,
           at::Tensor output)
      : work_(std::move(work)),
        held_(std::move(held)),
        result_(std::move(result)),
        output_(std::move(output)) {}
  bool isCompleted() override { return done_; }
  bool isSuccess() const override { return !work_ || work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_ ? work_->exception() : nullptr; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (done_) return true;
    done_ = !work_ || work_->wait(timeout);
    if (!done_) return false;
    const c10::InferenceMode no_autograd;
    if (output_.defined()) output_.copy_(result_.view(output_.sizes()));
    held_.clear();
    result_.reset();
    output_.reset();
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> held_;
  at::Tensor result_, output_;
  bool done_ = false;
};

class HostCarried final : public c10d::Backend {
 public:
  explicit HostCarried(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}
  const std::string getBackendName() const override { return "through the host"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    auto given = copy(input);
    auto result = like(output);
    auto work = host_->_allgather_base(result, given, options);
    return c10::make_intrusive<HostWork>(std::move(work), std::vector{given}, result, output);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto given = copy(input);
    auto result = like(output);
    auto work = host_->_reduce_scatter_base(result, given, options);
    return c10::make_intrusive<HostWork>(std::move(work), std::vector{given}, result, output);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    std::vector result{copy(tensors.front())};
    auto work = host_->allreduce(result, options);
    return c10::make_intrusive<HostWork>(std::move(work), std::vector<at::Tensor>(), result.front(),
                                         tensors.front());
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const bool sends = options.rootRank == getRank();
    std::vector result{sends ? copy(tensors.front()) : like(tensors.front())};
    auto work = host_->broadcast(result, options);
    return c10::make_intrusive<HostWork>(std::move(work), std::vector<at::Tensor>(), result.front(),
                                         sends ? at::Tensor() : tensors.front());
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override {
    auto given = copy(input);
    auto result = like(output);
    auto work = host_->alltoall_base(result, given, output_splits, input_splits, options);
    return c10::make_intrusive<HostWork>(std::move(work), std::vector{given}, result, output);
  }

 private:
  // Waits for the device's current stream.
  static at::Tensor copy(const at::Tensor& tensor) {
    auto made = like(tensor);
    const c10::InferenceMode no_autograd;
    made.copy_(tensor.detach().reshape({-1}));
    return made;
  }
  static at::Tensor like(const at::Tensor& tensor) {
    return at::empty({tensor.numel()}, at::TensorOptions().dtype(tensor.scalar_type()));
  }

  c10::intrusive_ptr<c10d::Backend> host_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> ThroughHost::operator()(Group& /*ranks*/) const {
  throw CommError("ThroughHost is an argument of comm::on_device, which makes its backend.");
}

c10::intrusive_ptr<c10d::Backend> through_host(c10::intrusive_ptr<c10d::Backend> host) {
  return c10::make_intrusive<HostCarried>(std::move(host));
}

}  // namespace zero::comm
