// The arena's blocks: their allocation, their reuse, and what is left afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/arena.h"
#include "zero/comm/group.h"

namespace zero::comm {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;

TEST(ArenaLayout, IsValidForAnyNumberOfRanks) {
  for (int ranks = 1; ranks <= 256; ++ranks) {
    for (const int64_t control : {int64_t{100}, kPage - 8, kPage, kPage + 1}) {
      const auto layout = ArenaLayout::choose(ranks, control, int64_t{24} << 30);
      EXPECT_TRUE(layout.valid(control)) << ranks << " ranks, " << control << " bytes";
      EXPECT_FALSE(layout.valid(control + 2 * kPage));
    }
  }
}

TEST(ArenaLayout, GivesEachRankTwiceTheMemoryWithinEightTebibytes) {
  const auto small = ArenaLayout::choose(2, 5000, int64_t{24} << 30);
  EXPECT_LE(small.region_bytes, int64_t{64} << 30);
  EXPECT_GE(small.region_bytes, int64_t{48} << 30);
  EXPECT_EQ(small.control_bytes, 8192);
  EXPECT_EQ(small.region_offset(1), 8192 + small.region_bytes);
  EXPECT_EQ(small.total_bytes(), 8192 + 2 * small.region_bytes);
  for (const int ranks : {1, 2, 7, 8, 64, 1000}) {
    const auto large = ArenaLayout::choose(ranks, kPage, int64_t{2} << 40);
    EXPECT_LE(large.total_bytes() - large.control_bytes, int64_t{8} << 40);
    // Addresses of the same offset in two regions differ below bit 28: see the note in arena.cpp.
    for (int rank = 1; rank < std::min(ranks, 8); ++rank)
      EXPECT_NE(rank * large.region_bytes & ((1 << 28) - 1), 0);
    EXPECT_EQ(large.region_bytes % (2 << 20), 0);
  }
}

// A rank that joins checks it so.
TEST(Arena, BlocksAreZeroApartAndReused) {
  const auto mapping = Mapping::create({kPage, int64_t{1} << 20, 2});
  Arena arena(mapping, 1);
  std::mt19937 random(3);
  std::map<int64_t, std::pair<int64_t, int>> blocks;  // offset -> bytes, value
  int64_t total = 0;
  for (int step = 0; step < 3000; ++step) {
    if (blocks.size() > 20 || (step % 3 == 0 && !blocks.empty())) {
      auto block = std::next(blocks.begin(), static_cast<int64_t>(random() % blocks.size()));
      const auto [bytes, value] = block->second;
      for (int64_t i = 0; i < bytes; ++i)
        ASSERT_EQ(static_cast<int>(*mapping->at(block->first + i)), value);
      arena.free(block->first);
      total -= (bytes + kPage - 1) / kPage * kPage;
      blocks.erase(block);
    } else {
      const auto bytes = static_cast<int64_t>(1 + random() % 20'000);
      const auto offset = arena.allocate(bytes);
      EXPECT_EQ(offset % kPage, 0);
      EXPECT_GE(offset, mapping->layout().region_offset(1));
      EXPECT_LE(offset + bytes, mapping->layout().region_offset(2));
      for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(static_cast<int>(*mapping->at(offset + i)), 0);
      const int value = static_cast<int>(1 + random() % 200);
      std::memset(mapping->at(offset), value, static_cast<size_t>(bytes));
      blocks[offset] = {bytes, value};
      total += (bytes + kPage - 1) / kPage * kPage;
    }
    ASSERT_EQ(arena.allocated_bytes(), total);
  }
  for (const auto& [offset, block] : blocks) arena.free(offset);
  EXPECT_EQ(arena.allocated_bytes(), 0);
  arena.free(arena.allocate(int64_t{1}
                            << 20));  // all neighbours were merged: the whole region is one hole
}

TEST(Arena, AFullRegionIsAnError) {
  const auto mapping = Mapping::create({kPage, int64_t{1} << 20, 1});
  Arena arena(mapping, 0);
  const auto half = arena.allocate(int64_t{1} << 19);
  EXPECT_THROW(arena.allocate((int64_t{1} << 19) + 1), OutOfMemory);
  arena.free(half);
  arena.free(arena.allocate(int64_t{1} << 20));
}

TEST(Arena, NamesItsRankAsTheJobDoes) {
  Arena arena(Mapping::create({kPage, int64_t{1} << 20, 2}), 1, 7);
  EXPECT_THAT(zero::message_of<OutOfMemory>([&] { arena.allocate(int64_t{1} << 30); }),
              HasSubstr("of shared memory on rank 7"));
}

TEST(Arena, RanksThatTakeMemoryAtTheSameTimeDoNotTakeTheSame) {
  constexpr int64_t kHost = int64_t{100} << 20;
  const auto mapping = Mapping::create({kPage, int64_t{1} << 30, 2});
  std::barrier both(2);
  const auto taken = [&] {
    struct stat file {};
    fstat(mapping->file(), &file);
    return static_cast<int64_t>(file.st_blocks) * 512;
  };
  const int64_t before = taken();
  const auto at_once = [&](int64_t bytes) {
    std::array<std::string, 2> refusals;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        // Each rank looks at the memory when the other has decided to take some, and before it has.
        bool first = true;
        Arena arena(mapping, rank, {}, [&] {
          if (std::exchange(first, false)) both.arrive_and_wait();
          return std::vector<MemoryLimit>{
              {.available = kHost - (taken() - before), .reason = "the host's memory"}};
        });
        try {
          const auto block = arena.allocate(bytes);
          both.arrive_and_wait();
          arena.free(block);
        } catch (const OutOfMemory& error) {
          refusals[static_cast<size_t>(rank)] = error.what();
          both.arrive_and_wait();
        }
      });
    }
    for (auto& rank : ranks) rank.join();
    EXPECT_EQ(mapping->pending(0).load(), 0);
    EXPECT_EQ(mapping->pending(1).load(), 0);
    return refusals;
  };
  const auto too_much = at_once(kHost * 6 / 10);
  EXPECT_FALSE(too_much[0].empty() && too_much[1].empty());
  for (const auto& refusal : too_much) {
    if (!refusal.empty()) {
      EXPECT_NE(refusal.find("other ranks of this host are taking"), std::string::npos) << refusal;
    }
  }
  for (const auto& refusal : at_once(kHost * 4 / 10)) EXPECT_EQ(refusal, "");
}

// Ranks that share memory may be in containers with limits of their own.
TEST(Arena, WhatARankTakesIsMissingWhereItCounts) {
  constexpr int64_t kBlock = int64_t{60} << 20;
  enum : int64_t { kMachine = 1, kGroup = 2, kOtherGroup = 3 };
  const auto mapping = Mapping::create({kPage, int64_t{1} << 30, 2});
  const auto allocate_beside = [&](int64_t machine, int64_t group_of_other) {
    Arena arena(mapping, 0, {}, [&] {
      return std::vector<MemoryLimit>{{machine, "the machine's memory", kMachine},
                                      {int64_t{100} << 20, "a cgroup's limit", kGroup}};
    });
    mapping->limit_id(1, 0).store(kMachine);
    mapping->limit_id(1, 1).store(group_of_other);
    mapping->pending(1).store(kBlock);
    std::string refusal;
    try {
      arena.free(arena.allocate(kBlock));
    } catch (const OutOfMemory& error) {
      refusal = error.what();
    }
    return refusal;
  };
  EXPECT_EQ(allocate_beside(4 * kBlock, kOtherGroup), "");
  EXPECT_NE(allocate_beside(4 * kBlock, kGroup).find("a cgroup's limit"), std::string::npos);
  EXPECT_NE(allocate_beside(kBlock + kPage, kOtherGroup).find("the machine's memory"),
            std::string::npos);
}

TEST(Arena, ALimitOnFilesIsNamedAndKillsNobody) {
  const auto mapping = Mapping::create({kPage, int64_t{1} << 30, 1});
  Arena arena(mapping, 0);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string made;
  std::string allocated;
  try {
    Mapping::create({kPage, int64_t{1} << 30, 1});
  } catch (const OutOfMemory& error) {
    made = error.what();
  }
  try {
    arena.allocate(2 << 20);
  } catch (const OutOfMemory& error) {
    allocated = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (const auto& message : {made, allocated}) {
    EXPECT_NE(message.find("at most 1.00 MiB"), std::string::npos) << message;
    EXPECT_NE(message.find("ulimit -f"), std::string::npos) << message;
  }
  EXPECT_EQ(arena.allocated_bytes(), 0);
}

TEST(Arena, FreedPagesGoBackToTheSystem) {
  const auto mapping = Mapping::create({kPage, int64_t{1} << 26, 1});
  Arena arena(mapping, 0);
  const auto resident = [&] {
    struct stat status {};
    EXPECT_EQ(fstat(mapping->file(), &status), 0);
    return static_cast<int64_t>(status.st_blocks) * 512;
  };
  EXPECT_EQ(resident(), kPage) << "the control region";
  const auto block = arena.allocate(int64_t{1} << 24);
  EXPECT_EQ(resident(), kPage + (int64_t{1} << 24)) << "reserved before anything is written";
  arena.free(block);
  EXPECT_EQ(resident(), kPage);
}

TEST(Mapping, KnowsWhichAddressesAreItsOwn) {
  const auto mapping = Mapping::create({kPage, int64_t{1} << 20, 2});
  EXPECT_EQ(mapping->offset_of(mapping->at(kPage), 10), kPage);
  EXPECT_EQ(mapping->offset_of(mapping->at(0), 10), -1) << "the control region";
  EXPECT_EQ(mapping->offset_of(mapping->at(mapping->layout().total_bytes() - 10), 10),
            mapping->layout().total_bytes() - 10);
  EXPECT_EQ(mapping->offset_of(mapping->at(mapping->layout().total_bytes() - 10), 11), -1);
  const int local = 0;
  EXPECT_EQ(mapping->offset_of(&local, 4), -1);
}

// Returns the targets of this process's descriptors.
std::vector<std::string> descriptors() {
  std::vector<std::string> targets;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    targets.push_back(std::filesystem::read_symlink(entry.path(), gone).string());
  }
  return targets;
}

size_t count_of(const std::vector<std::string>& targets, const std::string& part) {
  return static_cast<size_t>(std::count_if(
      targets.begin(), targets.end(),
      [&](const std::string& target) { return target.find(part) != std::string::npos; }));
}

TEST(SharedMemoryGroup, LeavesNothingBehind) {
  const auto before = descriptors();
  run_as_threads(3, [&](std::shared_ptr<Group> group) {
    auto tensor = group->empty(1000, at::kFloat, Category::gradients);
    auto window = group->window(999, 2, Category::parameters);
    group->all_reduce(tensor).wait();
    const auto during = descriptors();
    EXPECT_EQ(count_of(during, "memfd:libzero"), 1u) << "one file for all ranks";
    EXPECT_EQ(count_of(during, "socket:"), count_of(before, "socket:"))
        << "the socket was for the start";
    group->barrier();
  });
  const auto after = descriptors();
  EXPECT_EQ(after.size(), before.size());
  EXPECT_EQ(count_of(after, "memfd:libzero"), 0u);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    EXPECT_EQ(line.find("memfd:libzero"), std::string::npos) << line;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(entry.path().string().find("libzero"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace zero::comm
