#include "zero/comm/hosts_control.h"

#include <utility>

namespace zero::comm {

HostsControl::HostsControl(std::shared_ptr<HostsPlace> place, std::chrono::milliseconds timeout)
    : CallBackend(place->rank(), place->size(), timeout),
      place_(std::move(place)),
      collectives_(place_->topology, place_->numbers, *place_->rail, place_->on_channel(2),
                   place_->on_channel(2), true, place_->maker(), place_->accounts.traffic,
                   *place_->link) {}

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
  const LinkClock::CallScope counted(*place_->link);
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

}  // namespace zero::comm
