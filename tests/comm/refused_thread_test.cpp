// If the system refuses threads half-way there is an error, and nothing is left running.
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <torch/types.h>

#include <atomic>
#include <cerrno>
#include <chrono>

#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/data/filter.h"
#include "zero/store/queue.h"

namespace {

// So many threads may still start. pthread_create has no other way to be told.
std::atomic<int> threads_left{1 << 30};

class ThreadLimit {
 public:
  explicit ThreadLimit(int threads) { threads_left = threads; }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
  ~ThreadLimit() { threads_left = 1 << 30; }
};

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) noexcept {
  static const auto real =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left.fetch_sub(1) <= 0) return EAGAIN;
  return real(thread, attributes, body, argument);
}

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(RefusedThread, OfADisksQueueIsAStoreError) {
  for (int allowed = 0; allowed < 4; ++allowed) {
    const ThreadLimit limit(allowed);
    EXPECT_THAT([] { store::thread_queue(4); },
                ThrowsMessage<StoreError>(
                    AllOf(HasSubstr("Cannot start a thread for states on disk: Resource"),
                          HasSubstr("ulimit -u"))));
  }
  EXPECT_NE(store::thread_queue(4), nullptr);
}

TEST(RefusedThread, OfARankIsACommErrorBeforeAnyRankBegins) {
  for (int allowed = 0; allowed < 3; ++allowed) {
    std::atomic<int> begun{0};
    const ThreadLimit limit(allowed);
    EXPECT_THAT([&] { comm::run_as_threads(3, [&](const auto&) { ++begun; }); },
                ThrowsMessage<CommError>(
                    AllOf(HasSubstr("Cannot start a thread for rank"), HasSubstr("ulimit -u"))));
    EXPECT_EQ(begun, 0);
  }
}

TEST(RefusedThread, OfACollectiveIsACommErrorOnThatRankAndEndsTheOthers) {
  comm::GroupOptions options;
  options.timeout = std::chrono::minutes(2);
  EXPECT_THAT(
      [&] {
        comm::run_as_threads(
            2,
            [](const auto& group) {
              group->barrier();
              if (group->rank() == 1) group->barrier("of those that the other does not reach");
              const ThreadLimit limit(0);
              auto tensor = torch::ones({8});
              group->all_reduce(tensor).wait();
            },
            options);
      },
      ThrowsMessage<CommError>(AllOf(HasSubstr("Cannot start a thread for a rank's collectives"),
                                     HasSubstr("ulimit -u"))));
}

TEST(RefusedThread, OfAFilterIsADataErrorAndItsProgramIsGone) {
  const ThreadLimit limit(0);
  EXPECT_THAT(
      [] {
        run_filter(
            {"/bin/cat"}, [] { return std::string_view(); }, [](std::string_view) {});
      },
      ThrowsMessage<DataError>(
          AllOf(HasSubstr("Cannot start a thread for /bin/cat"), HasSubstr("ulimit -u"))));
}

}  // namespace
}  // namespace zero
