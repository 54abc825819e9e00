// Parameters that ranks should hold the same of.
#include "zero/engine/replicas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/engine/net.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::ElementsAre;

/// Turns the lowest bit of an element over, as faulty memory would: no tensor knows of it.
void flip(const at::Tensor& tensor, int64_t element) {
  static_cast<uint8_t*>(tensor.mutable_data_ptr())[element * tensor.element_size()] ^= 1;
}

TEST(Replicas, AFlippedBitIsNamedByParameterAndRank) {
  for (int stage = 0; stage <= 2; ++stage) {
    for (const bool bf16 : {false, true}) {
      run_as_threads(3, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-3}, config(stage, bf16), group);
        train(engine, *net, 2);
        EXPECT_TRUE(engine.diverged_parameters().empty());
        const auto names = engine.parameter_names();
        const auto parameters = net->named_parameters();
        if (group->rank() == 1) flip(parameters[names.front()], 0);
        if (group->rank() == 2) flip(parameters[names.back()], 0);
        const auto found = engine.diverged_parameters();
        ASSERT_EQ(found.size(), 2);
        EXPECT_EQ(found[0].parameter, names.front());
        EXPECT_THAT(found[0].ranks, ElementsAre(1));
        EXPECT_EQ(found[1].parameter, names.back());
        EXPECT_THAT(found[1].ranks, ElementsAre(2));
        EXPECT_EQ(text_of(found), names.front() + " on rank 1; " + names.back() + " on rank 2");
      });
    }
  }
}

TEST(Replicas, OfTwoRanksTheSecondIsNamed) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(0), group);
    if (group->rank() == 0) flip(net->parameters()[0], 0);
    const auto found = engine.diverged_parameters();
    ASSERT_EQ(found.size(), 1);
    EXPECT_THAT(found[0].ranks, ElementsAre(1));
  });
}

// Blocks of two: ranks 0 and 2 hold the same slices, and so do 1 and 3.
TEST(Replicas, SlicesAreComparedWhereBlocksHoldTheSame) {
  auto c = config(3);
  c.mics_shard_size = 2;
  run_as_threads(4, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-3}, c, group);
    train(engine, *net, 2);
    EXPECT_TRUE(engine.diverged_parameters().empty());
  });
}

TEST(Replicas, WhereNothingIsHeldTwiceNothingIsExchanged) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-3}, config(3), group);
    train(engine, *net, 2);
    const auto waited = group->wait_ms();
    EXPECT_TRUE(engine.diverged_parameters().empty());
    EXPECT_EQ(group->wait_ms(), waited);
  });
}

}  // namespace
}  // namespace zero
