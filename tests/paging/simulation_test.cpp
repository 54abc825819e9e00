// The simulated timeline against steps that are worked out by hand, and against formulas.
#include "zero/paging/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace zero::paging {
namespace {

// A byte and a FLOP take a second each.
constexpr Speeds kOne{.compute = 1, .link = 1, .pcie = 1, .disk = 1, .update = 1};

double exposed(const SimulatedStep& step, Resource resource) {
  return step.exposed[static_cast<size_t>(resource)];
}
double busy(const SimulatedStep& step, Resource resource) {
  return step.busy[static_cast<size_t>(resource)];
}

// Units that are used one after the other in forward, an operator each, and nothing else.
StepSchedule chain(const std::vector<double>& flops, int64_t gather, int64_t budget_units,
                   int64_t prefetch_units) {
  StepSchedule schedule;
  for (size_t i = 0; i < flops.size(); ++i) {
    const auto unit = static_cast<int64_t>(i);
    schedule.trace.record({&unit, 1});
    schedule.units.push_back({.bytes = 8, .gather = gather, .trainable = false});
  }
  schedule.flops = flops;
  schedule.backward.assign(flops.size(), 0);
  schedule.budget_bytes = 8 * budget_units;
  schedule.prefetch_bytes = 8 * prefetch_units;
  return schedule;
}

// Two units forward and back, 1 and 2 seconds each time; both stay gathered in between.
StepSchedule there_and_back(int64_t gather, int64_t reduce) {
  StepSchedule schedule;
  for (const int64_t unit : {0, 1, 1, 0}) schedule.trace.record({&unit, 1});
  schedule.flops = {1, 1, 2, 2};
  schedule.backward = {0, 0, 1, 1};
  schedule.reductions = {{1, 2}, {0, 3}};
  schedule.units.assign(2, {.bytes = 8, .gather = gather, .reduce = reduce});
  schedule.budget_bytes = 16;
  return schedule;
}

const SimulatedTask& find(const SimulatedStep& step, Work work, int64_t unit) {
  return *std::find_if(step.tasks.begin(), step.tasks.end(), [&](const SimulatedTask& task) {
    return task.work == work && task.unit == unit;
  });
}

// L (c + g) on demand; g + (L - 1) max(c, g) + c with a unit ahead.
TEST(Simulation, OfUniformLayersIsTheFormula) {
  for (const int layers : {1, 2, 5, 12}) {
    for (const int64_t gather : {1, 3, 4, 7}) {
      const double compute = 4;
      const double g = static_cast<double>(gather);
      const std::vector<double> flops(static_cast<size_t>(layers), compute);
      const auto serial = simulate(chain(flops, gather, layers, 0), kOne);
      EXPECT_EQ(serial.seconds, layers * (compute + g));
      EXPECT_EQ(exposed(serial, Resource::link), layers * g);
      EXPECT_EQ(serial.live_bytes, 8);
      for (int ahead = 1; ahead <= layers; ++ahead) {
        const auto step = simulate(chain(flops, gather, layers, ahead), kOne);
        EXPECT_EQ(step.seconds, g + (layers - 1) * std::max(compute, g) + compute) << ahead;
        EXPECT_EQ(exposed(step, Resource::link), g + (layers - 1) * std::max(0.0, g - compute));
        EXPECT_EQ(step.live_bytes, 8 * std::min(ahead + 1, layers));
      }
    }
  }
}

TEST(Simulation, WithoutRoomForASecondUnitNothingIsAhead) {
  const std::vector<double> flops(5, 4);
  EXPECT_EQ(simulate(chain(flops, 3, 1, 5), kOne).seconds, 5 * (4 + 3));
  EXPECT_EQ(simulate(chain(flops, 3, 2, 5), kOne).seconds, 3 + 5 * 4);
}

TEST(Simulation, WhatIsInfinitelyFastTakesNoTime) {
  const auto step = simulate(chain({2, 2, 2}, 5, 3, 0), {.compute = 2});
  EXPECT_EQ(step.seconds, 3);
  EXPECT_EQ(step.exposed_seconds(), 0);
}

// Half of each message's time is lost for computing. The first gather comes while nothing is
// computed, so it costs nothing; each later one costs the operator behind it a second.
TEST(Simulation, ProcessorsThatCarryMessagesComputeLater) {
  auto speeds = kOne;
  speeds.link_work = 0.5;
  const auto step = simulate(chain({4, 4, 4}, 2, 3, 1), speeds);
  // A gather for the second unit begins with the first operator.
  EXPECT_EQ(step.seconds, 2 + 5 + 5 + 4);
  EXPECT_EQ(exposed(step, Resource::link), 2);
  EXPECT_EQ(busy(step, Resource::compute), 14);
  // On demand all is carried while computing waits.
  EXPECT_EQ(simulate(chain({4, 4, 4}, 2, 3, 0), speeds).seconds, 3 * (2 + 4));
}

// Gathers at 0 and 2, operators at 1, 3, 4, 6; the first reduction runs from 6 to 9 beside the last
// operator, the second from 9 to 12 beside nothing.
TEST(Simulation, ReducesBesideBackward) {
  const auto step = simulate(there_and_back(1, 3), kOne);
  EXPECT_EQ(step.seconds, 12);
  EXPECT_EQ(busy(step, Resource::compute), 6);
  EXPECT_EQ(busy(step, Resource::link), 8);
  EXPECT_EQ(exposed(step, Resource::link), 6);
  EXPECT_EQ(find(step, Work::gather, 1).begin, 2);
  EXPECT_EQ(find(step, Work::reduce, 1).begin, 6);
  EXPECT_EQ(find(step, Work::reduce, 0).begin, 9);
  EXPECT_EQ(step.bytes[static_cast<size_t>(Resource::link)], 8);
}

// Stages 0 to 2: nothing is gathered in the passes; 0 and 1 reduce in the last one, or when it has
// ended; 1 and 2 gather what they have updated.
TEST(Simulation, OfReplicatedStates) {
  auto schedule = there_and_back(1, 3);
  schedule.gathers = false;
  for (auto& unit : schedule.units) {
    unit.publish = 1;
    unit.update = 2;
  }
  auto step = simulate(schedule, kOne);
  // Operators to 6, reductions from 4 to 7 and to 10, updates to 12 and 14, gathers to 13 and 15.
  EXPECT_EQ(step.seconds, 15);
  EXPECT_EQ(exposed(step, Resource::link), 5);
  schedule.reduces_in = ReducesIn::last_pass;
  EXPECT_EQ(simulate(schedule, kOne).seconds, 15);
  schedule.reduces_in = ReducesIn::step;
  step = simulate(schedule, kOne);
  EXPECT_EQ(step.seconds, 6 + 6 + 4 + 1);
  EXPECT_EQ(exposed(step, Resource::link), 7);
  EXPECT_EQ(find(step, Work::reduce, 1).begin, 6);
}

// A third bucket is the first one again.
TEST(Simulation, TwoReductionsAreUnderWay) {
  StepSchedule schedule;
  for (const int64_t unit : {2, 1, 0}) schedule.trace.record({&unit, 1});
  schedule.flops = {1, 1, 1};
  schedule.backward = {1, 1, 1};
  schedule.reductions = {{2, 0}, {1, 1}, {0, 2}};
  schedule.units.assign(3, {.bytes = 8, .reduce = 10});
  schedule.gathers = false;
  const auto step = simulate(schedule, kOne);
  EXPECT_EQ(find(step, Work::backward, 1).begin, 1);
  EXPECT_EQ(find(step, Work::backward, 0).begin, 11);
  EXPECT_EQ(step.seconds, 31);
  EXPECT_EQ(exposed(step, Resource::link), 9 + 19);
  // Arrays that stay are nobody else's.
  schedule.reduces_in = ReducesIn::last_pass;
  EXPECT_EQ(find(simulate(schedule, kOne), Work::backward, 0).begin, 2);
}

// Two micro-batches: gradients that stay are added up, and go with the second one's.
TEST(Simulation, ReplicatedGradientsAreReducedInTheLastPass) {
  StepSchedule schedule;
  for (const int64_t unit : {1, 0, 1, 0}) schedule.trace.record({&unit, 1});
  schedule.flops = {1, 1, 1, 1};
  schedule.backward = {1, 1, 1, 1};
  schedule.reductions = {{1, 0}, {0, 1}, {1, 2}, {0, 3}};
  schedule.units.assign(2, {.bytes = 8, .reduce = 2});
  schedule.gathers = false;
  EXPECT_EQ(busy(simulate(schedule, kOne), Resource::link), 8);
  schedule.reduces_in = ReducesIn::last_pass;
  const auto step = simulate(schedule, kOne);
  EXPECT_EQ(busy(step, Resource::link), 4);
  EXPECT_EQ(find(step, Work::reduce, 1).begin, 3);
  EXPECT_EQ(step.seconds, 7);
}

TEST(Simulation, ASliceComesFromTheDiskOverTheHost) {
  auto schedule = chain({1}, 4, 1, 0);
  schedule.units[0].gather_read = 2;
  schedule.units[0].gather_up = 3;
  const auto step = simulate(schedule, kOne);
  EXPECT_EQ(step.seconds, 2 + 3 + 4 + 1);
  EXPECT_EQ(exposed(step, Resource::disk), 2);
  EXPECT_EQ(exposed(step, Resource::up), 3);
  EXPECT_EQ(exposed(step, Resource::link), 4);
}

// Reads of 2 seconds before operators of 3, gathered on demand in no time.
TEST(Simulation, ReadsGoAheadOfGathersAsFarAsTheirBuffersDo) {
  auto schedule = chain({3, 3, 3}, 0, 3, 0);
  for (auto& unit : schedule.units) unit.gather_read = 2;
  EXPECT_EQ(simulate(schedule, kOne).seconds, 2 + 3 + 3 + 3);  // one is always ahead
  // Without operators to hide behind the disk is the limit.
  schedule.flops = {0.5, 0.5, 0.5};
  EXPECT_EQ(simulate(schedule, kOne).seconds, 2 + 2 + 2 + 0.5);
  // Uneven: 5 seconds of computing hide two reads where there are buffers for both.
  schedule.flops = {5, 1, 1};
  EXPECT_EQ(simulate(schedule, kOne).seconds, 2 + 5 + 1 + 1 + 1);
  schedule.read_ahead_bytes = 4;
  EXPECT_EQ(simulate(schedule, kOne).seconds, 2 + 5 + 1 + 1);
}

// ZeRO-Offload: gradients come down beside backward, the host updates, parameters go up.
TEST(Simulation, UpdatesOnTheHost) {
  auto schedule = there_and_back(0, 0);
  for (auto& unit : schedule.units) {
    unit.reduce_down = 1;
    unit.update = 3;
    unit.update_up = 2;
    unit.updated_on_host = true;
  }
  const auto step = simulate(schedule, kOne);
  // Operators to 6, the second sum to 7, updates to 10 and 13, copies to 12 and 15.
  EXPECT_EQ(step.seconds, 15);
  EXPECT_EQ(busy(step, Resource::host), 6);
  EXPECT_EQ(exposed(step, Resource::down), 1);
  EXPECT_EQ(exposed(step, Resource::host), 6);
  EXPECT_EQ(exposed(step, Resource::up), 2);
}

// ZeRO-Infinity: the next unit's states are read beside an update, and written behind it.
TEST(Simulation, StatesStreamFromTheDisk) {
  auto schedule = there_and_back(0, 0);
  for (auto& unit : schedule.units) {
    unit.update_read = 2;
    unit.update = 2;
    unit.update_write = 2;
    unit.updated_on_host = true;
  }
  const auto step = simulate(schedule, kOne);
  // Reads to 8 and 10, updates to 10 and 12, writes to 12 and 14.
  EXPECT_EQ(step.seconds, 14);
  EXPECT_EQ(busy(step, Resource::disk), 8);
}

// Updates beside other work: in backward each begins when the next unit is reduced, and in the next
// step all begin with it. New parameters go up when the passes have ended.
TEST(Simulation, UpdatesBesideOtherWork) {
  auto schedule = there_and_back(0, 0);
  for (auto& unit : schedule.units) {
    unit.reduce_down = 1;
    unit.update_read = 1;
    unit.update = 3;
    unit.update_write = 1;
    unit.update_up = 2;
    unit.updated_on_host = true;
  }
  schedule.updates_in = UpdatesIn::backward;
  const auto backward = simulate(schedule, kOne);
  // The first sum is down at 5 and its states are read at 6, the second at 7 and 8. Updates to 9
  // and 12, copies to 14 and 16.
  EXPECT_EQ(find(backward, Work::update, 1).begin, 6);
  EXPECT_EQ(find(backward, Work::update, 0).begin, 9);
  EXPECT_EQ(backward.seconds, 16);
  schedule.updates_in = UpdatesIn::next_step;
  const auto next = simulate(schedule, kOne);
  // Reads to 1 and 2, updates to 4 and 7, beside operators to 6 and the sum to 7; copies to 9
  // and 11.
  EXPECT_EQ(find(next, Work::update, 0).begin, 1);
  EXPECT_EQ(find(next, Work::update, 1).begin, 4);
  EXPECT_EQ(next.seconds, 11);
  for (const auto& step : {backward, next}) {
    EXPECT_EQ(busy(step, Resource::host), 6);
    EXPECT_EQ(busy(step, Resource::disk), 4);
  }
}

// In a gather the second update is hidden behind the first unit's message.
TEST(Simulation, UpdatesInGathers) {
  auto schedule = there_and_back(4, 0);
  schedule.prefetch_bytes = 8;
  for (auto& unit : schedule.units) unit.update = 2;
  // Gathers to 4 and 8, operators to 5, 9, 11 and 13, updates to 15 and 17.
  EXPECT_EQ(simulate(schedule, kOne).seconds, 17);
  for (auto& unit : schedule.units) unit.updated_in_gather = true;
  const auto step = simulate(schedule, kOne);
  // Updates to 2 and 4, gathers to 6 and 10, operators to 7, 11, 13 and 15.
  EXPECT_EQ(find(step, Work::update, 1).begin, 2);
  EXPECT_EQ(find(step, Work::gather, 0).begin, 2);
  EXPECT_EQ(step.seconds, 15);
  EXPECT_EQ(busy(step, Resource::compute), 6 + 4);
}

// The second micro-batch's sum is added to the first one's, on a disk.
TEST(Simulation, FurtherReductionsReadTheSumSoFar) {
  StepSchedule schedule;
  const int64_t unit = 0;
  for (int pass = 0; pass < 2; ++pass) schedule.trace.record({&unit, 1});
  schedule.flops = {1, 1};
  schedule.backward = {1, 1};
  schedule.reductions = {{0, 0}, {0, 1}};
  schedule.units = {{.bytes = 8,
                     .reduce = 1,
                     .reduce_down = 1,
                     .reduce_down_next = 2,
                     .reduce_write = 1,
                     .reduce_read = 1,
                     .reduce_at_end = 5}};
  schedule.gathers = false;
  const auto step = simulate(schedule, kOne);
  EXPECT_EQ(step.bytes[static_cast<size_t>(Resource::down)], 3);
  EXPECT_EQ(step.bytes[static_cast<size_t>(Resource::disk)], 3);
  // Operators to 2, the second reduction to 3, down to 5, read and written to 7, replicas to 12.
  EXPECT_EQ(step.seconds, 12);
}

// These hold for any step: a resource does one thing at a time, nothing begins before what it
// waited for, and the gaps of `compute` are charged to others to the last.
TEST(Simulation, ExposedTimeIsWhatComputingDoesNotFill) {
  std::mt19937 random(7);
  const auto pick = [&](int64_t most) {
    return static_cast<int64_t>(random() % static_cast<uint32_t>(most + 1));
  };
  for (int trial = 0; trial < 300; ++trial) {
    StepSchedule schedule;
    const int64_t units = 1 + pick(5);
    std::vector<int64_t> order(static_cast<size_t>(units));
    std::iota(order.begin(), order.end(), 0);
    for (const int64_t unit : order) schedule.trace.record({&unit, 1});
    std::reverse(order.begin(), order.end());
    for (const int64_t unit : order) {
      schedule.reductions.push_back({unit, schedule.trace.operators()});
      schedule.trace.record({&unit, 1});
    }
    for (size_t p = 0; p < schedule.trace.operators(); ++p) {
      schedule.flops.push_back(static_cast<double>(pick(9)));
      schedule.backward.push_back(p >= order.size() ? 1 : 0);
    }
    for (int64_t u = 0; u < units; ++u) {
      schedule.units.push_back({.bytes = 1 + pick(8),
                                .gather = pick(5),
                                .gather_up = pick(3),
                                .gather_read = pick(3),
                                .reduce = pick(5),
                                .reduce_down = pick(3),
                                .reduce_write = pick(2),
                                .update_read = pick(3),
                                .update_down = pick(2),
                                .update = pick(4),
                                .update_write = pick(3),
                                .update_up = pick(2),
                                .publish = pick(3),
                                .trainable = pick(4) > 0,
                                .updated_on_host = pick(1) > 0});
    }
    schedule.gathers = pick(3) > 0;
    schedule.reduces_in = static_cast<ReducesIn>(pick(2));
    schedule.budget_bytes = pick(30);
    schedule.prefetch_bytes = pick(20);
    schedule.read_ahead_bytes = pick(6);
    const auto step = simulate(schedule, kOne);
    EXPECT_DOUBLE_EQ(step.seconds, busy(step, Resource::compute) + step.exposed_seconds());
    std::map<Resource, double> free;
    for (const auto& task : step.tasks) {
      EXPECT_GE(task.begin, free[task.resource]);
      free[task.resource] = task.end;
      EXPECT_EQ(task.begin,
                task.waited_for == SimulatedTask::kNone ? 0 : step.tasks[task.waited_for].end);
    }
  }
}

TEST(PrefetchChoice, IsTheLeastThatIsAsGoodAsAny) {
  // A unit ahead hides all that can be hidden of uniform layers, whatever bounds them.
  for (const int64_t gather : {2, 4, 9}) {
    const auto choice = choose_prefetch(chain(std::vector<double>(8, 4), gather, 8, 8), kOne);
    EXPECT_EQ(choice.prefetch_bytes, 8);
    EXPECT_EQ(choice.live_bytes, 16);
    EXPECT_EQ(choice.seconds, choice.best_seconds);
    EXPECT_EQ(choice.on_demand_seconds, 8.0 * (4 + static_cast<double>(gather)));
  }
  // Gathers of 3 seconds: a long operator hides those of the three short ones behind it.
  const std::vector<double> uneven{9, 1, 1, 1, 9, 1, 1, 1, 9, 1, 1, 1};
  const auto deep = choose_prefetch(chain(uneven, 3, 12, 12), kOne);
  EXPECT_EQ(deep.prefetch_bytes, 3 * 8);
  EXPECT_EQ(simulate(chain(uneven, 3, 12, 3), kOne).seconds, deep.seconds);
  EXPECT_GT(simulate(chain(uneven, 3, 12, 2), kOne).seconds, deep.seconds * 1.01);
  EXPECT_GE(simulate(chain(uneven, 3, 12, 12), kOne).seconds, deep.seconds / 1.01);
}

TEST(PrefetchChoice, StaysWithinWhatIsAllowed) {
  const std::vector<double> uneven{9, 1, 1, 1, 9, 1, 1, 1};
  EXPECT_EQ(choose_prefetch(chain(uneven, 3, 8, 2), kOne).prefetch_bytes, 2 * 8);
  EXPECT_EQ(choose_prefetch(chain(uneven, 3, 8, 0), kOne).prefetch_bytes, 0);
  EXPECT_EQ(choose_prefetch(chain(uneven, 3, 2, 8), kOne).prefetch_bytes, 8);
  // No gather is started ahead if gathers take no time.
  EXPECT_EQ(choose_prefetch(chain(uneven, 3, 8, 8), {.compute = 1}).prefetch_bytes, 0);
  // The same holds if the step is within the tolerance all the same.
  EXPECT_EQ(choose_prefetch(chain(std::vector<double>(8, 1000), 1, 8, 8), kOne).prefetch_bytes, 0);
}

}  // namespace
}  // namespace zero::paging
