#include "zero/comm/link_clock.h"

#include <algorithm>
#include <utility>

namespace zero::comm {
namespace {

// A shorter wait finds the bytes there: it is the cost of asking.
constexpr std::chrono::microseconds kNoWait{50};
constexpr double kLongTime = 1e6;  // seconds

}  // namespace

LinkClock::State LinkClock::state() const {
  if (waits(Wait::arrival) > 0) return State::busy;
  if (waits(Wait::record) > 0) return State::peer_late;
  if (waits(Wait::departure) > 0) return State::busy;
  return calls_ > 0 ? State::processor : State::nothing_to_send;
}

LinkClock::Clock::time_point LinkClock::settle() {
  const auto now = Clock::now();
  const auto passed = now - settled_;
  spent(state()) += passed;
  if (state() == State::processor) worked_ += passed;
  settled_ = now;
  return now;
}

void LinkClock::count_call(int more) {
  if (!owner_.here()) return;  // a thread of the parent may have held the mutex
  const std::lock_guard lock(mutex_);
  settle();
  calls_ += more;
}

LinkClock::Clock::time_point LinkClock::begin_wait(Wait wait) {
  const std::lock_guard lock(mutex_);
  const auto now = settle();
  ++waits(wait);
  return now;
}

LinkClock::Clock::duration LinkClock::longest(int64_t bytes) const {
  const double seconds = 2 * static_cast<double>(bytes) / speed_->bandwidth + speed_->latency;
  return kNoWait + std::chrono::duration_cast<Clock::duration>(
                       std::chrono::duration<double>(std::min(seconds, kLongTime)));
}

void LinkClock::move(State from, State to, Clock::duration time) {
  // Several threads may have waited at the same time, which counts once.
  time = std::min(time, spent(from) - told_spent_[static_cast<size_t>(from)]);
  spent(from) -= time;
  spent(to) += time;
}

void LinkClock::end_wait(Wait wait, int64_t bytes, Clock::time_point began) {
  const std::lock_guard lock(mutex_);
  const auto now = settle();
  --waits(wait);
  if (wait == Wait::departure) return;
  const auto worked = std::exchange(worked_, {});
  if (wait == Wait::record || now - began <= kNoWait) return;
  move(State::processor, State::busy, worked);
  if (bytes == 0 || !speed_) return;
  const auto waited = now - std::max(began, told_);  // no time moves from one step to another
  move(State::busy, State::peer_late, std::max(Clock::duration{}, waited - longest(bytes)));
}

void LinkClock::set_speed(const LinkSpeed& speed) {
  const std::lock_guard lock(mutex_);
  speed_ = speed;
}

std::optional<LinkSpeed> LinkClock::speed() {
  const std::lock_guard lock(mutex_);
  return speed_;
}

LinkTimes LinkClock::times() {
  const std::lock_guard lock(mutex_);
  told_ = settle();
  told_spent_ = spent_;
  worked_ = {};
  const auto ms = [&](State state) {
    return std::chrono::duration<double, std::milli>(spent(state)).count();
  };
  return {.busy = ms(State::busy),
          .nothing_to_send = ms(State::nothing_to_send),
          .processor = ms(State::processor),
          .peer_late = ms(State::peer_late)};
}

}  // namespace zero::comm
