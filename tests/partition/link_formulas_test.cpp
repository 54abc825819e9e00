// Bytes between hosts: the table of ZeRO++, and each collective counted rank by rank.
#include <gtest/gtest.h>

#include "tests/support/paper_traffic.h"
#include "zero/partition/formulas.h"
#include "zero/partition/link_bytes.h"

namespace zero::partition {
namespace {

using paper::link_traffic;
using paper::LinkPlan;
using paper::LinkTraffic;

constexpr int64_t kPsi = int64_t{3} << 20;
const Cluster kClusters[] = {{1, 1}, {1, 4}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {3, 4}, {2, 16}};

// A unit of Psi (H-1)/H elements of bf16.
int64_t once(const Cluster& cluster) { return kPsi / cluster.hosts * (cluster.hosts - 1) * 2; }

LinkTraffic stage3(const Cluster& cluster, LinkPlan plan) {
  plan.sharding = sharding_of_stage(3);
  return link_traffic(cluster, kPsi, plan);
}

TEST(LinkFormulas, OneHostSendsNothing) {
  for (const Cluster cluster : {Cluster{1, 1}, Cluster{1, 4}}) {
    EXPECT_EQ(all_gather_link_bytes(cluster, kPsi, kWireBf16), 0);
    EXPECT_EQ(reduce_scatter_link_bytes(cluster, kPsi, kWireBf16), 0);
    EXPECT_EQ(all_reduce_link_bytes(cluster, kPsi, kWireBf16), 0);
    EXPECT_EQ(stage3(cluster, {}).total(), 0);
  }
}

// Measured with two hosts of two ranks and four of two at 64 MiB (16 Mi elements of fp32): 33.6 and
// 50.5 MB.
TEST(LinkFormulas, AHostCarriesItsShareOnceWhateverItsRanks) {
  constexpr int64_t kElements = int64_t{16} << 20;
  EXPECT_EQ(all_gather_link_bytes({2, 2}, kElements, kWireFp32), 33554432);
  EXPECT_EQ(all_gather_link_bytes({4, 2}, kElements, kWireFp32), 50331648);
  for (const auto& cluster : kClusters) {
    const int64_t share = kPsi / cluster.hosts * (cluster.hosts - 1);
    EXPECT_EQ(all_gather_link_bytes(cluster, kPsi, kWireBf16), 2 * share);
    EXPECT_EQ(reduce_scatter_link_bytes(cluster, kPsi, kWireFp32), 4 * share);
    EXPECT_EQ(all_reduce_link_bytes(cluster, kPsi, kWireFp32), 2 * 4 * share);
  }
}

TEST(LinkFormulas, SumsOf16BitsLeaveRawOfOneRankAndInFp32OfMore) {
  EXPECT_EQ(partial_wire({4, 1}, kWireBf16), kWireBf16);
  EXPECT_EQ(partial_wire({4, 2}, kWireBf16), kWireFp32);
  EXPECT_EQ(partial_wire({4, 2}, kWireFp32), kWireFp32);
  EXPECT_EQ(partial_wire({4, 2}, {4, 128}), (Wire{4, 128}));
  EXPECT_EQ(partial_wire({4, 2}, {64}), Wire{64});
  // At R = 2 partial sums take what all raw elements would, from R = 3 on less.
  for (const int64_t ranks : {1, 2, 3, 8}) {
    const Cluster cluster{4, ranks};
    const int64_t numel = 4 * ranks * 64;
    const int64_t raw = ranks * numel / 4 * 3 * 2;  // every rank's elements for the other hosts
    const int64_t sent = reduce_scatter_link_bytes(cluster, numel, kWireBf16);
    if (ranks <= 2) {
      EXPECT_EQ(sent, raw);
    } else {
      EXPECT_LT(sent, raw);
    }
  }
}

TEST(LinkFormulas, OfEachStageAreMultiplesOfOneArray) {
  for (const auto& cluster : kClusters) {
    const int64_t unit = 2 * once(cluster);  // fp32, where raw and partial sums are alike
    for (const int64_t k : {1, 4}) {
      const auto of_stage = [&](int stage) {
        return link_traffic(cluster, kPsi,
                            {.sharding = sharding_of_stage(stage),
                             .micro_batches = k,
                             .parameters = kWireFp32,
                             .gradients = kWireFp32});
      };
      EXPECT_EQ(of_stage(0).total(), 2 * unit);
      EXPECT_EQ(of_stage(1).total(), 2 * unit);
      EXPECT_EQ(of_stage(2).total(), (k + 1) * unit);
      EXPECT_EQ(of_stage(3).total(), 3 * k * unit);
      EXPECT_EQ(of_stage(3).gather, 2 * k * unit);
    }
  }
}

TEST(LinkFormulas, HpzWithDeferredSumsSendsWhatHsdpSends) {
  for (const auto& cluster : kClusters) {
    const int64_t unit = 2 * once(cluster);
    for (const int64_t k : {1, 4}) {
      LinkPlan plan{.micro_batches = k, .parameters = kWireFp32, .gradients = kWireFp32};
      plan.kept = true;
      EXPECT_EQ(stage3(cluster, plan).gather, unit);
      EXPECT_EQ(stage3(cluster, plan).total(), (1 + k) * unit);
      plan.deferred = true;
      EXPECT_EQ(stage3(cluster, plan).total(), 2 * unit);
      plan.kept = false;
      plan.hybrid = true;
      EXPECT_EQ(stage3(cluster, plan).total(), 2 * unit);
      plan.deferred = false;
      EXPECT_EQ(stage3(cluster, plan).total(), 2 * k * unit);
    }
  }
}

// ZeRO++: 3 M to 0.75 M, where M is a model of 16 bits an element.
TEST(LinkFormulas, QuantisedAndKeptAreAQuarterOfZero3) {
  for (const auto& cluster : kClusters) {
    const int64_t m = once(cluster);
    LinkPlan plan;
    // Exact sums of several ranks are fp32: M is 2 M then.
    const int64_t exact = cluster.ranks_a_host > 1 ? 2 * m : m;
    EXPECT_EQ(stage3(cluster, plan).gather, 2 * m);
    EXPECT_EQ(stage3(cluster, plan).reduce, exact);
    if (cluster.ranks_a_host == 1) {
      EXPECT_EQ(stage3(cluster, plan).total(), 3 * m);
    }
    plan.parameters = {8};
    EXPECT_EQ(stage3(cluster, plan).total(), m / 2 + m / 2 + exact) << "qwZ";
    plan.kept = true;
    EXPECT_EQ(stage3(cluster, plan).total(), m / 2 + 0 + exact) << "and hpZ";
    plan.gradients = {4, 256};
    const int64_t scales = m / 2 * 4 / 256;
    EXPECT_EQ(stage3(cluster, plan).total(), m / 2 + 0 + m / 4 + scales) << "and qgZ";
    plan.parameters.block = 256;
    EXPECT_EQ(stage3(cluster, plan).total(), 3 * m / 4 + 2 * scales) << "with scales of both";
  }
}

TEST(LinkFormulas, CountTheScalesOfEachRanksMessage) {
  EXPECT_EQ((Wire{8, 128}).bytes(0), 0);
  EXPECT_EQ((Wire{8, 128}).bytes(128), 128 + 4);
  EXPECT_EQ((Wire{8, 128}).bytes(192), 192 + 8);
  EXPECT_EQ((Wire{4, 128}).bytes(192), 96 + 8);
  EXPECT_EQ((Wire{4, 64}).bytes(3), 2 + 4);
  EXPECT_EQ(kWireBf16.bytes(3), 6);
  // Slices of 192 elements: two blocks each, the second half full, though a host has three whole.
  EXPECT_EQ(all_gather_link_bytes({2, 2}, 4 * 192, {8, 128}), 2 * (192 + 8));
}

}  // namespace
}  // namespace zero::partition
