// Tests what the others hear of a rank that does not come.
#include "zero/engine/shown_operators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <chrono>
#include <latch>
#include <thread>

#include "tests/engine/net.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Rank 1 stays behind an operator until rank 0 has given up; what that one says of it.
std::string said_of_a_rank_that_stays(const Config& c, bool in_backward, int ranks = 2) {
  std::string said;
  std::latch gave_up(1);
  const auto stay = [&](const at::Tensor& tensor) {
    (void)tensor.detach().erfinv();
    gave_up.wait();
  };
  const auto body = [&](const std::shared_ptr<comm::Group>& group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-3}, c, group);
    train(engine, *net, 2);
    const auto loss = loss_of(*net, group->rank(), 2);
    if (group->rank() == 1 && in_backward) loss.register_hook(stay);
    if (group->rank() == 1 && !in_backward) stay(loss);
    engine.backward(loss);
    engine.step();
  };
  const auto watched = [&](const std::shared_ptr<comm::Group>& group) {
    try {
      body(group);
    } catch (const std::exception& error) {
      if (group->rank() == 0) {
        said = error.what();
        gave_up.count_down();
      }
      throw;
    }
  };
  EXPECT_THROW(comm::run_as_threads(ranks, watched, {.timeout = std::chrono::seconds(2)}),
               CommError);
  return said;
}

TEST(ShownOperators, ARankThatStaysAwayIsToldWithItsOperator) {
  for (const int stage : {0, 2, 3}) {
    EXPECT_THAT(said_of_a_rank_that_stays(config(stage), false),
                AllOf(HasSubstr("rank 1 (pid"), HasSubstr("has not arrived"),
                      HasSubstr("s ago, is aten::erfinv")))
        << "stage " << stage;
    EXPECT_THAT(said_of_a_rank_that_stays(config(stage), true),
                AllOf(HasSubstr("rank 1 (pid"), HasSubstr("has not arrived"),
                      HasSubstr("s ago, is aten::erfinv in backward"), HasSubstr("unit ")))
        << "stage " << stage;
  }
}

TEST(ShownOperators, AlsoWhereTheGroupHasParts) {
  auto c = config(3);
  c.mics_shard_size = 2;
  EXPECT_THAT(said_of_a_rank_that_stays(c, true, 4),
              AllOf(HasSubstr("rank 1 (pid"), HasSubstr("is aten::erfinv in backward")));
}

TEST(ShownOperators, NotThoseOfAForkedChild) {
  const auto group = comm::single();
  const ShownOperators shown(*group);
  (void)at::zeros({2}).erfinv();
  const auto child = fork();
  if (child == 0) {
    (void)at::zeros({2}).exp();
    _exit(group->activity()->text().find("aten::erfinv") == std::string::npos ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ShownOperators, AreThoseOfTheThreadWhileItIsWatched) {
  const auto group = comm::single();
  {
    const ShownOperators one(*group);
    const ShownOperators two(*group);
    (void)at::zeros({2}).erfinv();
    EXPECT_THAT(group->activity()->text(), HasSubstr("aten::erfinv"));
    std::thread([] { (void)at::ones({2}).exp(); }).join();
    EXPECT_THAT(group->activity()->text(), HasSubstr("aten::erfinv"));
  }
  (void)at::ones({2}).exp();
  EXPECT_THAT(group->activity()->text(), HasSubstr("aten::erfinv"));
  EXPECT_FALSE(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value());
}

TEST(ShownOperators, AnEngineThatEndsOnAnotherThreadShowsNothingMore) {
  auto shown = std::make_unique<ShownOperators>(*comm::single());
  std::thread([&] { shown.reset(); }).join();
  (void)at::ones({2}).exp();  // what it was shown in is gone
  const auto group = comm::single();
  const ShownOperators other(*group);
  (void)at::zeros({2}).erfinv();
  EXPECT_THAT(group->activity()->text(), HasSubstr("aten::erfinv"));
}

}  // namespace
}  // namespace zero
