// Ranges of the table's cells, on every tier and in every form.
#include "zero/engine/state_table.h"

#include <ATen/ATen.h>
#include <ATen/ceil_div.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/temporary_folder.h"
#include "zero/comm/group.h"
#include "zero/optim/optimizer.h"

namespace zero {
namespace {

using partition::Range;

constexpr int64_t kUnit = 1 << 20;  // more than a block of the disk with 8-bit states

// A table of one unit, which is one parameter.
struct Table {
  TemporaryFolder folder;
  partition::Layout layout{
      {{.name = "weight", .numel = kUnit + 100, .element_bytes = 4, .kind = 0}}, 1, 1 << 24};
  Placement placement{.sharded = {}, .all = comm::single()};
  DeviceCopier copier;
  std::unique_ptr<StateTable> table;

  explicit Table(UnitPlan plan) {
    plan.trainable = true;
    plan.owned = {0, layout.unit(0).numel};
    plan.moments = {"exp_avg", "exp_avg_sq"};
    plan.moment_signs[1] = optim::Sign::positive;
    std::unique_ptr<store::DiskTier> disk;
    if (!plan.columns_on_disk().empty()) {
      disk = std::make_unique<store::DiskTier>(
          StateTable::units_on_disk({plan}, false, false),
          store::DiskTier::Options{.folders = {folder.path()}, .file = {}},
          placement.all->ledger());
    }
    table = std::make_unique<StateTable>(layout, std::vector{plan}, placement, copier,
                                         std::move(disk), StateTable::Options{});
  }
};

std::vector<std::pair<std::string, UnitPlan>> plans() {
  std::vector<std::pair<std::string, UnitPlan>> all;
  const auto add = [&](const std::string& name, UnitPlan plan) {
    const auto at = [&](const std::string& where, Tier parameters, Tier states) {
      plan.parameters_at = parameters;
      plan.optimizer_at = states;
      all.emplace_back(name + where, plan);
    };
    at(", on the device", Tier::device, Tier::device);
    at(", on the host", Tier::host, Tier::host);
    at(", on a disk", Tier::disk, Tier::disk);
    if (!plan.split) at(", states on the host", Tier::device, Tier::host);
    at(", states on a disk", Tier::device, Tier::disk);
  };
  UnitPlan plan;
  add("fp32", plan);
  plan.dtype = plan.gradient_dtype = at::kBFloat16;
  add("bf16", plan);
  plan.moment_format = optim::StateFormat::bf16;
  add("bf16, moments too", plan);
  plan.split = true;
  plan.moment_format = optim::StateFormat::eight_bit;
  add("split masters, 8 bits", plan);
  return all;
}

TEST(StateTable, ReadsAndWritesRangesOnEveryTierAndInEveryForm) {
  at::manual_seed(1);
  for (const auto& [name, plan] : plans()) {
    const Table made(plan);
    auto& table = *made.table;
    for (const auto state : {State::master, State::first_moment, State::second_moment}) {
      SCOPED_TRACE(name + ", " + std::string(table.name(0, state)));
      const auto values = at::rand({table.all(0).size()});
      table.write(0, state, table.all(0), values);
      auto expected = table.read(0, state).clone();
      ASSERT_TRUE(at::allclose(expected.to(at::kFloat), values, 0.1, 0.01));
      // Ranges of no special length, at borders of blocks, pages and codes, and across them.
      for (const auto& range :
           {Range{0, 1}, Range{5, 69}, Range{64, 192}, Range{1000, 70'001}, Range{7, 7},
            Range{kUnit - 1, kUnit + 1}, Range{kUnit - 4096, kUnit + 64},
            Range{kUnit + 63, kUnit + 128}, table.all(0)}) {
        const auto part = expected.narrow(0, range.begin, range.size());
        ASSERT_TRUE(table.read(0, state, range).equal(part)) << range.begin;
        // The range has what was written, and its neighbours stay.
        const auto moved = part.roll(1);
        table.write(0, state, range, moved);
        const auto now = table.read(0, state);
        const bool coded = plan.is_coded(state);
        // Elements of a block of codes share scales.
        const int64_t block = coded ? optim::kCodedBlock : 1;
        const int64_t before = range.begin / block * block;
        const int64_t after = at::round_up(range.end, block);
        ASSERT_TRUE(now.narrow(0, 0, before).equal(expected.narrow(0, 0, before)));
        ASSERT_TRUE(now.narrow(0, after, now.numel() - after)
                        .equal(expected.narrow(0, after, now.numel() - after)));
        if (!coded) {
          ASSERT_TRUE(now.narrow(0, range.begin, range.size()).equal(moved)) << range.begin;
        }
        expected = now.clone();
      }
    }
  }
}

TEST(StateTable, GivesCodesByWholeBlocks) {
  for (const auto& [name, plan] : plans()) {
    if (plan.moment_format != optim::StateFormat::eight_bit) continue;
    const Table made(plan);
    auto& table = *made.table;
    table.write(0, State::first_moment, table.all(0), at::randn({table.all(0).size()}));
    const auto before = table.read(0, State::first_moment).clone();
    const auto codes = table.read_stored(0, State::first_moment, {128, 4096}).clone();
    EXPECT_EQ(codes.numel(), (4096 - 128) / optim::kCodedBlock * optim::kCodedBytes);
    table.write(0, State::first_moment, {128, 4096}, at::zeros({4096 - 128}));
    EXPECT_FALSE(table.read(0, State::first_moment).equal(before));
    table.write(0, State::first_moment, {128, 4096}, codes);
    EXPECT_TRUE(table.read(0, State::first_moment).equal(before)) << name;
  }
}

TEST(StateTable, SplitMastersChangeTheirParameters) {
  for (const auto& [name, plan] : plans()) {
    if (!plan.split) continue;
    const Table made(plan);
    auto& table = *made.table;
    const auto values = at::randn({100});
    table.write(0, State::master, {50, 150}, values);
    EXPECT_TRUE(table.read(0, State::master, {50, 150}).equal(values)) << name;
    EXPECT_TRUE(
        at::allclose(table.read(0, State::parameters, {50, 150}).to(at::kFloat), values, 0.01, 0));
  }
}

}  // namespace
}  // namespace zero
