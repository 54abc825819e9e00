// Windows: the others read the bytes that one rank publishes, in step with the epochs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/group.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

TEST(Window, StartsZeroFilledAtEpochZero) {
  for (const int world : {1, 3}) {
    run_as_threads(world, [](std::shared_ptr<Group> group) {
      {
        auto reused = group->empty(100'000, at::kByte, Category::parameters).fill_(7);
        group->barrier();
      }
      auto window = group->window(1002, 3, Category::parameters);
      ASSERT_NE(window, nullptr);
      for (int rank = 0; rank < group->size(); ++rank) {
        window->wait(2, rank, 0, "start");
      }
      EXPECT_EQ(window->view().numel(), 1002);
      EXPECT_EQ(window->view().sum().item<int64_t>(), 0);
      EXPECT_EQ(window->memory().sum().item<int64_t>(), 0);
      EXPECT_EQ(window->memory().scalar_type(), at::kByte);
      group->barrier();
      EXPECT_EQ(group->ledger()->usage(Category::parameters).current, 1002 / group->size());
      window.reset();
      EXPECT_EQ(group->ledger()->usage(Category::parameters).current, 0);
    });
  }
}

TEST(Window, ReadersSeeThePublishedBytesOfEachEpoch) {
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    constexpr int64_t kSlot = 4096;
    constexpr int kSteps = 50;
    auto window = group->window(6 * kSlot, 2, Category::parameters);
    const auto part = [&](const at::Tensor& array, int64_t slot, int rank) {
      return array.narrow(0, (slot * 3 + rank) * kSlot, kSlot);
    };
    auto flag = at::zeros({1});
    for (uint64_t epoch = 1; epoch <= kSteps; ++epoch) {
      for (int64_t slot = 0; slot < 2; ++slot) {
        part(window->memory(), slot, group->rank())
            .fill_(static_cast<int64_t>(epoch + static_cast<uint64_t>(group->rank()) +
                                        100 * static_cast<uint64_t>(slot)));
        window->publish(slot, epoch);
      }
      for (int i = 1; i <= group->size(); ++i) {
        const int rank = (group->rank() + i) % group->size();
        for (int64_t slot = 0; slot < 2; ++slot) {
          window->wait(slot, rank, epoch, "unit");
          const auto bytes = part(window->view(), slot, rank);
          const auto value = static_cast<int64_t>(epoch) + rank + 100 * slot;
          EXPECT_EQ(bytes.sum().item<int64_t>(), value * kSlot);
        }
      }
      group->all_reduce_control(flag);  // nobody reads this epoch any more
    }
  });
}

// The bytes that a rank writes to its view stay with it, and go with `discard`.
TEST(Window, WritesToTheViewArePrivate) {
  for (const int64_t bytes : {int64_t{2 * 5000}, int64_t{3} << 20}) {  // small pages and huge ones
    run_as_threads(2, [&](std::shared_ptr<Group> group) {
      auto window = group->window(bytes, 1, Category::parameters);
      const int64_t half = bytes / 2;
      window->memory().narrow(0, group->rank() * half, half).fill_(group->rank() + 1);
      group->barrier();
      auto view = window->view();
      EXPECT_EQ(view[bytes - 1].item<int64_t>(), 2);
      view.fill_(9);
      group->barrier();
      EXPECT_EQ(view.sum().item<int64_t>(), 9 * bytes);
      EXPECT_EQ(window->memory().sum().item<int64_t>(), 3 * half) << "nobody else sees it";
      group->barrier();
      window->memory().narrow(0, group->rank() * half, half).fill_(group->rank() + 3);
      group->barrier();
      EXPECT_EQ(view.sum().item<int64_t>(), 9 * bytes);
      window->discard();
      EXPECT_EQ(view.sum().item<int64_t>(), 7 * half) << "the array shows again";
      group->barrier();
    });
  }
}

TEST(Window, MustBeSharedEqually) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    EXPECT_THROW(group->window(1001, 1, Category::parameters), CommError);
  });
}

TEST(Window, WaitBlocksUntilTheEpochIsThere) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    auto window = group->window(8, 1, Category::parameters);
    if (group->rank() == 0) {
      std::this_thread::sleep_for(milliseconds(50));
      window->memory().fill_(42);
      window->publish(0, 5);
    } else {
      const auto before = group->wait_ms();
      window->wait(0, 0, 5, "unit 1");
      EXPECT_EQ(window->view()[7].item<int64_t>(), 42);
      EXPECT_GT(group->wait_ms(), before);
    }
    group->barrier();
  });
}

TEST(Window, NeedsNoMatchingCallsOfThePeers) {
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    auto window = group->window(24, 1, Category::parameters);
    window->publish(0, 1);
    if (group->rank() == 2) {
      window->wait(0, 0, 1, "expert 0");
      window->wait(0, 1, 1, "expert 1");
    }
    group->barrier();
  });
}

TEST(Window, EpochsOnlyGrow) {
  for (const int world : {1, 2}) {
    run_as_threads(world, [](std::shared_ptr<Group> group) {
      auto window = group->window(8, 2, Category::parameters);
      window->publish(1, 4);
      window->publish(1, 4);
      EXPECT_THROW(window->publish(1, 3), CommError);
      EXPECT_THROW(window->publish(2, 3), CommError);
      EXPECT_THROW(window->publish(-1, 3), CommError);
      EXPECT_THROW(window->wait(2, 0, 1, ""), CommError);
      EXPECT_THROW(window->wait(0, group->size(), 1, ""), CommError);
      EXPECT_THROW(window->wait(0, -1, 1, ""), CommError);
      group->barrier();
    });
  }
}

TEST(Window, NamesTheRankThatLeft) {
  std::mutex mutex;
  std::vector<std::string> heard;
  run_as_threads(3, [&](std::shared_ptr<Group> group) {
    auto window = group->window(24, 1, Category::parameters);
    if (group->rank() == 1) return;
    try {
      window->wait(0, 1, 1, "block 3");
      ADD_FAILURE() << "the epoch was never published";
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      heard.emplace_back(error.what());
    }
  });
  EXPECT_EQ(heard.size(), 2u);
  EXPECT_THAT(heard, Each(AllOf(HasSubstr("rank 1"), HasSubstr("left"), HasSubstr("'block 3'"))));
}

TEST(Window, NamesTheRankThatKeepsItWaiting) {
  std::latch timed_out(1);
  run_as_threads(2,
                 [&](std::shared_ptr<Group> group) {
                   auto window = group->window(8, 1, Category::parameters);
                   if (group->rank() == 1) {
                     window->publish(0, 2);
                     timed_out.wait();
                     return;
                   }
                   try {
                     window->wait(0, 1, 3, "block 3");
                     ADD_FAILURE() << "the epoch was never published";
                   } catch (const CommError& error) {
                     EXPECT_THAT(error.what(), AllOf(HasSubstr("Timed out"), HasSubstr("rank 1"),
                                                     HasSubstr("'block 3'"), HasSubstr("is at 2")));
                   }
                   timed_out.count_down();
                 },
                 {.timeout = milliseconds(200)});
}

TEST(Window, OfAGroupOfOneIsItsView) {
  auto window = single()->window(8, 1, Category::parameters);
  auto view = window->view();
  view.fill_(9);
  EXPECT_EQ(window->memory().sum().item<int64_t>(), 72);
  window->discard();
  EXPECT_EQ(view.sum().item<int64_t>(), 72);
}

TEST(Window, OfAGroupOfOneCannotWaitForWhatNeverComes) {
  auto group = single();
  auto window = group->window(8, 1, Category::parameters);
  window->publish(0, 1);
  window->wait(0, 0, 1, "unit");
  EXPECT_THROW(window->wait(0, 0, 2, "unit"), CommError);
}

}  // namespace
}  // namespace zero::comm
