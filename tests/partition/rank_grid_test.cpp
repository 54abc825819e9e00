#include "zero/partition/rank_grid.h"

#include <gtest/gtest.h>

#include <set>

namespace zero::partition {
namespace {

void expect_cluster(const Cluster& cluster, int64_t hosts, int64_t ranks_a_host) {
  EXPECT_EQ(cluster.hosts, hosts);
  EXPECT_EQ(cluster.ranks_a_host, ranks_a_host);
}

TEST(RankGrid, IsOneBlockWhereNothingElseIsSaid) {
  const RankGrid alone;
  EXPECT_EQ(alone.ranks(), 1);
  EXPECT_EQ(alone.replicas(), 1);
  EXPECT_EQ(alone.place(0), RankGrid::Place());
  const RankGrid many{.hosts = 512, .ranks_a_host = 8};
  EXPECT_EQ(many.ranks(), 4096);
  EXPECT_EQ(many.replicas(), 1);
  expect_cluster(many.shard_group(), 512, 8);
  expect_cluster(many.same_slices(), 1, 1);
  EXPECT_EQ(many.place(4095), (RankGrid::Place{511, 7, 0, 4095}));
}

// A block inside a host, of a host, and of several hosts.
TEST(RankGrid, CrossesBlocksWithReplicas) {
  const RankGrid in_host{.hosts = 4, .ranks_a_host = 8, .shards = 2};
  expect_cluster(in_host.shard_group(), 1, 2);
  expect_cluster(in_host.same_slices(), 4, 4);
  const RankGrid of_host{.hosts = 4, .ranks_a_host = 8, .shards = 8};
  expect_cluster(of_host.shard_group(), 1, 8);
  expect_cluster(of_host.same_slices(), 4, 1);
  const RankGrid of_hosts{.hosts = 4, .ranks_a_host = 8, .shards = 16};
  expect_cluster(of_hosts.shard_group(), 2, 8);
  expect_cluster(of_hosts.same_slices(), 2, 1);
  for (const auto& grid : {in_host, of_host, of_hosts}) {
    EXPECT_EQ(grid.shard_group().ranks(), grid.shards);
    EXPECT_EQ(grid.same_slices().ranks(), grid.replicas());
    std::set<int64_t> met;
    for (int64_t rank = 0; rank < grid.ranks(); ++rank) {
      const auto place = grid.place(rank);
      EXPECT_EQ(place.host * grid.ranks_a_host + place.local, rank);
      EXPECT_EQ(grid.rank_at(place.replica, place.shard), rank);
      EXPECT_LT(place.replica, grid.replicas());
      EXPECT_LT(place.shard, grid.shards);
      met.insert(place.replica * grid.shards + place.shard);
    }
    EXPECT_EQ(static_cast<int64_t>(met.size()), grid.ranks());
  }
}

}  // namespace
}  // namespace zero::partition
