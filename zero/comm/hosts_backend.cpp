#include "zero/comm/hosts_backend.h"

#include <fmt/format.h>

#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/thread.h"
#include "zero/comm/memory_block.h"

namespace zero::comm {

// --- Health ---

HostsHealth::HostsHealth(int rank, std::shared_ptr<Rail> rail, std::shared_ptr<Health> local,
                         std::function<PeerError(const PeerError& trouble)> report)
    : rank_(rank), rail_(std::move(rail)), local_(std::move(local)), report_(std::move(report)) {}

void HostsHealth::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

std::exception_ptr HostsHealth::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

// Returns true if this failure is the first.
bool HostsHealth::record(const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_ = error;
  return true;
}

void HostsHealth::stop(const std::exception_ptr& error) noexcept {
  if (local_) local_->fail(error);
  rail_->abort();
}

std::exception_ptr HostsHealth::fail(const std::exception_ptr& error) noexcept {
  try {
    check();
  } catch (...) {
    return std::current_exception();
  }
  auto stands = error;
  try {
    try {
      std::rethrow_exception(error);
    } catch (const PeerError& known) {
      if (report_) stands = std::make_exception_ptr(report_(known));
      if (!record(stands)) stands = failure();  // another failure has been heard of meanwhile
    } catch (const std::exception& own) {
      // This rank throws its own words; the others get them with its number.
      const auto cause = fmt::format("Rank {} failed: {}", rank_, own.what());
      if (!record(error)) {
        stands = failure();
      } else if (report_) {
        (void)report_(PeerError(rank_, cause, cause));
      }
    }
  } catch (...) {  // nobody could be told
    if (!record(stands)) stands = failure();
  }
  stop(stands);
  return stands;
}

void HostsHealth::hear(const PeerError& trouble) noexcept {
  const auto error = std::make_exception_ptr(trouble);
  if (record(error)) stop(error);
}

void HostsHealth::abandon(std::string_view why) {
  const auto cause = fmt::format("Rank {} failed: {}", rank_, why);
  fail(std::make_exception_ptr(PeerError(rank_, cause, cause)));
}

// --- The place ---

struct HostsPlace {
  std::shared_ptr<void> lasting;  // first, since all else may report to it
  Topology topology;
  std::vector<int> numbers;
  std::shared_ptr<Rail> rail;
  Accounts accounts;
  std::shared_ptr<Peers> peers;  // this host's; null if it has one rank
  std::shared_ptr<Arena> arena;
  std::vector<std::unique_ptr<Collectives>> local;  // by channel
  std::shared_ptr<HostsHealth> health;
  OwnerProcess owner;

  HostsPlace(HostsParts parts, Accounts counted)
      : lasting(std::move(parts.lasting)),
        topology(parts.topology),
        numbers(std::move(parts.numbers)),
        rail(std::move(parts.rail)),
        accounts(std::move(counted)) {
    std::shared_ptr<Health> local_health;
    if (parts.local.peers) {
      peers = std::move(parts.local.peers);
      local_health = std::make_shared<Health>(peers);
      arena = std::make_shared<Arena>(std::move(parts.local.mapping), peers->rank(), number());
      for (int channel = 0; channel < kLocalChannels; ++channel) {
        local.push_back(
            std::make_unique<Collectives>(std::make_shared<Peers>(peers->on_channel(channel)),
                                          arena, accounts.ledger, accounts.traffic));
      }
    }
    health = std::make_shared<HostsHealth>(number(), rail, local_health, std::move(parts.report));
  }
  HostsPlace(const HostsPlace&) = delete;
  HostsPlace& operator=(const HostsPlace&) = delete;
  ~HostsPlace() {
    if (!owner.here()) return;
    if (peers) peers->post_left();
  }

  int rank() const { return topology.host * topology.local_size + topology.local_rank; }
  // This rank's number in the job.
  int number() const { return numbers.empty() ? rank() : numbers[static_cast<size_t>(rank())]; }
  int size() const { return topology.hosts * topology.local_size; }
  Collectives* on_channel(int channel) const {
    return local.empty() ? nullptr : local[static_cast<size_t>(channel)].get();
  }
  // Makes an array through which data pass on their way.
  at::Tensor make_array(int64_t bytes) const {
    return arena ? shared_tensor(arena, bytes, at::kByte, accounts.ledger, Category::communication)
                 : private_tensor(bytes, at::kByte, accounts.ledger, Category::communication);
  }
  HostsCollectives::MakeArray maker() const {
    return [this](int64_t bytes) { return make_array(bytes); };
  }
};

// --- Data ---

/// A call that has been issued; users of c10d wait on it.
class HostsBackend::Pending final : public CallWork {
 public:
  Pending(Call call, std::shared_ptr<Signal> signal) : CallWork(std::move(signal)) {
    call_.call = std::move(call);
  }

 private:
  friend class HostsBackend;
  HostsCall call_;
};

HostsBackend::HostsBackend(std::shared_ptr<HostsPlace> place, std::chrono::milliseconds timeout)
    : CallBackend(place->rank(), place->size(), timeout),
      place_(std::move(place)),
      collectives_(place_->topology, place_->numbers, *place_->rail, place_->on_channel(0),
                   place_->on_channel(1), false, place_->maker(), place_->accounts.traffic) {}

HostsBackend::~HostsBackend() {
  if (!owner_.here()) {  // a forked child, without these threads
    if (outward_.thread.joinable()) outward_.thread.detach();
    if (homeward_.thread.joinable()) homeward_.thread.detach();
    return;
  }
  if (std::uncaught_exceptions() > 0) place_->health->abandon("it left because of an exception");
  close();
}

void HostsBackend::abort() { place_->health->abandon("The group was aborted."); }

c10::intrusive_ptr<c10d::Work> HostsBackend::issue(Call call, bool asynchronous, bool /*wake*/) {
  place_->health->check();
  auto pending = c10::make_intrusive<Pending>(std::move(call), signal_);
  {
    const std::lock_guard lock(signal_->mutex);
    start_threads();
    outward_.calls.push_back(pending);
    signal_->changed.notify_all();
  }
  if (!asynchronous) pending->wait(kNoTimeout);
  return pending;
}

c10::intrusive_ptr<c10d::Work> HostsBackend::gather_to_host(const Published& what,
                                                            std::function<void()> then) {
  return issue({.op = Op::all_gather,
                .output = what.whole,
                .input = what.slice,
                .shared_output = true,
                .counted = Collective::all_gather,
                .label = FixedText<72>(what.label),
                .wire = what.wire,
                .timeout = timeout_,
                .then = std::move(then)},
               true, false);
}

// The caller holds the signal's mutex.
void HostsBackend::start_threads() {
  const auto start = [&](Phase& phase, const char* what, void (HostsBackend::*run)()) {
    if (!phase.thread.joinable())
      phase.thread = start_thread<CommError>(what, [this, run] { (this->*run)(); });
  };
  try {
    start(outward_, "what leaves a host", &HostsBackend::run_outward);
    start(homeward_, "what comes to a host", &HostsBackend::run_homeward);
  } catch (...) {  // the peers would wait for this rank
    std::rethrow_exception(place_->health->fail(std::current_exception()));
  }
}

// Runs `body`. If it fails, tells everybody and returns the failure that stands.
std::exception_ptr HostsBackend::run(const std::function<void()>& body) noexcept {
  try {
    place_->health->check();
    body();
    return nullptr;
  } catch (...) {
    return place_->health->fail(std::current_exception());
  }
}

c10::intrusive_ptr<HostsBackend::Pending> HostsBackend::take(Phase& phase, const bool& last) {
  std::unique_lock lock(signal_->mutex);
  signal_->changed.wait(lock, [&] { return !phase.calls.empty() || last; });
  if (phase.calls.empty()) return {};
  auto pending = std::move(phase.calls.front());
  phase.calls.pop_front();
  return pending;
}

void HostsBackend::run_outward() {
  while (const auto pending = take(outward_, closing_)) {
    auto& call = pending->call_;
    auto error = run([&] { collectives_.open(call); });
    {
      const std::lock_guard lock(signal_->mutex);
      homeward_.calls.push_back(pending);
      signal_->changed.notify_all();
    }
    if (!error) error = run([&] { collectives_.send(call); });
    call.sending.end(error);
  }
  const std::lock_guard lock(signal_->mutex);
  outward_closed_ = true;
  signal_->changed.notify_all();
}

void HostsBackend::run_homeward() {
  while (const auto pending = take(homeward_, outward_closed_)) {
    auto& call = pending->call_;
    const auto error = run([&] { collectives_.homeward(call); });
    if (error) {
      try {
        call.sending.wait();  // the other phase leaves the call alone from then on
      } catch (...) {         // it has failed too
      }
      HostsCollectives::drain(call);
    }
    if (!error && call.call.then) call.call.then();
    // Releases the tensors as soon as the call is done; the last Work may live for long.
    call.call.input.reset();
    call.call.output.reset();
    call.call.then = nullptr;
    const std::lock_guard lock(signal_->mutex);
    pending->finish(error);
  }
}

void HostsBackend::close() {
  {
    const std::lock_guard lock(signal_->mutex);
    closing_ = true;
    signal_->changed.notify_all();
  }
  if (outward_.thread.joinable()) outward_.thread.join();
  if (homeward_.thread.joinable()) homeward_.thread.join();
}

// --- Control ---

HostsControl::HostsControl(std::shared_ptr<HostsPlace> place, std::chrono::milliseconds timeout)
    : CallBackend(place->rank(), place->size(), timeout),
      place_(std::move(place)),
      collectives_(place_->topology, place_->numbers, *place_->rail, place_->on_channel(2),
                   place_->on_channel(2), true, place_->maker(), place_->accounts.traffic) {}

/// Runs its call on the thread that waits for it, so that it does not hold up other threads' calls.
class HostsControl::Pending final : public c10d::Work {
 public:
  Pending(Call call, c10::intrusive_ptr<HostsControl> control)
      : call_(std::move(call)), control_(std::move(control)) {}
  bool isCompleted() override { return !control_; }
  bool isSuccess() const override { return !control_; }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    if (const auto control = std::exchange(control_, {})) control->run(std::move(call_));
    return true;
  }

 private:
  Call call_;
  c10::intrusive_ptr<HostsControl> control_;
};

c10::intrusive_ptr<c10d::Work> HostsControl::issue(Call call, bool /*asynchronous*/,
                                                   bool /*wake*/) {
  return c10::make_intrusive<Pending>(std::move(call),
                                      c10::intrusive_ptr<HostsControl>::reclaim_copy(this));
}

void HostsControl::run(Call call) {
  const std::lock_guard lock(mutex_);
  HostsCall two_phases;
  two_phases.call = std::move(call);
  try {
    place_->health->check();
    collectives_.open(two_phases);
    collectives_.send(two_phases);
    two_phases.sending.end();
    collectives_.homeward(two_phases);
  } catch (...) {
    const auto stands = place_->health->fail(std::current_exception());
    HostsCollectives::drain(two_phases);
    std::rethrow_exception(stands);
  }
}

HostsTransport hosts_transport(HostsParts parts, std::chrono::milliseconds timeout,
                               const Accounts& accounts) {
  const auto place = std::make_shared<HostsPlace>(std::move(parts), accounts);
  const auto data = c10::make_intrusive<HostsBackend>(place, timeout);
  const auto control = c10::make_intrusive<HostsControl>(place, timeout);
  control->share_announcements(data->announcements());
  HostsTransport made;
  made.data = data;
  made.health = place->health;
  made.local = place->peers;
  made.transport = {.data = data,
                    .control = control,
                    .liveness = place->health,
                    .activity = place->peers ? place->peers->own_activity() : nullptr,
                    .announcements = data->announcements(),
                    .topology = place->topology};
  if (place->arena)
    made.transport.memory = std::make_shared<ArenaMemory>(place->arena, accounts.ledger);
  return made;
}

}  // namespace zero::comm
