#include "zero/train/stop.h"
#include "zero/models/gpt2/gpt2.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace zero::train {
namespace {

TEST(StopSignals, TheFirstOneOnlyAsks) {
  const StopSignals signals;
  EXPECT_EQ(signals.received(), 0);
  std::raise(SIGTERM);
  EXPECT_EQ(signals.received(), SIGTERM);
}

TEST(StopSignals, OneThatIsIgnoredStaysSo) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  {
    const StopSignals signals;
    std::raise(SIGHUP);
    EXPECT_EQ(signals.received(), 0);
  }
  EXPECT_EQ(std::signal(SIGHUP, before), SIG_IGN);
}

// Note [Handlers have a stack of their own]: without one this dies in malloc.
TEST(StopSignals, ThatInterruptAMatrixKernelChangeNothing) {
  at::set_num_threads(1);
  torch::manual_seed(1);
  const torch::NoGradGuard guard;
  auto sizes = Gpt2Config::preset("gpt2");
  sizes.layers = 1;
  Gpt2 model(sizes);
  const auto tokens = torch::randint(sizes.vocab_size, {1, 128}, torch::kLong);
  const auto expected = model->forward(tokens);
  const auto main_thread = pthread_self();
  for (int i = 0; i < 300; ++i) {
    const StopSignals signals;
    std::thread sender([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 + 137 * (i % 61)));
      pthread_kill(main_thread, SIGTERM);  // NOLINT(bugprone-bad-signal-to-kill-thread): is handled
    });
    at::Tensor result;
    do result = model->forward(tokens);
    while (signals.received() == 0);
    sender.join();
    ASSERT_TRUE(torch::equal(result, expected)) << "after " << i << " signals";
  }
}

}  // namespace
}  // namespace zero::train
