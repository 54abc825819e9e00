#include "zero/base/broken_pipe.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <thread>

namespace zero {
namespace {

// A pipe that nobody reads.
int widow() {
  std::array<int, 2> ends{};
  EXPECT_EQ(pipe(ends.data()), 0);
  close(ends[0]);
  return ends[1];
}

void expect_no_signal() {
  sigset_t pending;
  sigset_t blocked;
  ASSERT_EQ(sigpending(&pending), 0);
  ASSERT_EQ(pthread_sigmask(SIG_SETMASK, nullptr, &blocked), 0);
  EXPECT_EQ(sigismember(&pending, SIGPIPE), 0);
  EXPECT_EQ(sigismember(&blocked, SIGPIPE), 0);
}

TEST(BrokenPipeScope, AWriteFailsAndTheProgramGoesOn) {
  const int end = widow();
  for (int i = 0; i < 3; ++i) {
    const BrokenPipeScope survives;
    const BrokenPipeScope again;  // they nest
    errno = 0;
    EXPECT_EQ(write(end, "x", 1), -1);
    EXPECT_EQ(errno, EPIPE);
  }
  expect_no_signal();
  close(end);
}

TEST(BrokenPipeScope, AThreadThatIsStartedInItKeepsIt) {
  std::thread thread;
  {
    const BrokenPipeScope survives;
    thread = std::thread([] {
      const int end = widow();
      EXPECT_EQ(write(end, "x", 1), -1);
      EXPECT_EQ(errno, EPIPE);
      close(end);
    });
  }
  thread.join();
  expect_no_signal();
}

TEST(BrokenPipeScope, WithoutItTheProgramEnds) {
  EXPECT_EXIT(
      {
        const int end = widow();
        { const BrokenPipeScope over; }
        (void)!write(end, "x", 1);
      },
      testing::KilledBySignal(SIGPIPE), "");
}

}  // namespace
}  // namespace zero
