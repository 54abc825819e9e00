// The schedule that an engine records of a step, and the distance at which it gathers ahead.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/worlds.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/costs.h"
#include "zero/engine/engine.h"
#include "zero/engine/plan_units.h"
#include "zero/paging/pager.h"
#include "zero/paging/simulation.h"

namespace zero {
namespace {

using comm::Collective;
using testing::HasSubstr;
using testing::ThrowsMessage;

// Each weight of Chain is a unit, which is gathered by copying, once forward and once back.
Config chain_config(bool bf16 = false, int64_t accumulate = 1) {
  auto c = config(3, bf16, accumulate);
  c.max_live_parameters = 0;
  c.unit_bytes = 64 * 64 * (bf16 ? 2 : 4);
  c.one_sided_gather = false;
  return c;
}

void step(Engine& engine, Chain& net, int64_t rows = 2) {
  const auto x = torch::ones({rows, 64}, engine.config().bf16 ? torch::kBFloat16 : torch::kFloat)
                     .requires_grad_();
  for (int64_t k = 0; k < engine.config().gradient_accumulation_steps; ++k) {
    engine.backward(net.forward(x).to(torch::kFloat).mean());
    engine.step();
  }
}

TEST(RecordedSchedule, HasTheUnitsInOrderAndTheirFlops) {
  comm::run_as_threads(2, [](auto group) {
    Chain net;
    Engine engine(net, AdamW{}, chain_config(), group);
    step(engine, net);
    EXPECT_EQ(engine.schedule(), nullptr);
    engine.record_schedule();
    constexpr int64_t kRows = 32;
    step(engine, net, kRows);
    ASSERT_NE(engine.schedule(), nullptr);
    const auto schedule = *engine.schedule();
    EXPECT_EQ(schedule.trace.touches(), (std::vector<int64_t>{0, 1, 2, 3, 3, 2, 1, 0}));
    EXPECT_EQ(schedule.backward, (std::vector<uint8_t>{0, 0, 0, 0, 1, 1, 1, 1}));
    // A product forward; two back, that of the weight's gradient before the weight is used.
    constexpr double kProduct = 2.0 * kRows * 64 * 64;
    for (const size_t p : {0, 1, 2}) EXPECT_EQ(schedule.flops[p], kProduct);
    for (const size_t p : {4, 5, 6}) EXPECT_EQ(schedule.flops[p], 2 * kProduct);
    EXPECT_EQ(schedule.flops[7], kProduct);
    EXPECT_GT(schedule.flops[3], 2 * kProduct);  // and the mean
    EXPECT_LT(schedule.flops[3], 2.1 * kProduct);
    using Reduction = paging::StepSchedule::Reduction;
    EXPECT_EQ(schedule.reductions, (std::vector<Reduction>{{3, 4}, {2, 5}, {1, 6}, {0, 7}}));
    EXPECT_TRUE(schedule.gathers);
    EXPECT_EQ(schedule.reduces_in, paging::ReducesIn::every_pass);
    EXPECT_EQ(schedule.budget_bytes, engine.pager()->budget());
    // The engine does not record what it does not do by itself.
    step(engine, net);
    EXPECT_EQ(engine.schedule()->flops, schedule.flops);
  });
}

struct Sums {
  int64_t link = 0, up = 0, down = 0, read = 0, written = 0;
  bool operator==(const Sums&) const = default;
};

// The bytes that the paper's step moves: each unit gathered twice and reduced once a micro-batch.
Sums sums_of(const paging::StepSchedule& schedule, int64_t k) {
  Sums sums;
  for (const auto& unit : schedule.units) {
    sums.link += 2 * k * unit.gather + k * unit.reduce + unit.reduce_at_end + unit.publish;
    sums.up += 2 * k * unit.gather_up + unit.update_up;
    sums.down += unit.reduce_down + (k - 1) * unit.reduce_down_next + unit.update_down;
    sums.read += 2 * k * unit.gather_read + (k - 1) * unit.reduce_read + unit.update_read;
    sums.written += k * unit.reduce_write + unit.update_write;
  }
  return sums;
}

// The same of a simulated step.
Sums sums_of(const paging::SimulatedStep& step) {
  Sums sums;
  for (const auto& task : step.tasks) {
    if (task.resource == paging::Resource::link) sums.link += task.bytes;
    if (task.resource == paging::Resource::up) sums.up += task.bytes;
    if (task.resource == paging::Resource::down) sums.down += task.bytes;
    if (task.work == paging::Work::read) sums.read += task.bytes;
    if (task.work == paging::Work::write) sums.written += task.bytes;
  }
  return sums;
}

Sums sums_of(const TrafficFormula& formula, bool hosts, int64_t ranks_a_host) {
  return {.link = hosts ? (formula.all_gather_link + formula.reduce_scatter_link +
                           formula.all_reduce_link) *
                              ranks_a_host
                        : formula.all_gather + formula.reduce_scatter + formula.all_reduce,
          .up = formula.host_up,
          .down = formula.host_down,
          .read = formula.disk_read,
          .written = formula.disk_written};
}

TEST(RecordedSchedule, HasTheBytesOfTheFormula) {
  TemporaryFolder folder;
  const auto cpu = [](Config& c) {
    c.offload_optimizer.device = OffloadDevice::cpu;
    c.offload_param.device = OffloadDevice::cpu;
  };
  const auto disk = [&](Config& c) {
    c.offload_optimizer = {.device = OffloadDevice::nvme, .nvme_path = folder.path()};
    c.offload_param = {.device = OffloadDevice::nvme, .nvme_path = folder.path()};
  };
  struct Case {
    const char* name;
    World world;
    std::function<void(Config&)> change;
  };
  const std::vector<Case> cases{
      {"one host", {1, 2}, [](Config&) {}},
      {"two hosts", kTwoByOne, [](Config&) {}},
      {"two hosts of two", kTwoByTwo, [](Config&) {}},
      {"offloaded", {1, 2}, cpu},
      {"offloaded optimizer", kTwoByOne,
       [](Config& c) { c.offload_optimizer.device = OffloadDevice::cpu; }},
      {"on disk", {1, 2}, disk},
      {"with gradients on disk",
       {1, 2},
       [&](Config& c) {
         disk(c);
         c.offload_optimizer.gradients = true;
       }},
      {"quantised", kTwoByOne,
       [](Config& c) { c.quantised.weights = c.quantised.gradients = true; }},
      {"replicas", kTwoByTwo, [](Config& c) { c.mics_shard_size = 2; }},
  };
  for (const auto& each : cases) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        SCOPED_TRACE(std::string(each.name) + (bf16 ? ", bf16" : ", fp32") + ", " +
                     std::to_string(k) + " micro-batches");
        run_in(each.world, [&](auto group) {
          Chain net;
          auto c = chain_config(bf16, k);
          each.change(c);
          Engine engine(net, AdamW{}, c, group);
          step(engine, net);
          engine.record_schedule();
          group->traffic().reset();
          step(engine, net);
          const auto& schedule = *engine.schedule();
          const bool hosts = each.world.hosts > 1;
          const auto formula = sums_of(engine.traffic_formula(), hosts, each.world.ranks_a_host);
          EXPECT_EQ(sums_of(schedule, k), formula);
          EXPECT_EQ(sums_of(paging::simulate(schedule, {})), formula);
          if (hosts) {
            EXPECT_EQ(group->traffic().total().link_bytes * each.world.ranks_a_host, formula.link);
          } else {
            EXPECT_EQ(group->traffic().count(Collective::all_gather).logical_bytes +
                          group->traffic().count(Collective::reduce_scatter).logical_bytes,
                      formula.link);
          }
        });
      }
    }
  }
}

// `zero bench timeline` has no engine of the ranks that it simulates.
TEST(RecordedSchedule, HasTheCostsThatFollowFromTheShapeOfTheModel) {
  ModelShape model;
  for (const char* name : {"w0", "w1", "w2", "w3"})
    model.parameters.push_back({.name = name, .sizes = {64, 64}, .strides = {64, 1}});
  for (const auto world : {World{1, 2}, kFourByOne, kTwoByOne, kTwoByTwo}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        for (const bool offload : {false, true}) {
          auto c = chain_config(bf16, k);
          if (offload) c.offload_optimizer.device = c.offload_param.device = OffloadDevice::cpu;
          const partition::RankGrid grid{.hosts = world.hosts, .ranks_a_host = world.ranks_a_host};
          const auto layout = lay_out(model, c, grid);
          run_in(world, [&](auto group) {
            Chain net;
            Engine engine(net, AdamW{}, c, group);
            engine.record_schedule();
            step(engine, net);
            const auto units = plan_units(layout, model, c, {.grid = grid, .rank = group->rank()});
            EXPECT_EQ(engine.schedule()->units,
                      unit_costs(planned_step(layout, units, model, c, {.grid = grid})));
          });
        }
      }
    }
  }
}

TEST(RecordedSchedule, NeedsAPager) {
  comm::run_as_threads(2, [](auto group) {
    Chain net;
    auto c = chain_config();
    c.stage = 2;
    Engine engine(net, AdamW{}, c, group);
    EXPECT_THAT([&] { engine.record_schedule(); },
                ThrowsMessage<ConfigError>(HasSubstr("Use stage 3")));
  });
}

// A step that is left out is not recorded; the next one is, by itself.
TEST(RecordedSchedule, IsOfAStepThatUpdates) {
  comm::run_as_threads(2, [](auto group) {
    Chain net;
    Engine engine(net, AdamW{}, chain_config(), group);
    step(engine, net);
    engine.record_schedule();
    const auto x = torch::ones({2, 64}).requires_grad_();
    engine.backward(net.forward(x).mean() * std::numeric_limits<float>::infinity());
    EXPECT_FALSE(engine.step().updated);
    EXPECT_EQ(engine.schedule(), nullptr);
    step(engine, net, 32);
    ASSERT_NE(engine.schedule(), nullptr);
    EXPECT_EQ(engine.schedule()->flops[0], 2.0 * 32 * 64 * 64);
    EXPECT_EQ(engine.schedule()->reductions.size(), 4U);
  });
}

constexpr int64_t kUnitBytes = 64 * 64 * 4;

// Speeds at which an operator of `rows` rows takes a second and a gather `seconds`.
PrefetchSpeeds speeds_of(double rows, double seconds) {
  return {.compute = 2 * rows * 64 * 64, .link = kUnitBytes / 2.0 / seconds};
}

Config with_room(const PrefetchSpeeds& speeds) {
  auto c = chain_config();
  c.max_live_parameters = 4 * 64 * 64;
  c.prefetch_bucket_size = 3 * 64 * 64;
  c.prefetch_speeds = speeds;
  return c;
}

TEST(PrefetchDistance, IsChosenFromTheFirstStep) {
  comm::run_as_threads(2, [](auto group) {
    // Nothing to gain: gathers take no time beside operators.
    for (const double seconds : {1e-6, 0.5}) {
      Chain net;
      const auto speeds = speeds_of(2, seconds);
      Engine engine(net, AdamW{}, with_room(speeds), group);
      EXPECT_EQ(engine.pager()->prefetch(), 3 * kUnitBytes);
      step(engine, net);
      ASSERT_NE(engine.schedule(), nullptr);
      auto schedule = *engine.schedule();
      EXPECT_EQ(schedule.prefetch_bytes, engine.pager()->prefetch());
      EXPECT_EQ(engine.pager()->prefetch(), seconds < 0.1 ? 0 : kUnitBytes);
      schedule.prefetch_bytes = 3 * kUnitBytes;
      EXPECT_EQ(paging::choose_prefetch(schedule, {.compute = speeds.compute, .link = speeds.link})
                    .prefetch_bytes,
                engine.pager()->prefetch());
      // Known steps are planned anew.
      size_t ahead = 0;
      for (const auto& gather : engine.pager()->plan()->gathers)
        ahead += gather.start < gather.use ? 1 : 0;
      EXPECT_EQ(ahead > 0, seconds > 0.1);
    }
  });
}

TEST(PrefetchDistance, IsTheSameOnRanksThatComputeDifferently) {
  std::mutex mutex;
  std::set<int64_t> chosen;
  comm::run_as_threads(2, [&](auto group) {
    Chain net;
    // Rank 1's operators take 50 times as long as gathers, so that it gains nothing.
    Engine engine(net, AdamW{}, with_room(speeds_of(2, 0.5)), group);
    step(engine, net, group->rank() == 0 ? 2 : 400);
    const std::lock_guard lock(mutex);
    chosen.insert(engine.pager()->prefetch());
  });
  EXPECT_EQ(chosen, std::set<int64_t>{kUnitBytes});
}

TEST(PrefetchDistance, ChangesNeitherResultsNorTraffic) {
  std::mutex mutex;
  std::vector<std::vector<at::Tensor>> results;
  std::set<int64_t> sent;
  for (const auto& speeds : {PrefetchSpeeds{}, speeds_of(2, 1e-6), speeds_of(2, 0.5)}) {
    comm::run_as_hosts(2, 2, [&](auto group) {
      Chain net;
      auto c = with_room(speeds);
      c.max_live_parameters = 2 * 64 * 64;
      Engine engine(net, AdamW{}, c, group);
      for (int i = 0; i < 4; ++i) step(engine, net, 2 + i % 2);
      const auto all = weights(engine);
      const std::lock_guard lock(mutex);
      sent.insert(group->traffic().count(Collective::all_gather).logical_bytes);
      if (group->rank() == 0) results.push_back(all);
    });
  }
  ASSERT_EQ(results.size(), 3U);
  expect_equal(results[1], results[0]);
  expect_equal(results[2], results[0]);
  EXPECT_EQ(sent.size(), 1U);
}

TEST(PrefetchDistance, IsChosenBetweenHostsFromWhatIsMeasured) {
  std::mutex mutex;
  std::set<int64_t> chosen;
  comm::run_as_hosts(2, 1, [&](auto group) {
    Chain net;
    auto given = with_room({.link = 1e9});
    Engine told(net, AdamW{}, given, group);
    EXPECT_FALSE(group->link_speed()) << "it was measured although it is given";
    for (int i = 0; i < 2; ++i) step(told, net);
    EXPECT_EQ(told.schedule(), nullptr);
  });
  comm::run_as_hosts(2, 1, [&](auto group) {
    Chain net;
    Engine engine(net, AdamW{}, with_room({}), group);
    ASSERT_TRUE(group->link_speed());
    step(engine, net);
    EXPECT_EQ(engine.pager()->prefetch(), 3 * kUnitBytes);
    EXPECT_EQ(engine.schedule(), nullptr);
    step(engine, net);
    ASSERT_NE(engine.schedule(), nullptr);
    EXPECT_EQ(engine.schedule()->prefetch_bytes, engine.pager()->prefetch());
    const std::lock_guard lock(mutex);
    chosen.insert(engine.pager()->prefetch());
  });
  ASSERT_EQ(chosen.size(), 1U);
  EXPECT_LE(*chosen.begin(), 3 * kUnitBytes);
}

// Read in place, nothing is gathered and nothing chosen: no operator is observed.
TEST(PrefetchDistance, IsLeftWhereUnitsAreReadInPlace) {
  comm::run_as_threads(2, [](auto group) {
    Chain net;
    auto c = with_room(speeds_of(2, 0.5));
    c.one_sided_gather = true;
    Engine engine(net, AdamW{}, c, group);
    step(engine, net);
    EXPECT_EQ(engine.schedule(), nullptr);
    EXPECT_EQ(engine.pager()->prefetch(), 3 * kUnitBytes);
  });
}

}  // namespace
}  // namespace zero
