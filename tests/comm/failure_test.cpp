// Tests the errors of all ranks when one of them errs, leaves or does not come.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/comm/shm_meeting.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Returns the messages of the CommErrors that `body` throws, by rank; "" for none.
std::vector<std::string> errors_of(int size, const std::function<void(Group&)>& body,
                                   GroupOptions options = {}) {
  std::vector<std::string> messages(static_cast<size_t>(size));
  std::latch all_done(size);
  run_as_threads(
      size,
      [&](std::shared_ptr<Group> group) {
        try {
          body(*group);
        } catch (const CommError& error) {
          messages[static_cast<size_t>(group->rank())] = error.what();
        }
        all_done.arrive_and_wait();  // nobody leaves before all have heard
      },
      options);
  return messages;
}

TEST(Mismatch, OfTheCollectiveIsReportedOnEveryRankNamingBoth) {
  const auto messages = errors_of(3, [](Group& group) {
    auto tensor = at::zeros({12});
    if (group.rank() == 1) {
      group.broadcast(tensor, 0, "unit 3").wait();
    } else {
      group.all_reduce(tensor, "unit 3").wait();
    }
  });
  EXPECT_THAT(messages,
              Each(AllOf(HasSubstr("all_reduce #1 'unit 3' (48 bytes, Float): by rank 0, 2"),
                         HasSubstr("broadcast #1 'unit 3' (48 bytes, Float, root 0): by rank 1"))));
}

TEST(Mismatch, OfTheSizeIsReportedOnEveryRank) {
  const auto messages = errors_of(3, [](Group& group) {
    auto input = at::zeros({group.rank() == 2 ? 5 : 4});
    auto output = at::zeros({input.numel() * 3});
    group.all_gather(output, input).wait();
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("(16 -> 48 bytes, Float): by rank 0, 1"),
                                   HasSubstr("(20 -> 60 bytes, Float): by rank 2"))));
}

TEST(Mismatch, OfTheDtypeIsReportedOnEveryRank) {
  const auto messages = errors_of(2, [](Group& group) {
    auto tensor = at::zeros({4}, group.rank() == 0 ? at::kFloat : at::kInt);
    group.all_reduce(tensor).wait();
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("Float"), HasSubstr("Int"))));
}

TEST(Mismatch, OfTheOutputDtypeIsReportedOnEveryRank) {
  const auto messages = errors_of(2, [](Group& group) {
    auto input = at::zeros({8}, at::kBFloat16);
    auto output = at::zeros({4}, group.rank() == 0 ? at::kFloat : at::kBFloat16);
    group.reduce_scatter(output, input).wait();
  });
  EXPECT_THAT(messages, Each(HasSubstr("BFloat16 -> Float")));
}

TEST(Mismatch, OfTheRootIsReportedOnEveryRank) {
  const auto messages = errors_of(2, [](Group& group) {
    auto tensor = at::zeros({4});
    group.broadcast(tensor, group.rank()).wait();
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("root 0"), HasSubstr("root 1"))));
}

TEST(Mismatch, OfTheLabelIsReportedOnEveryRank) {
  const auto messages = errors_of(2, [](Group& group) {
    auto tensor = at::zeros({4});
    group.all_reduce(tensor, group.rank() == 0 ? "unit 7" : "unit 8").wait();
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("'unit 7'"), HasSubstr("'unit 8'"))));
}

TEST(Mismatch, OfABarrierIsReportedOnEveryRank) {
  const auto messages = errors_of(2, [](Group& group) {
    auto tensor = at::zeros({4});
    for (int i = 0; i < 5; ++i) group.barrier();
    if (group.rank() == 0) {
      group.barrier("end of step");
    } else {
      group.all_reduce(tensor, "norm").wait();
    }
  });
  EXPECT_THAT(messages, Each(AllOf(HasSubstr("barrier #6 'end of step'"),
                                   HasSubstr("all_reduce #6 'norm'"))));
}

TEST(Failure, PoisonsTheGroup) {
  const auto messages = errors_of(2, [](Group& group) {
    auto tensor = at::zeros({4 + group.rank()});
    std::string first;
    try {
      group.all_reduce(tensor).wait();
    } catch (const CommError& error) {
      first = error.what();
    }
    EXPECT_FALSE(first.empty());
    try {
      group.barrier();
      ADD_FAILURE() << "a poisoned group went on";
    } catch (const CommError& error) {
      EXPECT_EQ(error.what(), first);
    }
    auto scalar = at::zeros({1});
    group.all_reduce_control(scalar);
  });
  EXPECT_THAT(messages, Each(HasSubstr("do not call the same collective")));
}

TEST(Failure, OfADroppedWorkSurfacesAtTheNextCall) {
  const auto messages = errors_of(2, [](Group& group) {
    auto tensor = at::zeros({4 + group.rank()});
    group.all_reduce(tensor, "dropped");
    group.barrier();
  });
  EXPECT_THAT(messages, Each(HasSubstr("'dropped'")));
}

TEST(Failure, OfArgumentsLeavesTheGroupUsable) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    auto four = at::zeros({4});
    auto nine = at::zeros({9});
    auto bools = at::zeros({4}, at::kBool);
    EXPECT_THROW(group->all_gather(nine, four), CommError);
    EXPECT_THROW(group->reduce_scatter(four, nine), CommError);
    EXPECT_THROW(group->all_to_all(nine, nine), CommError);
    EXPECT_THROW(group->all_to_all(four, four), CommError) << "in place";
    EXPECT_THROW(group->all_reduce(bools), CommError);
    EXPECT_THROW(group->all_reduce(at::zeros({4, 4}).t().narrow(0, 0, 2)), CommError);
    EXPECT_THROW(group->broadcast(four, 2), CommError);
    EXPECT_THROW(group->broadcast(four, -1), CommError);
    EXPECT_THROW(group->all_gather(at::zeros({8}), at::zeros({4}, at::kInt)), CommError);
    EXPECT_THROW(group->reduce_scatter(at::zeros({2}, at::kDouble), four), CommError);
    auto eight = at::zeros({8});
    EXPECT_THROW(group->all_gather(eight, eight.narrow(0, 2, 4)), CommError) << "overlap";
    EXPECT_THROW(group->reduce_scatter(eight.narrow(0, 1, 4), eight), CommError) << "overlap";
    EXPECT_THROW(group->all_reduce(at::Tensor()), CommError);
    group->all_reduce(four.fill_(1)).wait();
    EXPECT_EQ(four[3].item<float>(), 2);
  });
}

TEST(Failure, OfArgumentsLeavesNoLabelToTheNextCall) {
  run_as_threads(2, [](std::shared_ptr<Group> group) {
    if (group->rank() == 1) {
      EXPECT_THROW(group->all_gather(at::zeros({8}), at::zeros({4}, at::kInt), "unit 3"),
                   CommError);
      EXPECT_THROW(group->all_reduce(at::zeros({4}, at::kBool), "unit 4"), CommError);
    }
    const auto window = group->window(8, 1, Category::parameters);
    EXPECT_NE(window, nullptr);
    group->barrier();
  });
}

TEST(Failure, OfARankEndsTheOthersAndIsWhatIsRethrown) {
  for (int failing = 0; failing < 3; ++failing) {
    std::mutex mutex;
    std::vector<std::string> heard;
    try {
      run_as_threads(3, [&](std::shared_ptr<Group> group) {
        if (group->rank() == failing) throw std::domain_error("the disk is full");
        try {
          group->barrier("step 9");
        } catch (const CommError& error) {
          const std::lock_guard lock(mutex);
          heard.emplace_back(error.what());
          throw;
        }
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::domain_error& error) {
      EXPECT_STREQ(error.what(), "the disk is full");
    }
    EXPECT_EQ(heard.size(), 2u);
    EXPECT_THAT(heard, Each(AllOf(HasSubstr("rank " + std::to_string(failing)),
                                  HasSubstr("the disk is full"), HasSubstr("step 9"))));
  }
}

TEST(Failure, OfTheLastRankToLeaveHarmsNobody) {
  // Ranks leave in any order as soon as they are done; a complete call stays complete.
  for (int round = 0; round < 30; ++round) {
    run_as_threads(3, [&](std::shared_ptr<Group> group) {
      auto tensor = at::full({10}, 1.0f);
      group->all_reduce(tensor).wait();
      EXPECT_EQ(tensor[0].item<float>(), 3);
      if (round % 2 == 0) group->barrier();
    });
  }
}

TEST(Leaving, IsReportedToThoseThatWait) {
  std::mutex mutex;
  std::vector<std::string> heard;
  run_as_threads(3, [&](std::shared_ptr<Group> group) {
    group->barrier("step 1");
    if (group->rank() == 1) return;
    try {
      group->barrier("step 2");
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      heard.emplace_back(error.what());
    }
  });
  EXPECT_EQ(heard.size(), 2u);
  EXPECT_THAT(heard,
              Each(AllOf(HasSubstr("rank 1 (pid"), HasSubstr("left the group"),
                         HasSubstr("barrier #1 'step 1'"), HasSubstr("barrier #2 'step 2'"))));
}

TEST(Timeout, NamesTheMissingRankAndItsLastCall) {
  std::latch others_gave_up(2);
  const auto messages = errors_of(3,
                                  [&](Group& group) {
                                    auto tensor = at::zeros({100});
                                    group.all_reduce(tensor, "unit 5").wait();
                                    if (group.rank() == 2) {
                                      others_gave_up.wait();  // busy elsewhere
                                    } else {
                                      try {
                                        group.all_reduce(tensor, "unit 6").wait();
                                      } catch (...) {
                                        others_gave_up.count_down();
                                        throw;
                                      }
                                    }
                                    group.all_reduce(tensor, "unit 6").wait();  // too late
                                  },
                                  {.timeout = milliseconds(300)});
  for (const int waiting : {0, 1}) {
    EXPECT_THAT(messages[static_cast<size_t>(waiting)],
                AllOf(HasSubstr("rank 2 (pid"), HasSubstr("has not arrived"),
                      HasSubstr("all_reduce #1 'unit 5' (400 bytes, Float), which it finished"),
                      HasSubstr("all_reduce #2 'unit 6'")));
  }
  EXPECT_THAT(messages[2], HasSubstr("rank 2 (pid"))
      << "the late rank hears why the others gave up";
}

TEST(Meeting, TimesOutNamingTheRankThatDoesNotCome) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  try {
    shared_memory_group(store, 0, 2, {.timeout = milliseconds(200)});
    ADD_FAILURE() << "a group of two was made by one";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("200 ms"), HasSubstr("waits for rank 1")));
  }
}

TEST(Meeting, NamesRanksAsTheJobDoes) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THAT(zero::message_of<CommError>([&] {
                (void)meet(*store, 0, 2, milliseconds(200), {4, 5});
              }),
              AllOf(HasSubstr("rank 4 was making"), HasSubstr("waits for rank 5")));
}

TEST(Meeting, TakesATimeoutBeyondAllClocks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const GroupOptions options{.timeout = milliseconds::max()};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto group = shared_memory_group(store, rank, 2, options);
      auto sum = at::full({3}, 1.0F);
      EXPECT_NO_THROW(group->all_reduce(sum).wait());
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(Meeting, RefusesRanksThatDoNotExist) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(shared_memory_group(store, 2, 2), CommError);
  EXPECT_THROW(shared_memory_group(store, -1, 2), CommError);
  EXPECT_THROW(shared_memory_group(store, 0, 0), CommError);
}

// A store through which rank 1 seems to be on another host.
class TwoHosts final : public c10d::HashStore {
 public:
  std::vector<uint8_t> get(const std::string& key) override {
    auto value = c10d::HashStore::get(key);
    if (key.ends_with("process/1")) {
      for (const char letter : std::string("elsewhere"))
        value.push_back(static_cast<uint8_t>(letter));
    }
    return value;
  }
};

TEST(Meeting, RefusesRanksOfSeveralHosts) {
  const auto store = c10::make_intrusive<TwoHosts>();
  std::vector<std::string> messages(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        shared_memory_group(store, rank, 2, {.timeout = milliseconds(5000)});
      } catch (const CommError& error) {
        messages[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_THAT(messages, Each(HasSubstr("all its ranks on one host")));
}

// A store of three ranks that rank 1 loses when it looks after rank 2, which joins meanwhile.
class LostStore final : public c10d::PrefixStore {
 public:
  struct Moments {
    std::latch rank_1_looks{1};
    std::latch others_are_done{2};
  };
  LostStore(c10::intrusive_ptr<c10d::Store> store, int rank, Moments& moments)
      : c10d::PrefixStore("ranks", std::move(store)), rank_(rank), moments_(moments) {}
  bool check(const std::vector<std::string>& keys) override {
    const bool arena = keys.front().ends_with("arena/0");
    if (rank_ == 2 && arena) moments_.rank_1_looks.wait();
    if (rank_ == 1 && joining_) {
      moments_.rank_1_looks.count_down();
      moments_.others_are_done.wait();
      TORCH_CHECK(false, "rank 0 has closed the store");
    }
    const bool there = c10d::PrefixStore::check(keys);
    joining_ = arena && there;
    return there;
  }

 private:
  int rank_;
  Moments& moments_;
  bool joining_ = false;
};

TEST(Meeting, IsOverOnceAllHaveJoinedWhateverTheyDoNext) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  LostStore::Moments moments;
  std::vector<std::string> messages(3);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        const auto own = c10::make_intrusive<LostStore>(store, rank, moments);
        shared_memory_group(own, rank, 3, {.timeout = milliseconds(20'000)});
      } catch (const CommError& error) {
        messages[static_cast<size_t>(rank)] = error.what();
      }
      if (rank != 1) moments.others_are_done.count_down();
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_THAT(messages, Each(""));
}

TEST(Meeting, MayBeRepeatedInOneStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto first = shared_memory_group(store, rank, 2);
      auto second = shared_memory_group(store, rank, 2);
      auto a = at::full({3}, 1.0f);
      auto b = at::full({3}, 10.0f);
      auto work_b = second->all_reduce(b);
      auto work_a = first->all_reduce(a);
      work_b.wait();
      work_a.wait();
      EXPECT_EQ(a[0].item<float>(), 2);
      EXPECT_EQ(b[0].item<float>(), 20);
      (rank == 0 ? first : second).reset();
    });
  }
  for (auto& rank : ranks) rank.join();
}

}  // namespace
}  // namespace zero::comm
