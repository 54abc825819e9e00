// Schedules against DeepSpeed's own, update by update and bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "zero/config/settings.h"

namespace zero {
namespace {

using Json = nlohmann::json;

Json case_of(const char* type, const Json& params, int64_t steps, double lr = 3e-4) {
  return {{"type", type}, {"params", params}, {"lr", lr}, {"steps", steps}};
}

Json cases() {
  Json all = Json::array();
  for (const char* growth : {"log", "linear"}) {
    for (const int64_t warmup : {1, 2, 7, 40}) {
      all.push_back(case_of("WarmupLR",
                            {{"warmup_min_lr", 1e-5},
                             {"warmup_max_lr", 2e-3},
                             {"warmup_num_steps", warmup},
                             {"warmup_type", growth}},
                            60));
      all.push_back(case_of("WarmupDecayLR",
                            {{"total_num_steps", 50},
                             {"warmup_min_lr", 1e-5},
                             {"warmup_num_steps", warmup},
                             {"warmup_type", growth}},
                            70));
      all.push_back(case_of("WarmupCosineLR",
                            {{"total_num_steps", 50},
                             {"warmup_min_ratio", 0.1},
                             {"cos_min_ratio", 0.03},
                             {"warmup_num_steps", warmup},
                             {"warmup_type", growth}},
                            70));
    }
  }
  all.push_back(case_of("WarmupLR", Json::object(), 1100));
  all.push_back(case_of("WarmupDecayLR", {{"total_num_steps", 30}, {"warmup_num_steps", 40}}, 60));
  all.push_back(case_of("WarmupCosineLR", {{"total_num_steps", 30}, {"warmup_num_steps", 40}}, 60));
  const Json cycle{{"cycle_min_lr", 1e-4}, {"cycle_max_lr", 1e-3}, {"cycle_first_step_size", 10}};
  const auto with = [&](const Json& more) {
    auto params = cycle;
    params.update(more);
    return case_of("OneCycle", params, 60);
  };
  all.push_back(with(Json::object()));
  all.push_back(with({{"cycle_second_step_size", 17}}));
  all.push_back(with({{"cycle_second_step_size", 0}}));
  all.push_back(with({{"cycle_second_step_size", 17}, {"cycle_first_stair_count", 3}}));
  all.push_back(with({{"cycle_first_stair_count", 5}, {"cycle_second_stair_count", 0}}));
  all.push_back(with({{"decay_step_size", 4}, {"decay_lr_rate", 0.5}, {"decay_mom_rate", 0.01}}));
  all.push_back(with({{"decay_step_size", 4}, {"decay_lr_rate", 0.5}, {"cycle_momentum", false}}));
  all.push_back(with({{"cycle_min_mom", 0.6}, {"cycle_max_mom", 0.95}}));
  for (const bool staircase : {false, true}) {
    all.push_back(case_of("LRRangeTest",
                          {{"lr_range_test_min_lr", 1e-5},
                           {"lr_range_test_step_size", 7},
                           {"lr_range_test_step_rate", 1.5},
                           {"lr_range_test_staircase", staircase}},
                          40));
  }
  return all;
}

TEST(Schedule, IsDeepSpeedsOwnBitForBit) {
  const TemporaryFolder folder;
  const auto file = folder.write("cases.json", cases().dump());
  const auto peer = test::run({PEER_PYTHON, PEER_SCRIPT, file}, {{"CUDA_VISIBLE_DEVICES", ""}});
  ASSERT_EQ(peer.status, 0) << peer.err;
  std::vector<optim::Schedule> schedules;
  for (const auto& given : cases()) {
    const Json configuration{{"scheduler", {{"type", given["type"]}, {"params", given["params"]}}}};
    schedules.push_back(optim::complete(*Settings::parse(configuration.dump(), 1).scheduler,
                                        {.lr = given["lr"], .steps = given["steps"]}));
  }
  int64_t compared = 0;
  std::istringstream lines(peer.out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    size_t number = 0;
    int64_t update = 0;
    double rate = 0, beta1 = 0, beta2 = 0;
    if (!(words >> number >> update >> rate >> beta1 >> beta2)) continue;  // a message of its own
    ASSERT_LT(number, schedules.size());
    const auto betas = optim::betas(schedules[number], update).value_or(optim::Betas{});
    EXPECT_EQ(optim::rate(schedules[number], update), rate) << line;
    EXPECT_EQ(betas.beta1, beta1) << line;
    EXPECT_EQ(betas.beta2, beta2) << line;
    ++compared;
  }
  EXPECT_GT(compared, 2500);
}

}  // namespace
}  // namespace zero
