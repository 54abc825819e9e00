// Copies in the memory of hosts, here folders of threads: whichever host is lost, the others have
// what is needed, and what is not whole or not sound is never loaded.
#include "zero/engine/memory_copies.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "tests/engine/worlds.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A rank with its engine and its host's folder.
struct Rank {
  comm::Group& group;
  Net& net;
  Engine& engine;
  MemoryCopies& copies;
  const fs::path folder;
};

class Hosts {
 public:
  /// Runs ranks whose hosts have the folders `names`, in order.
  void run(World world, const std::string& names, int stage, const std::function<void(Rank)>& body,
           int64_t spare_bytes = 0) {
    run_in(world, [&](std::shared_ptr<comm::Group> group) {
      auto net = std::make_shared<Net>();
      const auto folder =
          folder_ / std::string(1, names[static_cast<size_t>(group->topology().host)]);
      MemoryCopies copies(group, folder, spare_bytes);
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage, /*bf16=*/true), group);
      body({*group, *net, engine, copies, folder});
    });
  }
  /// Makes copies of steps 3 and 6; only the last stays. Another step follows.
  void save(World world, const std::string& names, int stage) {
    run(world, names, stage, [&](Rank rank) {
      for (const int64_t step : {3, 6}) {
        train(rank.engine, rank.net, 3, static_cast<int>(step));
        rank.copies.begin(rank.engine, step, {{"rank", std::to_string(rank.group.rank())}},
                          {.background = true});
        if (step == 6) remember(rank.engine, rank.group);
        train(rank.engine, rank.net, 1);  // beside the copy
        rank.copies.complete(rank.engine);
        EXPECT_GT(rank.copies.bytes_of(step), 0);
      }
      EXPECT_TRUE(rank.copies.newest().has_value());  // waits until the earlier copy is gone
      EXPECT_FALSE(fs::exists(rank.folder / "copy-3"));
    });
  }
  void load(World world, const std::string& names, int stage) {
    run(world, names, stage, [&](Rank rank) {
      train(rank.engine, rank.net, 1);
      auto found = rank.copies.newest();
      ASSERT_TRUE(found);
      EXPECT_EQ(found->step, 6);
      const auto attached = rank.copies.load(rank.engine, *found);
      EXPECT_EQ(attached.count("rank"), 1u);
      auto seen = weights(rank.engine);
      for (const auto& name : rank.engine.parameter_names())
        seen.push_back(rank.engine.optimizer_state(name, "exp_avg").clone());
      expect_equal(seen, states_);
    });
  }
  fs::path operator/(const std::string& name) const { return folder_ / name; }

 private:
  void remember(Engine& engine, comm::Group& group) {
    auto seen = weights(engine);
    for (const auto& name : engine.parameter_names())
      seen.push_back(engine.optimizer_state(name, "exp_avg").clone());
    const std::lock_guard lock(mutex_);
    if (group.rank() == 0) states_ = std::move(seen);
  }

  TemporaryFolder folder_;
  std::mutex mutex_;
  std::vector<at::Tensor> states_;
};

// Changes two bytes of the values.
void damage(const fs::path& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(fs::file_size(path)) - 40);
  file.put('x');
  file.put('y');
}

TEST(MemoryCopies, OneHostGoesOnAtAnyRanks) {
  for (const int stage : {0, 3}) {
    Hosts hosts;
    hosts.save({1, 2}, "a", stage);
    hosts.load({1, 2}, "a", stage);
    hosts.load({1, 1}, "a", 2);
    hosts.load({1, 3}, "a", 1);
  }
}

TEST(MemoryCopies, AnyHostMayBeLost) {
  Hosts hosts;
  hosts.save({3, 1}, "abc", 2);
  // In the place of the second host comes one that has nothing, or none.
  hosts.load({3, 1}, "axc", 2);
  hosts.load({2, 1}, "ac", 3);
  EXPECT_TRUE(fs::exists(hosts / "x/copy-6/rank-1-of-3.safetensors"));
  EXPECT_FALSE(fs::exists(hosts / "x/copy-6/rank-0-of-3.safetensors")) << "nobody there needs it";
  // The first one has its own files and those of the third.
  fs::remove_all(hosts / "x");
  fs::remove_all(hosts / "b");
  hosts.load({2, 1}, "ca", 1);
  hosts.save({2, 2}, "de", 3);
  hosts.load({1, 2}, "e", 3);
  hosts.load({2, 2}, "ey", 3);
}

TEST(MemoryCopies, TwoNeighboursThatAreLostAreNamed) {
  Hosts hosts;
  hosts.save({3, 1}, "abc", 1);
  hosts.run({1, 1}, "a", 1, [&](Rank rank) {
    std::vector<std::string> faults;
    EXPECT_FALSE(rank.copies.newest(&faults));
    EXPECT_THAT(faults, ElementsAre(HasSubstr("copy of step 6 in memory has 2 of its 3 files")));
    EXPECT_TRUE(fs::is_empty(rank.folder)) << "nobody can load it";
  });
}

TEST(MemoryCopies, WhatIsNotWholeOrNotSoundIsNamedAndTheCopyBeforeItTaken) {
  Hosts hosts;
  hosts.save({1, 2}, "a", 1);
  const auto newer = [&](int64_t step) {
    const auto folder = hosts / fmt::format("a/copy-{}", step);
    fs::copy(hosts / "a/copy-6", folder, fs::copy_options::recursive);
    return folder;
  };
  fs::rename(newer(12), hosts / "a/copy-12.partial");  // the ranks were killed in the copy
  fs::resize_file(newer(11) / "rank-1-of-2.safetensors", 1000);
  fs::resize_file(newer(10) / "manifest.json", 1000);
  damage(newer(9) / "rank-1-of-2.safetensors");
  hosts.run({1, 2}, "a", 1, [&](Rank rank) {
    const auto before = weights(rank.engine);
    auto found = rank.copies.newest();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->step, 9);
    EXPECT_THAT(found->faults,
                ElementsAre(HasSubstr("manifest.json' is damaged"),
                            HasSubstr("step 11 in memory has 1 of its 2 files"),
                            HasSubstr("copy of step 12 in memory was not complete")));
    EXPECT_THROW(rank.copies.load(rank.engine, *found), CheckpointError);
    expect_equal(weights(rank.engine), before);
    rank.copies.drop(found->step);
  });
  hosts.load({1, 2}, "a", 1);
}

TEST(MemoryCopies, ADamagedFileIsTakenFromTheOtherHostThatHasIt) {
  Hosts hosts;
  hosts.save({2, 1}, "ab", 2);
  damage(hosts / "b/copy-6/rank-1-of-2.safetensors");
  hosts.run({2, 1}, "ab", 2, [&](Rank rank) {
    train(rank.engine, rank.net, 1);
    auto found = rank.copies.newest();
    ASSERT_TRUE(found);
    (void)rank.copies.load(rank.engine, *found);
    EXPECT_THAT(found->faults, ElementsAre(HasSubstr("rank-1-of-2.safetensors' is damaged")));
  });
  hosts.load({2, 1}, "ab", 2);
  // With both of its holders damaged the copy is lost.
  for (const char* host : {"a", "b"})
    damage(hosts / fmt::format("{}/copy-6/rank-0-of-2.safetensors", host));
  hosts.run({2, 1}, "ab", 2, [&](Rank rank) {
    auto found = rank.copies.newest();
    ASSERT_TRUE(found);
    EXPECT_THROW(rank.copies.load(rank.engine, *found), CheckpointError);
    EXPECT_FALSE(rank.copies.newest());
  });
}

TEST(MemoryCopies, ACopyWithoutRoomIsRefusedAndTheOneBeforeItStays) {
  Hosts hosts;
  hosts.save({2, 1}, "ab", 2);
  hosts.run(
      {2, 1}, "ab", 2,
      [&](Rank rank) {
        const auto message = message_of<CheckpointError>(
            [&] { rank.copies.begin(rank.engine, 9, {}, {.background = true}); });
        EXPECT_THAT(message, AllOf(HasSubstr("copy in memory takes"), HasSubstr("to stay free")));
        EXPECT_EQ(rank.engine.save_progress(), SaveProgress::none);
      },
      int64_t{1} << 60);
  hosts.load({2, 1}, "ab", 2);
}

TEST(MemoryCopies, ACopyThatIsNotCompletedLeavesNothing) {
  Hosts hosts;
  hosts.run({2, 1}, "ab", 3, [&](Rank rank) {
    rank.copies.begin(rank.engine, 1, {}, {.background = true});
    train(rank.engine, rank.net, 1);
  });
  EXPECT_TRUE(fs::is_empty(hosts / "a"));
  EXPECT_TRUE(fs::is_empty(hosts / "b"));
}

}  // namespace
}  // namespace zero
