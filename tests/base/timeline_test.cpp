#include "zero/base/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace {
thread_local int64_t allocations = 0;
}

// This operator new shows that a timeline that is off allocates nothing. (TSan has its own.)
#ifndef __SANITIZE_THREAD__
void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

void pass_time() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

std::vector<std::string> labels_of(const Timeline& timeline) {
  std::vector<std::string> labels;
  for (const auto& span : timeline.spans()) labels.emplace_back(span.label());
  return labels;
}

TEST(Timeline, ThatIsOffKeepsNothingAndAllocatesNothing) {
  Timeline timeline;
  const auto before = allocations;
  for (int i = 0; i < 1000; ++i) {
    const Timeline::Scope phase(timeline, Activity::forward, "forward");
    const Timeline::Scope wait(timeline, Activity::wait_gather, "unit 1");
    timeline.add(Activity::gather, "unit 1", Timeline::now(), Timeline::now(), 8);
  }
  EXPECT_EQ(allocations, before);
  EXPECT_THAT(timeline.spans(), IsEmpty());
  EXPECT_EQ(timeline.dropped(), 0);
  EXPECT_FALSE(timeline.on());
}

TEST(Timeline, ThatIsOnAllocatesNothingMore) {
  Timeline timeline;
  timeline.start(100);
  const auto before = allocations;
  for (int i = 0; i < 100; ++i) {
    const Timeline::Scope phase(timeline, Activity::forward);
    timeline.add(Activity::gather, "unit 1", Timeline::now(), Timeline::now(), 8);
  }
  EXPECT_EQ(allocations, before);
  EXPECT_THAT(timeline.spans(), SizeIs(100));
  EXPECT_EQ(timeline.dropped(), 100);
}

TEST(Timeline, KeepsSpansWithTheirBytesAndNames) {
  Timeline timeline;
  timeline.start(8);
  const auto begin = Timeline::now();
  {
    const Timeline::Scope phase(timeline, Activity::backward);
    const Timeline::Scope wait(timeline, Activity::wait_reduce, "unit 1");
  }
  timeline.add(Activity::reduce, std::string(200, 'x'), begin, Timeline::now(), 24);
  timeline.stop();
  const auto spans = timeline.spans();
  ASSERT_THAT(spans, SizeIs(3));
  EXPECT_EQ(spans[0].activity, Activity::wait_reduce);
  EXPECT_EQ(spans[0].label(), "unit 1");
  EXPECT_TRUE(spans[0].training);
  EXPECT_EQ(spans[1].activity, Activity::backward);
  EXPECT_LE(spans[1].begin, spans[0].begin);
  EXPECT_GE(spans[1].end, spans[0].end);
  EXPECT_EQ(spans[2].bytes, 24);
  EXPECT_EQ(spans[2].label(), std::string(spans[2].text.size(), 'x')) << "cut";
  EXPECT_FALSE(spans[2].training);
  timeline.clear();
  EXPECT_THAT(timeline.spans(), IsEmpty());
}

TEST(Timeline, KeepsTheEndOfWhatWasUnderWayWhenItStopped) {
  Timeline timeline;
  const auto before = Timeline::now();
  timeline.start(8);
  const auto begin = Timeline::now();
  timeline.stop();
  pass_time();
  timeline.add(Activity::disk_write, "under way", begin, Timeline::now());
  timeline.add(Activity::disk_write, "after", Timeline::now(), Timeline::now());
  timeline.add(Activity::disk_write, "before", before, Timeline::now());
  EXPECT_THAT(labels_of(timeline), ElementsAre("under way"));
}

TEST(Timeline, TakesSpansOfManyThreads) {
  Timeline timeline;
  timeline.start(1 << 12);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        const Timeline::Scope update(timeline, Activity::update, "unit", 4);
        const Timeline::Scope wait(timeline, Activity::wait_disk);  // does not count on this thread
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const auto spans = timeline.spans();
  ASSERT_THAT(spans, SizeIs(4000));
  for (const auto& span : spans) {
    EXPECT_EQ(span.activity, Activity::update);
    EXPECT_FALSE(span.training);
  }
}

TEST(Timeline, CountsEachWaitOnceAndInPhasesAlone) {
  Timeline timeline;
  timeline.measure(true);
  {
    const Timeline::Scope wait(timeline, Activity::wait_gather);  // in no phase
    pass_time();
  }
  {
    const Timeline::Scope phase(timeline, Activity::step);
    const Timeline::Scope update(timeline, Activity::update);
    pass_time();
    const Timeline::Scope wait(timeline, Activity::wait_disk);
    pass_time();
  }
  const auto told = timeline.take_breakdown();
  EXPECT_EQ(told.gather, 0);
  EXPECT_GE(told.update, 2);
  EXPECT_GE(told.disk, 2);
  EXPECT_LE(told.update + told.disk, told.step);
  EXPECT_GE(told.update + told.disk, 0.9 * told.step) << "the rest is the scopes' own";
  EXPECT_EQ(told.forward, 0);
  EXPECT_EQ(timeline.take_breakdown().step, 0) << "taken";
  EXPECT_THAT(timeline.spans(), IsEmpty()) << "it only adds up";
  timeline.measure(false);
  EXPECT_FALSE(timeline.on());
}

TEST(Timeline, OfAPhaseInAnotherIsThatPhases) {
  Timeline timeline;
  timeline.measure(true);
  const auto begin = Timeline::now();
  {
    const Timeline::Scope outer(timeline, Activity::backward);
    const Timeline::Scope inner(timeline, Activity::forward);
    const Timeline::Scope wait(timeline, Activity::wait_gather);
    pass_time();
  }
  const double all = static_cast<double>(Timeline::now() - begin) / 1e6;
  const auto told = timeline.take_breakdown();
  EXPECT_GE(told.forward, 2);
  EXPECT_LE(told.gather, told.forward);
  EXPECT_LE(told.forward + told.backward, all);
}

TEST(Timeline, OfAnotherThreadIsNotCounted) {
  Timeline timeline;
  timeline.measure(true);
  {
    const Timeline::Scope phase(timeline, Activity::step);
    std::thread([&] {
      const Timeline::Scope update(timeline, Activity::update);
      pass_time();
    }).join();
  }
  EXPECT_EQ(timeline.take_breakdown().update, 0);
}

}  // namespace
}  // namespace zero
