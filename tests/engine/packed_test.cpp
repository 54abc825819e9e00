// Packed exponents (zero_packed_exponents) through the engine's public interface: the bits of
// training without them, and fewer bytes between hosts, those of the formula.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>
#include <vector>

#include "tests/engine/worlds.h"
#include "zero/comm/group.h"
#include "zero/config/settings.h"
#include "zero/engine/engine.h"
#include "zero/paging/pager.h"
#include "zero/partition/link_bytes.h"

namespace zero {
namespace {

using comm::Collective;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr World kThreeByOne{3, 1};

Config packed(Config c) {
  c.packed_exponents = true;
  return c;
}

TEST(PackedExponents, GiveTheBitsOfTrainingWithoutThem) {
  for (const auto world : {kTwoByOne, kTwoByTwo, kThreeByOne}) {
    for (const int stage : {1, 2, 3}) {
      for (const bool bf16 : {false, true}) {
        SCOPED_TRACE("stage " + std::to_string(stage) + (bf16 ? " bf16" : " fp32"));
        const auto c = clipped(stage, bf16, 2);
        expect_same(outcome_of(world, packed(c)), outcome_of(world, c));
      }
    }
  }
}

TEST(PackedExponents, DoNotTouchWhatIsInFp16) {
  auto c = clipped(2, false);
  c.fp16 = true;
  expect_same(outcome_of(kTwoByTwo, packed(c)), outcome_of(kTwoByTwo, c));
}

TEST(PackedExponents, TrafficBetweenHostsIsTheFormula) {
  for (const auto world : {kTwoByOne, kTwoByTwo}) {
    for (const int stage : {1, 2, 3}) {
      for (const bool bf16 : {false, true}) {
        run_in(world, [&](auto group) {
          auto net = std::make_shared<Net>();
          auto c = packed(config(stage, bf16, 2));
          c.max_live_parameters = 0;  // each unit is gathered forward and backward
          Engine engine(net, AdamW{}, c, group);
          train(engine, *net, 1);
          group->traffic().reset();
          train(engine, *net, 1, 1);
          const auto formula = engine.traffic_formula();
          EXPECT_EQ(group->traffic().count(Collective::reduce_scatter).link_bytes,
                    formula.reduce_scatter_link);
          const partition::Cluster cluster{world.hosts, world.ranks_a_host};
          const auto wire_of = [&](int64_t unit) {
            return partition::Wire{.bits = 8 * engine.layout().unit(unit).element_bytes,
                                   .packed = true};
          };
          const auto of_gather = [&](int64_t unit) {
            return all_gather_link_bytes(cluster, engine.layout().unit(unit).numel, wire_of(unit));
          };
          int64_t sums = 0;
          int64_t gathers = 0;
          for (int64_t u = 0; u < engine.layout().unit_count(); ++u) {
            // Micro-batches add up in fp32 where gradients are replicated.
            const partition::Wire fp32{.bits = 32, .packed = true};
            sums += (stage == 1 ? 1 : 2) *
                    reduce_scatter_link_bytes(cluster, engine.layout().unit(u).numel,
                                              stage == 1 ? fp32 : wire_of(u));
            if (stage < 3) gathers += of_gather(u);
          }
          if (stage == 3) {
            for (const auto& gather : engine.pager()->plan()->gathers)
              gathers += of_gather(gather.unit);
          }
          EXPECT_EQ(formula.reduce_scatter_link * world.ranks_a_host, sums);
          const auto gathered = group->traffic().count(Collective::all_gather).link_bytes;
          EXPECT_EQ(gathered * world.ranks_a_host, gathers);
          if (stage == 3) {
            EXPECT_LE(gathered, formula.all_gather_link);
          } else {
            EXPECT_EQ(gathered, formula.all_gather_link);
          }
        });
      }
    }
  }
}

TEST(PackedExponents, AreRefusedWhereReplicasNeedSumsWhole) {
  const auto refused = [](const std::string& keys, const std::string& what) {
    EXPECT_THAT([&] { Config::parse("{\"zero_optimization\": {" + keys + "}}", 4); },
                ThrowsMessage<ConfigError>(HasSubstr(what)));
  };
  refused(R"("stage": 0, "zero_packed_exponents": true)", "the stage is 0");
  refused(R"("stage": 3, "mics_shard_size": 2, "zero_packed_exponents": true)",
          "mics_shard_size is 2");
}

}  // namespace
}  // namespace zero
