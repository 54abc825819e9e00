#include "zero/comm/hosts_backend.h"

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "zero/base/thread.h"
#include "zero/comm/hosts_control.h"
#include "zero/comm/memory_block.h"

namespace zero::comm {

/// A call that has been issued; users of c10d wait on it.
class HostsBackend::Pending final : public CallWork {
 public:
  Pending(Call call, std::shared_ptr<Signal> signal) : CallWork(std::move(signal)) {
    call_.call = std::move(call);
  }

 private:
  friend class HostsBackend;
  HostsCall call_;
  std::optional<LinkClock::CallScope> counted_;  // until it has run
};

HostsBackend::HostsBackend(std::shared_ptr<HostsPlace> place, std::chrono::milliseconds timeout)
    : CallBackend(place->rank(), place->size(), timeout),
      place_(std::move(place)),
      collectives_(place_->topology, place_->numbers, *place_->rail, place_->on_channel(0),
                   place_->on_channel(1), false, place_->maker(), place_->accounts.traffic,
                   *place_->link) {}

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
    pending->counted_.emplace(*place_->link);
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
    pending->counted_.reset();
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
