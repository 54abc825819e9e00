#include "tests/device/backend.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/device/collectives.h"
#include "tests/device/device.h"
#include "zero/comm/through_host.h"

namespace zero::simulated {

namespace {

using c10d::Work;

// It keeps the tensors until somebody waits for it.
class StreamWork final : public Work {
 public:
  explicit StreamWork(std::vector<at::Tensor> held) : held_(std::move(held)) {}
  bool isCompleted() override { return done_.query(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    const auto on = held_.empty() ? stream_ : current_stream(stream_.device_index());
    done_.block(on);
    held_.clear();
    return true;
  }
  void record(const c10::Stream& stream) {
    stream_ = stream;
    done_.record(stream);
  }

 private:
  std::vector<at::Tensor> held_;
  c10::Event done_{c10::kPrivateUse1};
  c10::Stream stream_ = stream(0);
};

class Backend final : public c10d::Backend {
 public:
  Backend(std::shared_ptr<Collectives> collectives, int rank, int size, int index)
      : c10d::Backend(rank, size),
        collectives_(std::move(collectives)),
        stream_(
            c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getStreamFromGlobalPool(device(index))) {
  }

  const std::string getBackendName() const override { return "simulated"; }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& /*options*/) override {
    return enqueue({output, input}, [&] { collectives_->all_gather(getRank(), input, output); });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& /*options*/) override {
    return enqueue({output, input},
                   [&] { collectives_->reduce_scatter(getRank(), input, output); });
  }
  c10::intrusive_ptr<Work> allreduce(std::vector<at::Tensor>& tensors,
                                     const c10d::AllreduceOptions& /*options*/) override {
    return enqueue(tensors, [&] { collectives_->all_reduce(getRank(), tensors.front()); });
  }
  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& tensors,
                                     const c10d::BroadcastOptions& options) override {
    return enqueue(tensors, [&, root = static_cast<int>(options.rootRank)] {
      collectives_->broadcast(getRank(), tensors.front(), root);
    });
  }

 private:
  c10::intrusive_ptr<Work> enqueue(std::vector<at::Tensor> tensors,
                                   const std::function<void()>& call) {
    auto work = c10::make_intrusive<StreamWork>(std::move(tensors));
    c10::Event before(c10::kPrivateUse1);
    before.record(current_stream(stream_.device_index()));
    before.block(stream_);
    const c10::StreamGuard guard(stream_);
    call();
    work->record(stream_);
    return work;
  }

  std::shared_ptr<Collectives> collectives_;
  c10::Stream stream_;
};

// The collectives of each set of ranks, which these share.
class Sets {
 public:
  std::shared_ptr<Collectives> of(const std::vector<int64_t>& ranks) {
    const std::lock_guard lock(mutex_);
    auto& found = sets_[ranks];
    if (!found) found = std::make_shared<Collectives>(static_cast<int>(ranks.size()));
    return found;
  }

 private:
  std::mutex mutex_;
  std::map<std::vector<int64_t>, std::shared_ptr<Collectives>> sets_;
};

// The numbers in the job of the ranks of a group.
std::vector<int64_t> numbers(comm::Group& ranks) {
  const auto mine = at::full({1}, static_cast<int64_t>(ranks.number()), at::kLong);
  auto all = at::empty({ranks.size()}, at::kLong);
  ranks.all_gather_control(all, mine, "numbers of ranks");
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + ranks.size()};
}

}  // namespace

void run_on_devices(int ranks, const std::function<void(std::shared_ptr<comm::Group>)>& body) {
  run_on_devices_of_hosts(1, ranks, false, body);
}

void run_on_devices_of_hosts(int hosts, int ranks, bool through_host,
                             const std::function<void(std::shared_ptr<comm::Group>)>& body) {
  const auto sets = std::make_shared<Sets>();
  hosts_met();  // a thread begins after what its maker has waited for
  comm::run_as_hosts(hosts, ranks, [&](std::shared_ptr<comm::Group> host) {
    const int index = host->rank();
    const c10::impl::VirtualGuardImpl guard(c10::kPrivateUse1);
    const auto before = guard.exchangeDevice(device(index));  // the thread is the host of no other
    comm::MakeBackend carrier = comm::ThroughHost{};
    if (!through_host) {
      carrier = [sets, index](comm::Group& of) {
        return c10::make_intrusive<Backend>(sets->of(numbers(of)), of.rank(), of.size(), index);
      };
    }
    body(comm::on_device(host, device(index), carrier));
    if (hosts * ranks == 1) guard.setDevice(before);
  });
  hosts_met();
}

}  // namespace zero::simulated
