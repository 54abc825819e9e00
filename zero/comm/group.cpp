#include "zero/comm/group.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/owner_process.h"
#include "zero/base/streaming.h"
#include "zero/comm/device_backend.h"
#include "zero/comm/flight.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/link_clock.h"
#include "zero/comm/link_probe.h"
#include "zero/comm/memory_block.h"
#include "zero/comm/process.h"
#include "zero/comm/reduce_kernels.h"
#include "zero/comm/shm_window.h"
#include "zero/comm/through_host.h"
#include "zero/comm/wait_clock.h"
#include "zero/device/memory.h"

namespace zero::comm {
namespace {

// A sum over another backend, which takes one dtype, the wider of the two. It keeps a converted
// input alive, and rounds the sum into `output` if they are two tensors.
class ConvertingWork final : public c10d::Work {
 public:
  ConvertingWork(c10::intrusive_ptr<c10d::Work> work, at::Tensor input, at::Tensor sum,
                 at::Tensor output)
      : work_(std::move(work)),
        input_(std::move(input)),
        sum_(std::move(sum)),
        output_(std::move(output)) {}
  bool isCompleted() override { return work_->isCompleted() && sum_.is_same(output_); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = work_->wait(timeout);
    const c10::InferenceMode no_autograd;
    if (done && !sum_.is_same(output_)) output_.copy_(std::exchange(sum_, output_));
    return done;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor input_;
  at::Tensor sum_;
  at::Tensor output_;
};

int64_t size_in_bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// Copies values for a group of one, without operators if it can. The outputs' version counters then
// do not move, as with the other transports.
void copy_slice(const at::Tensor& output, const at::Tensor& input) {
  if (input.numel() == 0) return;
  const bool plain = input.device().is_cpu() && output.device().is_cpu() && input.is_contiguous() &&
                     output.is_contiguous();
  if (!plain) {
    const c10::InferenceMode no_autograd;
    output.copy_(input);
  } else if (input.scalar_type() != output.scalar_type()) {
    const void* from = input.const_data_ptr();
    void* to = output.mutable_data_ptr();
    sum({&to, 1}, output.scalar_type(), {&from, 1}, input.scalar_type(), input.numel(),
        static_cast<int64_t>(output.nbytes()) >= kStreamedBytes);
  } else if (output.const_data_ptr() != input.const_data_ptr()) {
    std::memcpy(output.mutable_data_ptr(), input.const_data_ptr(), input.nbytes());
  }
}

}  // namespace

struct Group::Impl {
  Transport transport;
  OwnerProcess owner;
  GroupOptions options;
  Accounts accounts;
  int rank = 0;
  int size = 1;
  Topology topology;
  std::mutex issue;                    // held over an announcement and its call
  std::vector<at::Tensor> one_tensor;  // guarded by `issue`; c10d takes some arguments as vectors

  // Issues a collective of an array of `message` bytes by `issue_call`. It waits for nothing under
  // the lock; the callers of control calls wait right after.
  template <class Issue>
  Work run(const char* what, Collective counted, int64_t logical_bytes, int64_t message,
           std::string_view label, Issue issue_call, std::optional<LinkWire> wire = {}) {
    const std::lock_guard lock(issue);
    CallName call{what, std::string(label), rank};
    try {
      if (ours(counted)) {
        transport.announcements->announce(
            {FixedText<72>(label), counted, counted == Collective::control, std::move(wire)});
      }
      Flight flight(accounts,
                    {.collective = counted, .ranks = size, .label = label, .message = message},
                    logical_bytes);
      auto work = issue_call();
      one_tensor.clear();
      accounts.traffic->add(counted, logical_bytes, ours(counted) ? 0 : logical_bytes);
      return {std::move(work), accounts.clock, std::move(call), std::move(flight)};
    } catch (...) {
      one_tensor.clear();
      rethrow_named(call);
    }
  }

  // Counts a call of a group of one, which is done already.
  Work done(Collective collective, std::string_view label, int64_t message) const {
    accounts.traffic->add(collective, 0, 0);
    Flight(accounts, {.collective = collective, .label = label, .message = message}, 0).end();
    return {};
  }

  // Returns true if the backend of such calls is libzero's own.
  bool ours(Collective collective) const {
    return transport.announcements != nullptr &&
           (!transport.foreign_data || collective == Collective::control);
  }
  c10d::Backend& backend_of(Collective collective) const {
    return collective == Collective::control ? *transport.control : *transport.data;
  }

  void check_defined(const char* what, const at::Tensor& tensor) const {
    if (tensor.defined()) return;
    throw CommError(fmt::format("{} on rank {}: a tensor is undefined.", what, rank));
  }

  void check_sizes(const char* what, int64_t whole, int64_t part) const {
    if (whole == part * size) return;
    throw CommError(fmt::format(
        "{} on rank {}: the larger tensor must have {} times the elements of the smaller, but they "
        "have {} and {}.",
        what, rank, size, whole, part));
  }

  void check_dtypes(const char* what, const at::Tensor& output, const at::Tensor& input) const {
    if (input.scalar_type() == output.scalar_type()) return;
    throw CommError(fmt::format(
        "{} on rank {}: input and output must have one dtype, but they have {} and {}.", what, rank,
        c10::toString(input.scalar_type()), c10::toString(output.scalar_type())));
  }

  void check_sum(const at::Tensor& output, const at::Tensor& input) const {
    if (can_sum(input.scalar_type(), output.scalar_type())) return;
    throw CommError(fmt::format("reduce_scatter on rank {}: {} cannot be summed into {}.", rank,
                                c10::toString(input.scalar_type()),
                                c10::toString(output.scalar_type())));
  }

  // Checks a call's wire, and drops it if nothing crosses between hosts.
  void check_wire(const char* what, std::optional<LinkWire>& wire, at::ScalarType dtype) const {
    if (!wire || topology.hosts == 1) {
      wire.reset();
      return;
    }
    const auto refuse = [&](std::string_view why) {
      throw CommError(fmt::format("{} on rank {}: {}", what, rank, why));
    };
    if (!ours(Collective::all_gather)) {
      refuse(
          "a group over a foreign backend cannot quantise or pack what crosses between hosts; use "
          "zero::init (for a device comm::on_device with comm::ThroughHost), or switch the "
          "zero_quantized_... keys and zero_packed_exponents off.");
    }
    if (wire->packed) {
      if (!can_pack_exponents(dtype))
        refuse(fmt::format("exponents of {} cannot be packed; those of Float and BFloat16 can.",
                           c10::toString(dtype)));
      return;
    }
    if (!can_quantise(dtype))
      refuse(fmt::format("{} cannot be quantised; Float, BFloat16 and Half can.",
                         c10::toString(dtype)));
    const int64_t block = wire->quantisation.block;
    if (block % 64 != 0 || block < 64 || block > kLargestBlock)
      refuse(fmt::format("a block of {} elements; it must be 64, 128, 192 or 256.", block));
  }
  void check_error(const LinkWire& wire, int64_t bytes) const {
    const auto& error = wire.error;
    if (!error.defined()) return;
    const bool fits = error.scalar_type() == at::kByte && error.is_contiguous() &&
                      error.device().is_cpu() && error.numel() == bytes;
    if (fits) return;
    throw CommError(fmt::format(
        "reduce_scatter on rank {}: the array of LinkWire::error has {} elements of {} on {}, but "
        "must be contiguous, on the CPU, and have {} of Byte (Group::feedback_bytes).",
        rank, error.numel(), c10::toString(error.scalar_type()), error.device().str(), bytes));
  }

  Work all_gather(Collective collective, at::Tensor output, at::Tensor input,
                  std::string_view label, std::optional<LinkWire> wire = {});
  Work all_reduce(Collective collective, at::Tensor tensor, std::string_view label);
  Topology find_topology() const;
};

Group::Group(Transport transport, GroupOptions options, Accounts accounts)
    : impl_(std::make_unique<Impl>()) {
  impl_->transport = std::move(transport);
  impl_->options = options;
  impl_->accounts = std::move(accounts);
  if (impl_->transport.activity) impl_->accounts.activity->show_in(impl_->transport.activity);
  if (!impl_->transport.data) return;
  if (!impl_->transport.control) impl_->transport.control = impl_->transport.data;
  impl_->rank = impl_->transport.data->getRank();
  impl_->size = impl_->transport.data->getSize();
  if (impl_->transport.topology) {
    impl_->topology = *impl_->transport.topology;
  } else {
    impl_->topology = impl_->ours(Collective::control)
                          ? Topology::of_one_host(impl_->size, impl_->rank)
                          : impl_->find_topology();
  }
}

Group::Group(c10::intrusive_ptr<c10d::Backend> backend, GroupOptions options)
    : Group(Transport{.data = std::move(backend)}, options) {}

// A forked child has a copy: threads and peers are its parent's, so it ends nothing.
Group::~Group() {
  if (!impl_->owner.here()) (void)impl_.release();
}

// The ranks tell each other which host they are on, over another backend than libzero's.
Topology Group::Impl::find_topology() const {
  if (size == 1) return {};
  auto own = at::empty({1}, at::kLong);
  auto all = at::empty({size}, at::kLong);
  own.fill_(static_cast<int64_t>(std::hash<std::string>{}(Process::self().machine)));
  try {
    if (const auto work = transport.control->_allgather_base(all, own)) work->wait();
  } catch (...) {
    rethrow_named({"all_gather", "hosts", rank});
  }
  return Topology::of({all.const_data_ptr<int64_t>(), static_cast<size_t>(size)}, rank);
}

int Group::rank() const { return impl_->rank; }
int Group::number() const { return impl_->transport.number.value_or(impl_->rank); }
int Group::size() const { return impl_->size; }
c10::Device Group::device() const { return impl_->transport.device; }
const Topology& Group::topology() const { return impl_->topology; }
const std::shared_ptr<RankActivity>& Group::activity() { return impl_->accounts.activity; }

at::Tensor Group::empty(int64_t numel, at::ScalarType dtype, Category category) {
  if (impl_->transport.memory) return impl_->transport.memory->empty(numel, dtype, category);
  if (!device().is_cpu()) return device_empty(numel, dtype, device(), ledger(), category);
  return private_tensor(numel, dtype, ledger(), category);
}

std::unique_ptr<Window> Group::window(int64_t bytes, int64_t slots, Category category) {
  if (impl_->transport.windows) {
    const ClockedScope clocked(*impl_->accounts.clock);
    return impl_->transport.windows->make(bytes, slots, category);
  }
  if (!has_windows()) return nullptr;
  return std::make_unique<SingleWindow>(bytes, slots, ledger(), category);
}

bool Group::has_windows() const {
  return impl_->transport.windows != nullptr || (impl_->size == 1 && device().is_cpu());
}

Work Group::Impl::all_gather(Collective collective, at::Tensor output, at::Tensor input,
                             std::string_view label, std::optional<LinkWire> wire) {
  check_defined("all_gather", output);
  check_defined("all_gather", input);
  check_sizes("all_gather", output.numel(), input.numel());
  check_dtypes("all_gather", output, input);
  if (size == 1) {
    copy_slice(output, input);
    return done(collective, label, size_in_bytes(output));
  }
  check_wire("all_gather", wire, input.scalar_type());
  if (wire && wire->error.defined()) {
    throw CommError(fmt::format(
        "all_gather on rank {}: an all-gather keeps no LinkWire::error; sums alone do.", rank));
  }
  const auto bytes = (size - 1) * static_cast<int64_t>(input.nbytes());
  return run(
      "all_gather", collective, bytes, size_in_bytes(output), label,
      [&] {
        c10d::AllgatherOptions call;
        call.timeout = options.timeout;
        return backend_of(collective)._allgather_base(output, input, call);
      },
      std::move(wire));
}

Work Group::Impl::all_reduce(Collective collective, at::Tensor tensor, std::string_view label) {
  check_defined("all_reduce", tensor);
  const auto bytes = size_in_bytes(tensor);
  if (size == 1) return done(collective, label, bytes);
  return run("all_reduce", collective, 2 * (size - 1) * bytes / size, bytes, label, [&] {
    c10d::AllreduceOptions call;
    call.timeout = options.timeout;
    one_tensor.assign(1, tensor);
    return backend_of(collective).allreduce(one_tensor, call);
  });
}

Work Group::all_gather(at::Tensor output, at::Tensor input, std::string_view label,
                       std::optional<LinkWire> wire) {
  return impl_->all_gather(Collective::all_gather, std::move(output), std::move(input), label,
                           std::move(wire));
}

int64_t Group::feedback_bytes(const Quantisation& quantisation, int64_t slice_numel) const {
  return (topology().hosts - 1) * wire_bytes(feedback_quantisation(quantisation), slice_numel);
}

bool Group::codes() const { return impl_->ours(Collective::all_gather); }

at::ScalarType Group::sent_dtype(at::ScalarType input, at::ScalarType output) const {
  const bool widened = impl_->size > 1 && !impl_->ours(Collective::reduce_scatter) &&
                       c10::elementSize(output) > c10::elementSize(input);
  return widened ? output : input;
}

Work Group::reduce_scatter(at::Tensor output, at::Tensor input, std::string_view label,
                           std::optional<LinkWire> wire) {
  impl_->check_defined("reduce_scatter", output);
  impl_->check_defined("reduce_scatter", input);
  impl_->check_sizes("reduce_scatter", input.numel(), output.numel());
  if (impl_->size == 1) {
    impl_->check_sum(output, input);
    copy_slice(output, input);
    return impl_->done(Collective::reduce_scatter, label, size_in_bytes(input));
  }
  const auto sent = sent_dtype(input.scalar_type(), output.scalar_type());
  const auto bytes =
      (impl_->size - 1) * output.numel() * static_cast<int64_t>(c10::elementSize(sent));
  impl_->check_wire("reduce_scatter", wire, input.scalar_type());
  if (wire && !wire->packed)
    impl_->check_error(*wire, feedback_bytes(wire->quantisation, output.numel()));
  c10d::ReduceScatterOptions call;
  call.timeout = impl_->options.timeout;
  return impl_->run(
      "reduce_scatter", Collective::reduce_scatter, bytes, size_in_bytes(input), label,
      [&]() -> c10::intrusive_ptr<c10d::Work> {
        if (impl_->ours(Collective::reduce_scatter) ||
            input.scalar_type() == output.scalar_type()) {
          return impl_->transport.data->_reduce_scatter_base(output, input, call);
        }
        auto converted = input.to(sent);
        auto sum = sent == output.scalar_type()
                       ? output
                       : at::empty(output.sizes(), output.options().dtype(sent));
        auto work = impl_->transport.data->_reduce_scatter_base(sum, converted, call);
        return c10::make_intrusive<ConvertingWork>(std::move(work), std::move(converted),
                                                   std::move(sum), output);
      },
      std::move(wire));
}

Work Group::all_reduce(at::Tensor tensor, std::string_view label) {
  return impl_->all_reduce(Collective::all_reduce, std::move(tensor), label);
}

Work Group::broadcast(at::Tensor tensor, int root, std::string_view label) {
  impl_->check_defined("broadcast", tensor);
  if (root < 0 || root >= impl_->size) {
    throw CommError(fmt::format("broadcast '{}' on rank {}: root {} is not one of the {} ranks.",
                                label, impl_->rank, root, impl_->size));
  }
  const int64_t message = size_in_bytes(tensor);
  if (impl_->size == 1) return impl_->done(Collective::broadcast, label, message);
  const auto bytes = root == impl_->rank ? message : 0;
  return impl_->run("broadcast", Collective::broadcast, bytes, message, label, [&] {
    c10d::BroadcastOptions call;
    call.rootRank = root;
    call.timeout = impl_->options.timeout;
    impl_->one_tensor.assign(1, tensor);
    return impl_->transport.data->broadcast(impl_->one_tensor, call);
  });
}

Work Group::all_to_all(at::Tensor output, at::Tensor input, std::string_view label) {
  impl_->check_defined("all_to_all", output);
  impl_->check_defined("all_to_all", input);
  impl_->check_dtypes("all_to_all", output, input);
  if (impl_->size == 1) {
    impl_->check_sizes("all_to_all", output.numel(), input.numel());
    copy_slice(output, input);
    return impl_->done(Collective::all_to_all, label, size_in_bytes(input));
  }
  const auto bytes = size_in_bytes(input) / impl_->size * (impl_->size - 1);
  return impl_->run("all_to_all", Collective::all_to_all, bytes, size_in_bytes(input), label, [&] {
    c10d::AllToAllOptions call;
    call.timeout = impl_->options.timeout;
    std::vector<int64_t> equal_slices;
    return impl_->transport.data->alltoall_base(output, input, equal_slices, equal_slices, call);
  });
}

void Group::barrier(std::string_view label) {
  if (impl_->size == 1) {
    impl_->done(Collective::control, label, 0);
    return;
  }
  impl_
      ->run("barrier", Collective::control, 0, 0, label,
            [&] {
              c10d::BarrierOptions call;
              call.timeout = impl_->options.timeout;
              return impl_->transport.control->barrier(call);
            })
      .wait();
}

void Group::all_gather_control(at::Tensor output, at::Tensor input, std::string_view label) {
  impl_->all_gather(Collective::control, std::move(output), std::move(input), label).wait();
}

void Group::all_reduce_control(at::Tensor tensor, std::string_view label) {
  impl_->all_reduce(Collective::control, std::move(tensor), label).wait();
}

void Group::abandon(std::string_view why) {
  if (impl_->transport.liveness) impl_->transport.liveness->abandon(why);
}

c10::intrusive_ptr<c10d::Store> Group::store() {
  if (impl_->transport.store) return impl_->transport.store();
  throw CommError(
      "A group of one, or over a foreign backend, has no store in which its ranks could meet.");
}

std::shared_ptr<Group> Group::subgroup(std::span<const int> ranks) {
  const bool ascending =
      std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal{}) == ranks.end();
  if (!ascending || ranks.empty() || ranks.front() < 0 || ranks.back() >= size() ||
      std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) {
    throw CommError(fmt::format(
        "The ranks of a subgroup must be ascending ranks of the group of {}, among them rank {}, "
        "which asks for it; they are {}.",
        size(), rank(), fmt::join(ranks, ", ")));
  }
  if (ranks.size() == 1) {
    auto alone = single(impl_->accounts);
    return device().is_cpu() ? alone : on_device(std::move(alone), device());
  }
  if (!impl_->transport.subgroups) {
    throw CommError(
        "A group over a foreign backend has no subgroups; make them with that backend, or use "
        "zero::init.");
  }
  auto options = impl_->options;
  if (const int block = std::exchange(options.sum_block, 0); block > 0) {
    // The members of the first block among `ranks` are the new block, so that the ranks add as
    // those of several hosts do.
    options.sum_block = static_cast<int>(std::ranges::count_if(
        ranks, [&](int rank) { return rank / block == ranks.front() / block; }));
  }
  return impl_->transport.subgroups->make(ranks, options, impl_->accounts);
}

const Accounts& Group::accounts() const { return impl_->accounts; }
Traffic& Group::traffic() { return *impl_->accounts.traffic; }
const std::shared_ptr<Ledger>& Group::ledger() const { return impl_->accounts.ledger; }

double Group::wait_ms() const {
  return static_cast<double>(impl_->accounts.clock->nanoseconds.load(std::memory_order_relaxed)) *
         1e-6;
}

std::optional<LinkTimes> Group::link_times() const {
  if (!impl_->transport.link) return std::nullopt;
  return impl_->transport.link->times();
}

std::optional<LinkSpeed> Group::link_speed() const {
  if (!impl_->transport.link) return std::nullopt;
  return impl_->transport.link->speed();
}

std::optional<LinkSpeed> Group::measure_link() {
  if (!impl_->transport.link || topology().hosts == 1) return std::nullopt;
  auto& link = *impl_->transport.link;
  // Some of the ranks may have measured it in another group.
  const auto known = gather_records(*this, link.speed(), "the link's speed");
  const auto same = [&](const auto& each) { return each && each == known.front(); };
  if (std::ranges::all_of(known, same)) return known.front();
  const auto speed = probe_link(*this, [&](at::Tensor output, at::Tensor input) {
    const auto bytes = (size() - 1) * static_cast<int64_t>(input.nbytes());
    return impl_->run("all_gather", Collective::control, bytes, size_in_bytes(output),
                      "the link's probe", [&] {
                        c10d::AllgatherOptions call;
                        call.timeout = impl_->options.timeout;
                        return impl_->transport.data->_allgather_base(output, input, call);
                      });
  });
  link.set_speed(speed);
  return speed;
}

namespace {

// Ends a backend that a plugin has made, when its group is destroyed. It completes the device's
// work under way, unless the group has failed: then that might never be complete.
class DeviceBackendEnd {
 public:
  DeviceBackendEnd(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Liveness> liveness)
      : backend_(std::move(backend)), liveness_(std::move(liveness)) {}
  DeviceBackendEnd(const DeviceBackendEnd&) = delete;
  DeviceBackendEnd& operator=(const DeviceBackendEnd&) = delete;
  ~DeviceBackendEnd() {
    const bool failed = std::uncaught_exceptions() > 0 || (liveness_ && liveness_->failed());
    try {
      failed ? backend_->abort() : backend_->shutdown();
    } catch (const std::exception&) {  // the backend has ended already
    }
  }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<Liveness> liveness_;
};

class DeviceSubgroups final : public Subgroups {
 public:
  /// `make` and `end` are those of the group itself; each may be null.
  DeviceSubgroups(std::shared_ptr<Group> host, c10::Device device, MakeBackend make,
                  std::unique_ptr<DeviceBackendEnd> end)
      : host_(std::move(host)), device_(device), make_(std::move(make)), end_(std::move(end)) {}
  std::shared_ptr<Group> make(std::span<const int> ranks, const GroupOptions& /*options*/,
                              const Accounts& /*accounts*/) override {
    return on_device(host_->subgroup(ranks), device_, make_);
  }

 private:
  std::shared_ptr<Group> host_;
  c10::Device device_;
  MakeBackend make_;
  std::unique_ptr<DeviceBackendEnd> end_;
};

}  // namespace

std::shared_ptr<Group> on_device(std::shared_ptr<Group> host, c10::Device device,
                                 MakeBackend make) {
  const auto& of_host = host->impl_->transport;
  Transport transport{.control = of_host.control,
                      .liveness = of_host.liveness,
                      .announcements = of_host.announcements,
                      .foreign_data = make.target<ThroughHost>() == nullptr,
                      .topology = host->topology(),
                      .device = device,
                      .number = of_host.number};
  if (!transport.foreign_data) transport.link = of_host.link;
  std::unique_ptr<DeviceBackendEnd> end;
  if (host->size() > 1) {
    if (!transport.foreign_data) {
      transport.data = through_host(of_host.data);
    } else if (make) {
      transport.data = make(*host);
    } else {
      transport.data = backend_of_plugin(device.type(), host->impl_->options.timeout)(*host);
      end = std::make_unique<DeviceBackendEnd>(transport.data, transport.liveness);
    }
  }
  const auto options = host->impl_->options;
  const auto accounts = host->accounts();
  // The subgroups hold the host's group too, since its roles are used here.
  transport.subgroups =
      std::make_shared<DeviceSubgroups>(std::move(host), device, std::move(make), std::move(end));
  return std::make_shared<Group>(std::move(transport), options, accounts);
}

std::shared_ptr<Group> single(Accounts accounts) {
  return std::make_shared<Group>(Transport{}, GroupOptions{}, std::move(accounts));
}

}  // namespace zero::comm
