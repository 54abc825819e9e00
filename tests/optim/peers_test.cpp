// 20 steps of PyTorch's, transformers' and DeepSpeed's own optimizers, run by a Python that has
// them: that of ZERO_TEST_TORCH, or of an environment beside the caches. Without one, or without
// some of them, the tests are skipped, and say why.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "zero/optim/factors.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {
namespace {

std::string python() {
  std::vector<std::string> places;
  if (const char* given = std::getenv("ZERO_TEST_TORCH")) places.emplace_back(given);
  if (const char* home = std::getenv("HOME")) {
    for (const auto* each : {"peers", "hosts/torch"})
      places.push_back(std::string(home) + "/.cache/libzero/" + each + "/bin/python");
  }
  for (const auto& place : places) {
    if (std::filesystem::exists(place)) return place;
  }
  return "";
}

struct Peers {
  std::map<std::string, std::vector<double>> weights;
  std::map<std::string, std::string> absent;  // why
};

Peers run_peers(const std::string& python, const std::string& whose) {
  const auto outcome =
      test::Program({python, std::string(ZERO_SOURCE) + "/tests/optim/peers.py", whose})
          .wait(std::chrono::seconds(900));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  Peers peers;
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name == "absent") {
      words >> name;
      peers.absent[name.substr(0, name.find(':'))] = line;
      continue;
    }
    for (double value = 0; words >> value;) peers.weights[name].push_back(value);
  }
  return peers;
}

// The weights are those of peers.py: 25 x 16.
std::vector<double> weights_of(const Optimizer& optimizer) {
  const auto index = torch::arange(400, torch::kDouble);
  auto master = (index * 0.7 + 1).sin().to(torch::kFloat);
  std::vector<torch::Tensor> states;
  const auto rows = torch::zeros({25}), columns = torch::zeros({16});
  for (size_t s = 0; s < state_names(optimizer).size(); ++s) states.push_back(torch::zeros({400}));
  for (int64_t step = 1; step <= 20; ++step) {
    const auto phase = 1.3 * static_cast<double>(step);
    const auto gradient = ((index.square() * 0.013 + phase).cos() * 0.5).to(torch::kFloat);
    Operands operands{.numel = 400,
                      .master = master.mutable_data_ptr<float>(),
                      .gradient = gradient.const_data_ptr<float>()};
    for (size_t s = 0; s < states.size(); ++s)
      operands.state[s] = states[s].mutable_data_ptr<float>();
    if (const auto* muon = std::get_if<Muon>(&optimizer)) {
      const auto direction = torch::zeros({25, 16});
      Findings findings{.direction = direction.mutable_data_ptr<float>()};
      first_sweep(optimizer, step, 1, operands, findings);
      orthogonalise(direction, muon->ns_steps);
      operands.gradient = direction.const_data_ptr<float>();
      second_sweep(optimizer, step, muon->lr, ratio(25, 16), operands);
    } else if (const auto* adafactor = std::get_if<Adafactor>(&optimizer);
               adafactor && adafactor->factored) {
      const auto direction = torch::zeros({25, 16});
      Findings findings{.direction = direction.mutable_data_ptr<float>()};
      first_sweep(optimizer, step, 1, operands, findings);
      factored_directions(*adafactor, step, Factors({25, 16}, {16, 1}), findings.direction,
                          rows.mutable_data_ptr<float>(), columns.mutable_data_ptr<float>(),
                          findings.norms.update);
      operands.gradient = findings.direction;
      second_sweep(optimizer, step, adafactor->lr, ratio(optimizer, findings.norms, 400), operands);
    } else {
      update(optimizer, step, lr(optimizer), 1, operands);
    }
  }
  const auto* values = master.const_data_ptr<float>();
  return {values, values + 400};
}

struct Pair {
  std::string name;
  Optimizer ours;
  double tolerance;
};

// Skips, saying why, what that Python does not have; whatever else is missing is a failure.
void compare(const std::string& whose, const std::vector<Pair>& pairs) {
  const auto found = python();
  if (found.empty()) {
    GTEST_SKIP() << "there is no Python with torch: set ZERO_TEST_TORCH to one to compare with "
                 << whose << "'s optimizers";
  }
  const auto peers = run_peers(found, whose);
  std::string left_out;
  for (const auto& [name, why] : peers.absent) left_out += why + "\n";
  if (peers.weights.empty() && !left_out.empty()) GTEST_SKIP() << left_out;
  for (const auto& [name, ours, tolerance] : pairs) {
    if (peers.absent.contains(name)) continue;
    const auto theirs = peers.weights.find(name);
    ASSERT_NE(theirs, peers.weights.end()) << name;
    const auto mine = weights_of(ours);
    ASSERT_EQ(mine.size(), theirs->second.size());
    double most = 0;
    for (size_t i = 0; i < mine.size(); ++i)
      most = std::max(most, std::abs(mine[i] - theirs->second[i]));
    std::printf("%s: the largest difference is %.2e\n", name.c_str(), most);
    EXPECT_LE(most, tolerance) << name;
  }
  if (!left_out.empty()) GTEST_SKIP() << left_out;
}

constexpr AdamW kAdamW{.lr = 1e-2, .weight_decay = 0.1};

TEST(Peers, TwentyStepsEndAtTheWeightsOfPyTorchs) {
  auto l2 = kAdamW;
  l2.decoupled = false;
  // Muon's products are of bf16 there.
  compare("torch",
          {{"Adam", l2, 2e-6},
           {"AdamW", kAdamW, 2e-6},
           {"SGD", Sgd{.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}, 2e-6},
           {"Adagrad", Adagrad{.lr = 1e-2, .lr_decay = 0.01, .weight_decay = 0.1}, 2e-6},
           {"Adafactor", Adafactor{.lr = 1e-1, .weight_decay = 0.1}, 2e-6},
           {"AdafactorVector", Adafactor{.lr = 1e-1, .weight_decay = 0.1, .factored = false}, 2e-6},
           {"AdafactorValues",
            Adafactor{.lr = 1e-2, .beta2_decay = -0.6, .eps1 = 0.05, .eps2 = 0.5, .d = 1.05}, 2e-6},
           {"Muon", Muon{.lr = 1e-2, .weight_decay = 0.1}, 3e-3}});
}

TEST(Peers, TwentyStepsEndAtTheWeightsOfTransformers) {
  const Adafactor added{.eps_added = true};
  auto vector = added;
  vector.factored = false;
  compare("transformers",
          {{"Adafactor", added, 2e-6},
           {"AdafactorVector", vector, 2e-6},
           {"AdafactorWarmup",
            Adafactor{.beta2_decay = -0.6, .d = 0.7, .warmup_init = true, .eps_added = true}, 2e-6},
           {"AdafactorRate",
            Adafactor{.lr = 1e-2,
                      .eps1 = 1e-6,
                      .scale_parameter = false,
                      .relative_step = false,
                      .eps_added = true},
            2e-6}});
}

TEST(Peers, TwentyStepsEndAtTheWeightsOfDeepSpeeds) {
  compare("deepspeed",
          {{"DeepSpeedCPUAdam", kAdamW, 2e-6},
           {"DeepSpeedCPUAdagrad", Adagrad{.lr = 1e-2, .weight_decay = 0.1}, 2e-6},
           {"DeepSpeedCPULion", Lion{.lr = 1e-2, .beta2 = 0.99, .weight_decay = 0.1}, 2e-6}});
}

}  // namespace
}  // namespace zero::optim
