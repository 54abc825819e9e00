// The generator of the user's program.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <memory>

#include "tests/engine/net.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

uint64_t seed_after_an_engine_of_two_ranks(bool seed_by_rank) {
  torch::manual_seed(40);
  comm::run_as_threads(2, [&](auto group) {
    const Engine engine(std::make_shared<Net>(), AdamW{},
                        Config{.stage = 2, .seed_by_rank = seed_by_rank}, group);
  });
  return at::globalContext().defaultGenerator(at::kCPU).current_seed();
}

// Ranks as threads have one generator, which rank 1 would move on.
TEST(EngineSeed, AnEngineLeavesTheGeneratorAloneUnlessAsked) {
  EXPECT_EQ(seed_after_an_engine_of_two_ranks(false), 40u);
  EXPECT_EQ(seed_after_an_engine_of_two_ranks(true), 41u);
}

}  // namespace
}  // namespace zero
