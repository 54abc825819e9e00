// Power lost after each system call of Engine::save: what is found is the old save or the new one,
// whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/support/file_calls.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using comm::run_as_threads;

struct Saves {
  std::vector<test::FileCall> calls;
  size_t first = 0;  // calls of the first save; the others are of the second
  std::array<std::vector<at::Tensor>, 3> next;  // weights a step after one save, after two
};

struct Manner {
  bool swaps = true;        // the file system can swap two names
  bool background = false;  // the saves are written beside the next step
};

// Two saves to one folder, the second over the first.
Saves record_two_saves(const fs::path& root, Manner manner) {
  Saves saves;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, config(2), group);
    const bool records = group->rank() == 0;
    std::unique_ptr<test::FileCalls> recorder;
    if (records) {
      recorder = std::make_unique<test::FileCalls>(root);
      recorder->refuse_swaps(!manner.swaps);
    }
    group->barrier("recording");
    for (int64_t save = 1; save <= 2; ++save) {
      train(engine, *net, 1, save);
      engine.save(root / "run", {}, {.background = manner.background});
      if (manner.background && save == 2) train(engine, *net, 1, 9);
      engine.complete_save();
      if (records && save == 1) saves.first = recorder->calls().size();
      group->barrier("counted");
    }
    if (!records) return;
    saves.calls = recorder->calls();
    recorder.reset();
    // Nothing was missed: what was recorded is what is there.
    EXPECT_EQ(test::after(saves.calls), test::Tree::of(root));
  });
  run_as_threads(2, [&](auto group) {
    for (int64_t save = 1; save <= 2; ++save) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(2), group);
      train(engine, *net, save, 1);
      train(engine, *net, 1, 9);
      auto now = weights(engine);
      if (group->rank() == 0) saves.next[static_cast<size_t>(save)] = std::move(now);
    }
  });
  return saves;
}

void check_every_crash_point(Manner manner) {
  const TemporaryFolder recorded;
  const auto saves = record_two_saves(recorded.path(), manner);
  ASSERT_GT(saves.first, 0U);
  ASSERT_GT(saves.calls.size(), saves.first);

  // The states that may be found, and how old they may be.
  std::map<test::Tree, bool> remains;  // whether the first save had ended
  size_t visited = 0;
  for (size_t count = 0; count <= saves.calls.size(); ++count) {
    test::visit_remains(saves.calls, count, [&](const test::Tree& tree) {
      ++visited;
      auto& ended = remains.try_emplace(tree, false).first->second;
      ended |= count >= saves.first;
    });
  }

  const TemporaryFolder folder;
  std::array<size_t, 3> found{};
  run_as_threads(2, [&](auto group) {
    const bool first = group->rank() == 0;
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, config(2), group);
    for (const auto& [tree, ended] : remains) {
      if (first) tree.put(folder.path());
      group->barrier("remains");
      std::string failure;
      try {
        engine.load(folder.path() / "run");
      } catch (const CheckpointError& error) {
        failure = error.what();
      }
      if (!failure.empty()) {
        // Before the first save had ended there may be none, but never a part of one.
        EXPECT_FALSE(ended) << failure;
        EXPECT_FALSE(first && failure.find("does not exist") == std::string::npos) << failure;
        if (first) ++found[0];
      } else {
        const auto steps = static_cast<size_t>(engine.steps());
        ASSERT_TRUE(steps == 1 || steps == 2) << steps;
        train(engine, *net, 1, 9);  // with the moments of that step
        expect_equal(weights(engine), saves.next[steps]);
        if (first) ++found[steps];
      }
      // Left-overs must not hinder a save, which removes them.
      engine.save(folder.path() / "run");
      if (first) {
        const auto left = test::Tree::of(folder.path());
        EXPECT_EQ(left.folders.size(), 1U);
        EXPECT_EQ(left.files.size(), 3U);
      }
      group->barrier("looked");
    }
  });
  EXPECT_GT(found[1], 0U);
  EXPECT_GT(found[2], 0U);
  std::printf(
      "%zu crash points (%zu system calls of two saves), %zu remains, %zu of them different: %zu "
      "without a save, %zu with the old one, %zu with the new one\n",
      saves.calls.size() + 1, saves.calls.size(), visited, remains.size(), found[0], found[1],
      found[2]);
}

TEST(EngineSave, ALossOfPowerAfterAnySystemCallLeavesTheOldSaveOrTheNewOne) {
  check_every_crash_point({});
}

TEST(EngineSave, ALossOfPowerWhileItIsWrittenBesideAStepLeavesOneOfThem) {
  check_every_crash_point({.background = true});
}

TEST(EngineSave, ALossOfPowerLeavesOneOfThemOnFileSystemsThatCannotSwap) {
  check_every_crash_point({.swaps = false});
}

}  // namespace
}  // namespace zero
