// The queue of updates that run beside the passes.
#include "zero/engine/update_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace zero {
namespace {

using testing::ElementsAre;

// A queue whose thread stands still until `go`, in an update of unit 0, and records the rest.
struct Held {
  std::vector<int64_t> ran;
  std::atomic<int> idle{0};
  std::promise<void> gate;
  UpdateQueue queue{[this] { ++idle; }};
  Held() {
    std::promise<void> begun;
    queue.push(0, [&begun, open = gate.get_future().share()] {
      begun.set_value();
      open.wait();
    });
    begun.get_future().wait();
  }
  void push(int64_t unit) {
    queue.push(unit, [this, unit] { ran.push_back(unit); });
  }
  void go() { gate.set_value(); }
};

TEST(UpdateQueue, RunsTheLastOneFirst) {
  Held held;
  for (const int64_t unit : {3, 2, 1}) held.push(unit);
  EXPECT_EQ(held.queue.size(), 4);
  EXPECT_FALSE(held.queue.done(2));
  held.go();
  held.queue.wait_all();
  EXPECT_THAT(held.ran, ElementsAre(1, 2, 3));
  EXPECT_TRUE(held.queue.done(2));
  EXPECT_EQ(held.queue.size(), 0);
  EXPECT_EQ(held.idle, 1);
}

TEST(UpdateQueue, BindsTheUnitsThatItHasNamed) {
  Held held;
  for (const int64_t unit : {3, 2}) held.push(unit);
  EXPECT_EQ(held.queue.upcoming(0), 2);
  held.push(1);
  EXPECT_EQ(held.queue.upcoming(0), 2);
  EXPECT_EQ(held.queue.upcoming(1), 1);
  EXPECT_EQ(held.queue.upcoming(2), 3);
  EXPECT_EQ(held.queue.upcoming(3), std::nullopt);
  held.go();
  held.queue.wait_all();
  EXPECT_THAT(held.ran, ElementsAre(2, 1, 3));
}

// Nothing tells that the waiter has begun to wait: it is given more time until it has.
TEST(UpdateQueue, PrefersTheUnitThatSomebodyWaitsFor) {
  std::vector<int64_t> ran;
  for (std::chrono::milliseconds time{1}; time < std::chrono::seconds(5); time *= 2) {
    Held held;
    for (const int64_t unit : {3, 2, 1}) held.push(unit);
    auto waiter = std::async(std::launch::async, [&] {
      held.queue.wait(3);
      EXPECT_TRUE(held.queue.done(3));
    });
    std::this_thread::sleep_for(time);
    held.go();
    waiter.get();
    held.queue.wait_all();
    ran = held.ran;
    if (ran.front() == 3) break;
  }
  EXPECT_THAT(ran, ElementsAre(3, 1, 2));
}

TEST(UpdateQueue, WaitsUntilFewerAreLeft) {
  Held held;
  for (const int64_t unit : {2, 1}) held.push(unit);
  held.queue.wait_for_fewer(4);
  held.go();
  held.queue.wait_for_fewer(2);
  EXPECT_GE(held.ran.size(), 1U);
  held.queue.wait_all();
}

TEST(UpdateQueue, AFailureReachesWhoeverAsks) {
  Held held;
  held.push(2);
  held.queue.push(1, [] { throw std::runtime_error("the disk is gone"); });
  held.go();
  EXPECT_THROW(held.queue.wait_all(), std::runtime_error);
  EXPECT_THROW(held.queue.wait(2), std::runtime_error);
  EXPECT_THROW(held.queue.wait_for_fewer(1), std::runtime_error);
  EXPECT_THROW(held.push(3), std::runtime_error);
  EXPECT_THAT(held.ran, ElementsAre());
}

TEST(UpdateQueue, LeavesOutWhatWaitsWhenItEnds) {
  std::atomic<int> ran{0};
  {
    UpdateQueue queue([] {});
    std::promise<void> begun;
    std::promise<void> gate;
    queue.push(0, [&begun, &ran, open = gate.get_future().share()] {
      begun.set_value();
      open.wait();
      ++ran;
    });
    begun.get_future().wait();
    for (int64_t unit = 1; unit < 50; ++unit) queue.push(unit, [&ran] { ++ran; });
    gate.set_value();
  }
  EXPECT_LE(ran, 50);
  EXPECT_GE(ran, 1);
}

}  // namespace
}  // namespace zero
