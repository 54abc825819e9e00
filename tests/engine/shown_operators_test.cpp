// What the others hear of a rank that does not come.
#include "zero/engine/shown_operators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

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
using testing::Not;

// Rank 1 stays behind an operator until rank 0 has given up; what that one says of it.
std::string said_of_a_rank_that_stays(int stage, bool in_backward) {
  std::string said;
  std::latch gave_up(1);
  const auto stay = [&] { gave_up.wait(); };
  try {
    comm::run_as_threads(2,
                         [&](std::shared_ptr<comm::Group> group) {
                           auto net = std::make_shared<Net>();
                           Engine engine(net, AdamW{.lr = 1e-3}, config(stage), group);
                           train(engine, *net, 2);
                           auto loss = loss_of(*net, group->rank(), 2);
                           const bool late = group->rank() == 1;
                           try {
                             if (late && !in_backward) {
                               (void)(loss.detach() * 2).erfinv();
                               stay();
                             }
                             if (late && in_backward) {
                               loss.register_hook([&](const at::Tensor& gradient) {
                                 (void)gradient.erfinv();
                                 stay();
                               });
                             }
                             engine.backward(loss);
                             engine.step();
                           } catch (const CommError& error) {
                             if (!late) {
                               said = error.what();
                               gave_up.count_down();
                             }
                             throw;
                           }
                         },
                         {.timeout = std::chrono::milliseconds(300)});
  } catch (const CommError&) {
    return said;
  }
  ADD_FAILURE() << "nobody waited";
  return said;
}

TEST(ShownOperators, ARankThatStaysAwayIsToldWithItsOperator) {
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_THAT(said_of_a_rank_that_stays(stage, false),
                AllOf(HasSubstr("rank 1 (pid"), HasSubstr("has not arrived"),
                      HasSubstr("s ago, is aten::erfinv in forward")))
        << "stage " << stage;
    EXPECT_THAT(said_of_a_rank_that_stays(stage, true),
                AllOf(HasSubstr("rank 1 (pid"), HasSubstr("has not arrived"),
                      HasSubstr("s ago, is aten::erfinv in backward"), HasSubstr("unit ")))
        << "stage " << stage;
  }
}

TEST(ShownOperators, AreThoseOfTheThreadWhileItIsWatched) {
  const auto group = comm::single();
  {
    const ShownOperators one(*group);
    const ShownOperators two(*group);
    (void)at::zeros({2}).erfinv();
    EXPECT_THAT(group->activity()->text(), HasSubstr("aten::erfinv in forward"));
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
