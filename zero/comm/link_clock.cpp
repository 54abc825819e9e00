#include "zero/comm/link_clock.h"

namespace zero::comm {
namespace {

// A shorter wait finds the bytes there: it is the cost of asking.
constexpr std::chrono::microseconds kNoWait{50};

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

void LinkClock::end_wait(Wait wait, Clock::time_point began) {
  const std::lock_guard lock(mutex_);
  const auto now = settle();
  --waits(wait);
  if (wait == Wait::departure) return;
  if (wait == Wait::arrival && now - began > kNoWait) {
    spent(State::busy) += worked_;
    spent(State::processor) -= worked_;
  }
  worked_ = {};
}

LinkTimes LinkClock::times() {
  const std::lock_guard lock(mutex_);
  settle();
  worked_ = {};  // no time moves from one step to another
  const auto ms = [&](State state) {
    return std::chrono::duration<double, std::milli>(spent(state)).count();
  };
  return {.busy = ms(State::busy),
          .nothing_to_send = ms(State::nothing_to_send),
          .processor = ms(State::processor),
          .peer_late = ms(State::peer_late)};
}

}  // namespace zero::comm
