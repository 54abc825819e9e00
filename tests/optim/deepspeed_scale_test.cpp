// The loss scale beside DeepSpeed's own class, where that is installed.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "tests/support/temporary_folder.h"
#include "zero/optim/loss_scale.h"

namespace zero {
namespace {

// Reads lines of a rule and its overflows; writes a line of scales for each, which ends where the
// class refuses to go on. The class asks for the rank only to print.
constexpr const char* kScript = R"(
import sys, types
import deepspeed.runtime.fp16.loss_scaler as module
module.dist = types.SimpleNamespace(get_rank=lambda: 1)
for line in open(sys.argv[1]):
    power, window, hysteresis, consecutive, minimum, overflows = line.split()
    scaler = module.DynamicLossScaler(init_scale=2 ** int(power), scale_window=int(window),
                                      min_scale=float(minimum), delayed_shift=int(hysteresis),
                                      consecutive_hysteresis=consecutive == '1')
    scales = []
    for overflow in overflows:
        scales.append(scaler.loss_scale)
        try:
            scaler.update_scale(overflow == '1')
        except Exception:
            scales.append(-1)
            break
    print('scales', *scales)
)";

std::string python_with_deepspeed() {
  const char* named = getenv("ZERO_TEST_DEEPSPEED");
  const char* home = getenv("HOME");
  const std::string python = named != nullptr ? named
                                              : std::string(home != nullptr ? home : "") +
                                                    "/.cache/libzero/peers/bin/python";
  return std::filesystem::exists(python) ? python : "";
}

struct Case {
  LossScaling rule;
  std::vector<bool> overflows;
};

std::vector<Case> cases() {
  std::mt19937 random(11);
  std::vector<Case> all;
  for (const int64_t window : {1, 2, 5, 20}) {
    for (const int64_t hysteresis : {1, 2, 4}) {
      for (const bool consecutive : {false, true}) {
        for (const double minimum : {1.0, 8.0}) {
          for (const double probability : {0.02, 0.1, 0.3}) {
            Case each{{.initial_power = 9,
                       .window = window,
                       .hysteresis = hysteresis,
                       .consecutive_hysteresis = consecutive,
                       .minimum = minimum},
                      {}};
            std::bernoulli_distribution draw(probability);
            for (int i = 0; i < 200; ++i) each.overflows.push_back(draw(random));
            all.push_back(std::move(each));
          }
        }
      }
    }
  }
  return all;
}

TEST(LossScaleBesideDeepSpeed, HasTheSameScalesStepByStep) {
  const auto python = python_with_deepspeed();
  if (python.empty()) {
    GTEST_SKIP()
        << "no DeepSpeed here: benchmarks/peers/setup.sh installs it, or name a Python that "
           "has it in ZERO_TEST_DEEPSPEED";
  }
  const TemporaryFolder folder;
  std::string text;
  for (const auto& [rule, overflows] : cases()) {
    text += fmt::format("{} {} {} {} {} ", rule.initial_power, rule.window, rule.hysteresis,
                        rule.consecutive_hysteresis ? 1 : 0, rule.minimum);
    for (const bool overflow : overflows) text += overflow ? '1' : '0';
    text += '\n';
  }
  const auto input = folder.path() / "cases";
  test::write_file(input, text);
  const auto outcome = test::run({python, "-c", kScript, input.string()});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  std::istringstream lines(outcome.out);
  size_t compared = 0;
  int floors = 0;
  for (const auto& [rule, overflows] : cases()) {
    std::string word;
    std::string line;
    do {
      ASSERT_TRUE(std::getline(lines, line)) << "fewer lines than cases";
    } while (!line.starts_with("scales "));
    std::istringstream theirs(line.substr(7));
    auto unbounded = rule;  // DeepSpeed's goes beyond fp32
    unbounded.maximum = std::numeric_limits<double>::infinity();
    LossScale scale(unbounded);
    for (const bool overflow : overflows) {
      double expected = 0;
      ASSERT_TRUE(theirs >> expected);
      ASSERT_EQ(scale.value(), expected) << "case " << compared;
      if (scale.update(overflow)) continue;
      ASSERT_TRUE(theirs >> expected);
      EXPECT_EQ(expected, -1) << "DeepSpeed ends the run here";
      ++floors;
      break;
    }
    EXPECT_FALSE(theirs >> word) << "DeepSpeed goes on";
    ++compared;
  }
  EXPECT_EQ(compared, cases().size());
  EXPECT_GT(floors, 5);
}

}  // namespace
}  // namespace zero
