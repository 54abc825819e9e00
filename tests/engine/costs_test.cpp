// Costs as functions of numbers: against the papers' formulas, for any number of ranks, and against
// what an engine's ledger and traffic count.
#include "zero/engine/costs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/worlds.h"
#include "tests/support/paper_traffic.h"
#include "tests/support/temporary_folder.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/plan_units.h"

namespace zero {
namespace {

using comm::Collective;
using paging::UnitCosts;
using partition::RankGrid;

ParameterShape matrix(std::string name, int64_t rows, int64_t columns) {
  return {.name = std::move(name), .sizes = {rows, columns}, .strides = {columns, 1}};
}

// All that a planner makes of a model, a configuration and a grid.
struct Planned {
  Planned(const ModelShape& model, const Config& c, const RankGrid& grid, int64_t rank = 0)
      : layout(lay_out(model, c, grid)),
        units(plan_units(layout, model, c, {.grid = grid, .rank = rank})),
        step(planned_step(layout, units, model, c, {.grid = grid, .rank = rank})) {}
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

  int64_t sum_of(int64_t UnitCosts::*field) const {
    int64_t sum = 0;
    for (const auto& unit : unit_costs(step)) sum += unit.*field;
    return sum;
  }

  partition::Layout layout;
  std::vector<UnitPlan> units;
  PlannedStep step;
};

// Three parameters of which the layout makes two units.
ModelShape uneven_model() {
  return {.parameters = {matrix("a", 10, 100), matrix("b", 5, 100), matrix("c", 50, 100)}};
}

Config bf16_config(int stage) {
  Config c;
  c.stage = stage;
  c.bf16 = true;
  c.unit_bytes = 4096;
  return c;
}

TEST(Costs, OfUnitsAreTheFormulasOfTraffic) {
  for (const auto& cluster : {partition::Cluster{1, 4}, {4, 1}, {2, 2}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      const Planned planned(uneven_model(), bf16_config(stage),
                            {.hosts = cluster.hosts, .ranks_a_host = cluster.ranks_a_host});
      ASSERT_EQ(planned.layout.unit_count(), 2);
      const auto sharded = partition::sharding_of_stage(stage);
      const int64_t gathers =
          stage == 3 ? 2 * planned.sum_of(&UnitCosts::gather) : planned.sum_of(&UnitCosts::publish);
      const int64_t sent = gathers + planned.sum_of(&UnitCosts::reduce);
      if (cluster.hosts == 1) {
        const auto traffic =
            paper::step_traffic(sharded, static_cast<double>(2 * planned.layout.numel()), 4);
        EXPECT_EQ(static_cast<double>(sent), traffic.total()) << stage;
      } else {
        const auto traffic =
            paper::link_traffic(cluster, planned.layout.numel(), {.sharding = sharded});
        EXPECT_EQ(sent, traffic.total()) << stage;
      }
    }
  }
}

// States that are not on the device follow the formulas of ZeRO-Offload and ZeRO-Infinity.
TEST(Costs, OfUnitsFollowTheTiers) {
  // Slices on disk take whole pages: these have no others.
  ModelShape model{.parameters = {matrix("a", 64, 128), matrix("b", 128, 128)}, .own_memory = true};
  const RankGrid grid{.ranks_a_host = 4};
  auto c = bf16_config(2);
  c.offload_optimizer.device = OffloadDevice::cpu;
  const Planned below(model, c, grid);
  const auto owned = static_cast<double>(below.layout.numel()) / 4;
  EXPECT_EQ(static_cast<double>(below.sum_of(&UnitCosts::reduce_down)), 2 * owned);
  EXPECT_EQ(static_cast<double>(below.sum_of(&UnitCosts::update_up)), 2 * owned);
  // Adam reads and writes 12 bytes of states, reads the gradient and writes the parameter.
  EXPECT_EQ(static_cast<double>(below.sum_of(&UnitCosts::update)), (2 * 12 + 2 + 2) * owned);
  c.stage = 3;
  c.offload_optimizer.device = c.offload_param.device = OffloadDevice::nvme;
  const Planned on_disk(model, c, grid);
  const auto sum = [&](int64_t UnitCosts::*field) {
    return static_cast<double>(on_disk.sum_of(field));
  };
  EXPECT_EQ(sum(&UnitCosts::gather_read), 2 * owned);
  EXPECT_EQ(sum(&UnitCosts::gather_up), 2 * owned);
  EXPECT_EQ(sum(&UnitCosts::update_read), 12 * owned);
  EXPECT_EQ(sum(&UnitCosts::update_write), 14 * owned);
  EXPECT_EQ(sum(&UnitCosts::update_up), 0);
  EXPECT_EQ(static_cast<double>(disk_bytes(on_disk.step)), 14 * owned);
  EXPECT_EQ(planned_memory(on_disk.step, Tier::device).total(), 0);
}

// GPT-2 of 124 M parameters, without its vectors.
ModelShape gpt2() {
  ModelShape model{.parameters = {matrix("wte", 50257, 768), matrix("wpe", 1024, 768)}};
  for (int i = 0; i < 12; ++i) {
    const auto name = "h" + std::to_string(i);
    model.parameters.push_back(matrix(name + ".attn", 2304, 768));
    model.parameters.push_back(matrix(name + ".proj", 768, 768));
    model.parameters.push_back(matrix(name + ".fc", 3072, 768));
    model.parameters.push_back(matrix(name + ".out", 768, 3072));
  }
  return model;
}

TEST(Costs, OfOneRankAndOfThousandsNeedNoEngine) {
  for (const auto& grid : {RankGrid{}, RankGrid{.hosts = 512, .ranks_a_host = 8}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const int64_t k : {1, 4}) {
        SCOPED_TRACE(std::to_string(grid.ranks()) + " ranks, stage " + std::to_string(stage) +
                     ", " + std::to_string(k) + " micro-batches");
        Config c;
        c.stage = stage;
        c.bf16 = true;
        c.gradient_accumulation_steps = k;
        const Planned planned(gpt2(), c, grid);
        const auto numel = planned.layout.numel();
        const auto ranks = static_cast<double>(grid.ranks());
        EXPECT_EQ(planned.layout.content(), 124'318'464);
        // One rank has nobody to shard with.
        const auto sharded = partition::sharding_of_stage(grid.ranks() == 1 ? 0 : stage);
        const auto memory = planned_memory(planned.step, Tier::device);
        const auto paper = partition::state_memory(sharded, static_cast<double>(numel), ranks,
                                                   {.gradient = k == 1 ? 2 : 4});
        EXPECT_EQ(static_cast<double>(memory.parameters), paper.parameters);
        EXPECT_EQ(static_cast<double>(memory.gradients), paper.gradients);
        EXPECT_EQ(static_cast<double>(memory.optimizer), paper.optimizer);
        EXPECT_EQ(planned_memory(planned.step, Tier::host).total(), 0);
        EXPECT_EQ(disk_bytes(planned.step), 0);
        // Stages 0 and 1 send sums of micro-batches in fp32, once.
        const int64_t reduced_bytes = k == 1 || sharded.gradients ? 2 : 4;
        const auto traffic = planned_traffic(planned.step);
        const auto sent = paper::step_traffic(sharded, static_cast<double>(numel), ranks, k);
        if (sharded.optimizer) {
          EXPECT_EQ(static_cast<double>(traffic.reduce_scatter),
                    sent.reduce * static_cast<double>(reduced_bytes));
          EXPECT_EQ(static_cast<double>(traffic.all_gather), 2 * sent.gather);
          EXPECT_EQ(traffic.all_reduce, 0);
        } else {
          EXPECT_EQ(static_cast<double>(traffic.all_reduce),
                    sent.total() * static_cast<double>(reduced_bytes));
        }
        const auto link = paper::link_traffic(
            grid.all(), numel,
            {.sharding = sharded, .micro_batches = k, .gradients = {.bits = 8 * reduced_bytes}});
        EXPECT_EQ(
            (traffic.all_gather_link + traffic.reduce_scatter_link + traffic.all_reduce_link) *
                grid.ranks_a_host,
            link.total());
      }
    }
  }
}

TEST(Costs, OfTheLastRankAreOfItsOwnSlices) {
  const RankGrid grid{.hosts = 512, .ranks_a_host = 8};
  auto c = bf16_config(3);
  c.unit_bytes = Config{}.unit_bytes;
  int64_t owned = 0;
  const auto layout = lay_out(gpt2(), c, grid);
  for (const int64_t rank : {0, 1, 4095}) {
    const auto units = plan_units(layout, gpt2(), c, {.grid = grid, .rank = rank});
    for (size_t u = 0; u < units.size(); ++u) {
      EXPECT_EQ(units[u].owned, layout.slice(static_cast<int64_t>(u), static_cast<int>(rank)));
      owned += units[u].owned.size();
    }
  }
  EXPECT_EQ(owned, 3 * layout.numel() / grid.ranks());
}

// Replicas (MiCS): a block of 8 shards, 512 blocks add up.
TEST(Costs, OfReplicasAreThoseOfABlock) {
  auto c = bf16_config(3);
  c.mics_shard_size = 8;
  const Planned hybrid(gpt2(), c, {.hosts = 512, .ranks_a_host = 8, .shards = 8});
  const Planned block(gpt2(), c, {.hosts = 1, .ranks_a_host = 8});
  const auto memory = planned_memory(hybrid.step, Tier::device);
  EXPECT_EQ(memory.parameters, 2 * hybrid.layout.numel() / 8);
  const auto traffic = planned_traffic(hybrid.step);
  const auto link =
      paper::link_traffic({512, 8}, hybrid.layout.numel(),
                          {.hybrid = true, .gradients = {.bits = 32}});  // a block's sums
  EXPECT_EQ(traffic.reduce_scatter_link * 8, link.reduce);
  // Sums go back in the dtype that the update reads, and no parameter leaves a block.
  EXPECT_EQ(traffic.all_gather_link * 8, link.gather / 2);
  EXPECT_EQ(block.step.grid.replicas(), 1);
}

TEST(Form, KeepsOneDecisionForEachDtype) {
  Config c;
  c.bf16 = true;
  c.stage = 2;
  c.gradient_accumulation_steps = 2;
  const RankGrid grid{.hosts = 2, .ranks_a_host = 2};
  const auto form = [&](FormSettings settings = {}) {
    settings.ranks.grid = grid;
    settings.sharded = partition::sharding_of_stage(c.stage);
    return form_of(c, settings, at::kBFloat16, true, Tier::device).gradients;
  };
  // A bucket of one pass is bf16, its sum fp32.
  EXPECT_EQ(form().collected, at::kBFloat16);
  EXPECT_EQ(form().reduced, at::kBFloat16);
  EXPECT_EQ(form().sent_dtype(true), at::kBFloat16);
  EXPECT_EQ(form().sum_dtype(true), at::kFloat);
  EXPECT_FALSE(form().converts());
  // Another's backend sends what it adds.
  EXPECT_EQ(form({.ranks = {.widens_in_shard_group = true}}).sent_dtype(true), at::kFloat);
  // Stage 1 adds passes up in fp32, and sends that, or what the configuration says.
  c.stage = 1;
  EXPECT_EQ(form().collected, at::kFloat);
  EXPECT_EQ(form().reduced, at::kFloat);
  c.communication_dtype = DtypeName::bf16;
  EXPECT_EQ(form().collected, at::kFloat);
  EXPECT_EQ(form().reduced, at::kBFloat16);
  EXPECT_TRUE(form().converts());
  EXPECT_TRUE(form().rounds);
  c.packed_exponents = true;
  EXPECT_TRUE(form().link.counted(at::kBFloat16).packed);
  // Only stage 3 quantises.
  c.quantised.gradients = true;
  EXPECT_FALSE(form().link.quantised());
  c.stage = 3;
  EXPECT_TRUE(form().link.quantised());
  EXPECT_EQ(form().link.wire()->quantisation.block, c.quantised.block);
}

struct Setting {
  World world;
  int64_t mics = -1;
  OffloadDevice optimizer = OffloadDevice::none;
};

// The planner's numbers, made without the engine, are what the engine holds and sends.
TEST(Costs, AreWhatTheLedgerAndTheTrafficCount) {
  TemporaryFolder folder;
  ModelShape model;
  for (const char* name : {"w0", "w1", "w2", "w3"})
    model.parameters.push_back(matrix(name, 64, 64));
  const std::vector<Setting> settings{{{1, 1}},
                                      {{1, 2}},
                                      {kTwoByOne},
                                      {kTwoByTwo},
                                      {.world = kTwoByTwo, .mics = 2},
                                      {.world = {1, 2}, .optimizer = OffloadDevice::cpu},
                                      {.world = kTwoByOne, .optimizer = OffloadDevice::nvme}};
  for (const auto& setting : settings) {
    for (int stage = setting.mics > 0 ? 1 : 0; stage <= 3; ++stage) {
      for (const bool bf16 : {false, true}) {
        for (const int64_t k : {1, 2}) {
          SCOPED_TRACE(std::to_string(setting.world.hosts) + " hosts, stage " +
                       std::to_string(stage) + (bf16 ? ", bf16, " : ", fp32, ") +
                       std::to_string(k) + " micro-batches");
          auto c = config(stage, bf16, k);
          c.max_live_parameters = 0;
          // Stage 3: each unit is used once forward and once backward. Stage 0: one large unit,
          // since an all-reduce of few bytes sends them whole.
          c.unit_bytes = stage == 0 ? 1 << 20 : 64 * 64 * (bf16 ? 2 : 4);
          c.one_sided_gather = false;
          c.mics_shard_size = setting.mics;
          c.offload_optimizer.device = setting.optimizer;
          if (setting.optimizer == OffloadDevice::nvme) {
            c.offload_optimizer.nvme_path = folder.path();
            // A step would otherwise read ahead for the next one.
            c.offload_optimizer.pipeline_read = false;
          }
          const int64_t ranks = int64_t{setting.world.hosts} * setting.world.ranks_a_host;
          const RankGrid grid{.hosts = setting.world.hosts,
                              .ranks_a_host = setting.world.ranks_a_host,
                              .shards = setting.mics > 0 ? setting.mics : ranks};
          run_in(setting.world, [&](auto group) {
            const Planned planned(model, c, grid, group->rank());
            Chain net;
            Engine engine(net, AdamW{}, c, group);
            const auto x =
                torch::ones({2, 64}, bf16 ? torch::kBFloat16 : torch::kFloat).requires_grad_();
            const auto train_step = [&] {
              for (int64_t i = 0; i < k; ++i) {
                engine.backward(net.forward(x).to(torch::kFloat).mean());
                engine.step();
              }
            };
            train_step();
            const auto& ledger = *group->ledger();
            const auto device = planned_memory(planned.step, Tier::device);
            const auto host = planned_memory(planned.step, Tier::host);
            EXPECT_EQ(ledger.usage(Category::parameters).current, device.parameters);
            EXPECT_EQ(ledger.usage(Category::gradients).peak, device.gradients);
            EXPECT_EQ(ledger.usage(Category::optimizer).current, device.optimizer);
            EXPECT_EQ(ledger.usage(Category::host_parameters).current, host.parameters);
            EXPECT_EQ(ledger.usage(Category::host_gradients).peak, host.gradients);
            EXPECT_EQ(ledger.usage(Category::host_optimizer).current, host.optimizer);
            EXPECT_EQ(engine.disk().bytes, disk_bytes(planned.step));

            group->traffic().reset();
            const auto disk = engine.disk();
            const auto crossed = engine.host_traffic();
            train_step();
            const auto formula = planned_traffic(planned.step);
            const auto sent = [&](Collective collective) {
              return group->traffic().count(collective).logical_bytes;
            };
            EXPECT_EQ(sent(Collective::all_gather), formula.all_gather);
            EXPECT_EQ(sent(Collective::reduce_scatter), formula.reduce_scatter);
            EXPECT_EQ(sent(Collective::all_reduce), formula.all_reduce);
            if (stage > 0 || !bf16) {
              EXPECT_EQ(
                  group->traffic().total().link_bytes,
                  formula.all_gather_link + formula.reduce_scatter_link + formula.all_reduce_link);
            }
            EXPECT_EQ(engine.disk().read - disk.read, formula.disk_read);
            EXPECT_EQ(engine.disk().written - disk.written, formula.disk_written);
            EXPECT_EQ(engine.host_traffic().down - crossed.down, formula.host_down);
            EXPECT_EQ(engine.host_traffic().up - crossed.up, formula.host_up);
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero
