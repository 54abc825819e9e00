// If one rank fails, all ranks throw: the tests say who throws what.
#include "zero/comm/agreement.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/group.h"

namespace zero::comm {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(Agreement, ReturnsEachRanksResultWhereNoneFails) {
  for (const int world : {1, 3}) {
    run_as_threads(world, [](std::shared_ptr<Group> group) {
      const auto made =
          agree(*group, "Making it", [&] { return std::make_unique<int>(10 * group->rank()); });
      EXPECT_EQ(*made, 10 * group->rank());
      int ran = 0;
      agree<DataError>(*group, "Reading it", [&] { ++ran; });
      EXPECT_EQ(ran, 1);
      agree_on_rank_zero(*group, "Writing it", [&] { ++ran; });
      EXPECT_EQ(ran, group->rank() == 0 ? 2 : 1);
    });
  }
}

TEST(Agreement, TakesAByteOfEachRankWhereNoneFails) {
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    agree(*group, "Nothing", [] {});
    EXPECT_EQ(group->traffic().count(Collective::control).calls, 1);
    EXPECT_EQ(group->traffic().count(Collective::control).logical_bytes, 2);
  });
  const auto alone = single();
  agree(*alone, "Nothing", [] {});
  EXPECT_EQ(alone->traffic().count(Collective::control).calls, 0);
}

TEST(Agreement, LeavesTheFailedRankItsOwnErrorAndNamesItToTheOthers) {
  run_as_threads(4, [](std::shared_ptr<Group> group) {
    const auto work = [&] {
      if (group->rank() == 2) throw std::out_of_range("no such thing");
      if (group->rank() == 1) throw StoreError("The disk is full.");
    };
    try {
      agree<CheckpointError>(*group, "Engine::save", work);
      ADD_FAILURE() << "rank " << group->rank() << " went on";
    } catch (const std::out_of_range& error) {
      EXPECT_EQ(group->rank(), 2);
      EXPECT_STREQ(error.what(), "no such thing");
    } catch (const StoreError& error) {
      EXPECT_EQ(group->rank(), 1);
      EXPECT_STREQ(error.what(), "The disk is full.");
    } catch (const CheckpointError& error) {
      EXPECT_TRUE(group->rank() == 0 || group->rank() == 3);
      EXPECT_STREQ(error.what(), "Engine::save failed on rank 1: The disk is full.");
      const auto* peer = dynamic_cast<const PeerFailure*>(&error);
      ASSERT_NE(peer, nullptr);
      EXPECT_EQ(peer->failed_rank(), 1);
    }
    group->barrier("the group goes on");
  });
}

TEST(Agreement, SharesAFailureOfEarlierAndOfAnyType) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    const auto mine = group->rank() == 1 ? std::make_exception_ptr(5) : nullptr;
    try {
      share_failure(*group, "Reporting", mine);
      ADD_FAILURE() << "rank " << group->rank() << " went on";
    } catch (int number) {
      EXPECT_EQ(group->rank(), 1);
      EXPECT_EQ(number, 5);
    } catch (const Error& error) {
      EXPECT_EQ(group->rank(), 0);
      EXPECT_THAT(error.what(), HasSubstr("Reporting failed on rank 1"));
    }
  });
}

TEST(Agreement, CutsALongMessage) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    try {
      agree(*group, "Saying it", [&] {
        if (group->rank() == 0) throw DataError(std::string(100'000, 'x'));
      });
      ADD_FAILURE() << "rank " << group->rank() << " went on";
    } catch (const PeerFailure&) {
      EXPECT_EQ(group->rank(), 1);
    } catch (const DataError& error) {
      EXPECT_EQ(group->rank(), 0);
      EXPECT_EQ(std::string(error.what()).size(), 100'000u);
    }
  });
}

// A rank that waited for the others' word would wait for ever.
TEST(Agreement, LetsAFailureOfTheGroupPass) {
  std::mutex mutex;
  std::vector<std::string> messages;
  const auto body = [&](std::shared_ptr<Group> group) {
    try {
      agree<DataError>(*group, "Counting", [&] {
        auto numbers = at::zeros({4 + group->rank()});
        group->all_reduce(numbers).wait();
      });
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      messages.emplace_back(error.what());
    }
  };
  run_as_threads(2, body, {.timeout = std::chrono::seconds(60)});
  EXPECT_THAT(messages, AllOf(SizeIs(2), Each(HasSubstr("do not call the same collective"))));
}

TEST(RunAsThreads, RethrowsTheFailureAndNotWhatItLedTo) {
  for (int failing = 0; failing < 3; ++failing) {
    try {
      run_as_threads(3, [&](std::shared_ptr<Group> group) {
        agree(*group, "Work", [&] {
          if (group->rank() == failing) throw DataError("the cause");
        });
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const DataError& error) {
      EXPECT_STREQ(error.what(), "the cause");
    }
  }
}

TEST(MessageOf, LeavesStackTracesOut) {
  try {
    TORCH_CHECK(false, "a check of LibTorch");
  } catch (...) {
    EXPECT_THAT(message_of(std::current_exception()), EndsWith("a check of LibTorch"));
  }
}

}  // namespace
}  // namespace zero::comm
