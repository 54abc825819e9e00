// Holds a profiler's counts against numbers by hand.
#include "zero/engine/flops_profiler.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <string>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/flops_report.h"
#include "zero/models/gpt2/gpt2.h"

namespace zero {
namespace {

using testing::HasSubstr;
namespace nn = torch::nn;

const ModuleFlops* find(const ModuleFlops& module, const std::string& name) {
  if (module.name == name) return &module;
  for (const auto& child : module.children) {
    if (const auto* found = find(child, name)) return found;
  }
  return nullptr;
}

// Its numbers; times are of no test.
struct Numbers {
  int64_t parameters = 0, macs = 0, flops = 0;
  bool operator==(const Numbers&) const = default;
};
void PrintTo(const Numbers& n, std::ostream* out) {
  *out << n.parameters << " parameters, " << n.macs << " MACs, " << n.flops << " FLOPs";
}
Numbers of(const FlopsCount& count) { return {count.parameters, count.macs, count.flops}; }
Numbers total(const ModuleFlops& model, const std::string& name) {
  const auto* found = find(model, name);
  return found != nullptr ? of(found->total) : Numbers{-1, -1, -1};
}
Numbers own(const ModuleFlops& model, const std::string& name) {
  const auto* found = find(model, name);
  return found != nullptr ? of(found->own) : Numbers{-1, -1, -1};
}

void expect_sums(const ModuleFlops& module) {
  auto sum = module.own;
  for (const auto& child : module.children) {
    sum += child.total;
    expect_sums(child);
  }
  EXPECT_EQ(of(sum), of(module.total)) << module.name;
  EXPECT_DOUBLE_EQ(sum.ms, module.total.ms) << module.name;
}

void expect_same(const ModuleFlops& a, const ModuleFlops& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(of(a.own), of(b.own)) << a.name;
  ASSERT_EQ(a.children.size(), b.children.size()) << a.name;
  for (size_t i = 0; i < a.children.size(); ++i) expect_same(a.children[i], b.children[i]);
}

template <class Model, class Pass>
ModuleFlops profile(const Model& model, const Pass& pass) {
  FlopsProfiler profiler(model);
  pass();
  profiler.stop();
  auto result = profiler.profile();
  expect_sums(result);
  return result;
}

TEST(FlopsProfiler, InstallsNoCallbackOutsideOfItsScope) {
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  nn::Linear model(2, 2);
  {
    FlopsProfiler profiler(model);
    EXPECT_TRUE(at::hasThreadLocalCallbacks());
    EXPECT_THAT(message_of<Error>([&] { const FlopsProfiler second(model); }),
                HasSubstr("second zero::FlopsProfiler"));
    profiler.stop();
    EXPECT_FALSE(at::hasThreadLocalCallbacks());
    const FlopsProfiler next(model);
    EXPECT_TRUE(at::hasThreadLocalCallbacks());
  }
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_FALSE(at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value());
}

TEST(FlopsProfiler, CountsLinearLayersAndGivesWhatIsBetweenToTheLayerBefore) {
  nn::Sequential model(nn::Linear(5, 7), nn::ReLU(), nn::Linear(7, 3));
  for (const bool flat : {true, false}) {  // one matrix, or a batch of them
    const auto x = flat ? torch::rand({8, 5}) : torch::rand({2, 4, 5});
    const auto result = profile(model, [&] { model->forward(x).pow(2).mean().backward(); });
    EXPECT_EQ(total(result, "0"), (Numbers{42, 8 * 35, 2 * 8 * 35 + 8 * 7 + 8 * 7}))
        << "product, bias, ReLU";
    EXPECT_EQ(total(result, "2"), (Numbers{24, 8 * 21, 2 * 8 * 21 + 8 * 3}));
    EXPECT_EQ(own(result, ""), (Numbers{0, 0, 8 * 3 + 1})) << "the square, and a mean";
    EXPECT_EQ(total(result, ""), (Numbers{66, 8 * 56, 16 * 56 + 8 * (7 + 7 + 3 + 3) + 1}));
    EXPECT_EQ(find(result, "1"), nullptr) << "it has no parameter";
    EXPECT_GT(result.total.ms, 0);
  }
}

TEST(FlopsProfiler, CountsEachPassAndNothingInBackward) {
  nn::Linear model(5, 7);
  const auto x = torch::rand({8, 5});
  const auto one = profile(model, [&] { model->forward(x).sum().backward(); });
  const auto two = profile(model, [&] {
    for (int pass = 0; pass < 2; ++pass) model->forward(x).sum().backward();
  });
  EXPECT_EQ(two.total.macs, 2 * one.total.macs);
  EXPECT_EQ(two.total.flops, 2 * one.total.flops);
  EXPECT_EQ(two.total.parameters, one.total.parameters);
}

TEST(FlopsProfiler, CountsConvolutions) {
  struct Net : nn::Module {
    nn::Conv2d plain{
        register_module("plain", nn::Conv2d(nn::Conv2dOptions(4, 6, 3).stride(2).padding(1)))};
    nn::BatchNorm2d norm{register_module("norm", nn::BatchNorm2d(6))};
    nn::Conv2d grouped{register_module(
        "grouped", nn::Conv2d(nn::Conv2dOptions(6, 4, {1, 3}).groups(2).bias(false)))};
    nn::ConvTranspose2d back{register_module(
        "back", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 2, 2).stride(2)))};
  };
  const auto model = std::make_shared<Net>();
  const auto result = profile(model, [&] {
    auto x = model->norm(model->plain(torch::rand({2, 4, 9, 12})));  // (2, 6, 5, 6)
    x = model->back(model->grouped(x));                              // (2, 4, 5, 4), (2, 2, 10, 8)
    torch::max_pool2d(x, 2).sum().backward();
  });
  constexpr int64_t kPlain = 2 * 6 * 5 * 6, kGrouped = 2 * 4 * 5 * 4, kBack = 2 * 2 * 10 * 8;
  EXPECT_EQ(total(result, "plain"),
            (Numbers{6 * 4 * 9 + 6, kPlain * 4 * 9, 2 * kPlain * 4 * 9 + kPlain}));
  EXPECT_EQ(total(result, "norm"), (Numbers{12, 0, 5 * kPlain}));
  EXPECT_EQ(total(result, "grouped"), (Numbers{4 * 3 * 3, kGrouped * 3 * 3, 2 * kGrouped * 3 * 3}));
  EXPECT_EQ(total(result, "back"),
            (Numbers{4 * 2 * 4 + 2, kGrouped * 2 * 4, 2 * kGrouped * 2 * 4 + kBack}));
  EXPECT_EQ(own(result, ""), (Numbers{0, 0, kBack})) << "the pooling";
}

TEST(FlopsProfiler, CountsTheMatricesOfAnLstmOnceForEachToken) {
  nn::LSTM model(nn::LSTMOptions(5, 6).num_layers(2).bidirectional(true));
  constexpr int64_t kTokens = 7 * 3;
  constexpr int64_t kWeights = 2 * (4 * 6 * 5 + 4 * 6 * 6) + 2 * (4 * 6 * 12 + 4 * 6 * 6);
  constexpr int64_t kBiases = 4 * 2 * 4 * 6;
  const Numbers expected{kWeights + kBiases, kTokens * kWeights, 2 * kTokens * kWeights};
  const auto x = torch::rand({7, 3, 5});
  EXPECT_EQ(total(profile(model, [&] { std::get<0>(model->forward(x)).sum().backward(); }), ""),
            expected);
  EXPECT_EQ(total(profile(model,
                          [&] {
                            const torch::NoGradGuard no_grad;
                            model->forward(x);
                          }),
                  ""),
            expected);
}

// --- GPT-2 ---

constexpr int64_t kB = 2, kT = 16, kC = 32, kLayers = 3, kV = 96;

Gpt2Config sizes() {
  Gpt2Config config{.vocab_size = kV, .context = 20, .width = kC, .layers = kLayers, .heads = 4};
  return config.set_dropout(0.1);
}

at::Tensor tokens(int64_t first) {
  return (torch::arange(kB * kT) + first).remainder(kV).view({kB, kT});
}

ModuleFlops profile_gpt2(Gpt2& model, const std::function<at::Tensor()>& loss) {
  return profile(model, [&] { loss().backward(); });
}

// The counts that the head of zero/engine/operator_cost.h and a layer's operators make of it.
void expect_formula(const ModuleFlops& model) {
  constexpr int64_t kRows = kB * kT;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const auto name = "h." + std::to_string(layer);
    // Per token: four biases (3 + 1 + 4 + 1) C, two norms of 5 C, GELU 4 C, two sums of C.
    EXPECT_EQ(total(model, name),
              (Numbers{12 * kC * kC + 13 * kC, 12 * kRows * kC * kC + 2 * kB * kT * kT * kC,
                       24 * kRows * kC * kC + 4 * kB * kT * kT * kC + 25 * kRows * kC}));
    EXPECT_EQ(own(model, name + ".attn"),
              (Numbers{0, 2 * kB * kT * kT * kC, 4 * kB * kT * kT * kC}))
        << "causal, and counted whole";
    EXPECT_EQ(own(model, name + ".mlp"), (Numbers{0, 0, 4 * kRows * kC})) << "GELU";
    EXPECT_EQ(own(model, name), (Numbers{0, 0, 2 * kRows * kC})) << "both sums";
    EXPECT_EQ(total(model, name + ".ln_1"), (Numbers{2 * kC, 0, 5 * kRows * kC}));
    EXPECT_EQ(total(model, name + ".mlp.c_fc"), (Numbers{4 * kC * kC + 4 * kC, 4 * kRows * kC * kC,
                                                         8 * kRows * kC * kC + 4 * kRows * kC}));
  }
  EXPECT_EQ(own(model, "h"), Numbers{});
  EXPECT_EQ(total(model, "ln_f"), (Numbers{2 * kC, 0, 5 * kRows * kC}));
  EXPECT_EQ(total(model, "wpe"), (Numbers{20 * kC, 0, kRows * kC})) << "the sum of embeddings";
  EXPECT_EQ(total(model, "wte"), (Numbers{kV * kC, kRows * kC * kV, 2 * kRows * kC * kV}))
      << "the logits, without their gradients";
  // Softmax, two factors for each row, and four single numbers.
  EXPECT_EQ(own(model, ""), (Numbers{0, 0, kRows * kV + 2 * kRows + 3}));
  EXPECT_EQ(total(model, "").macs, kRows * (kLayers * (12 * kC * kC + 2 * kT * kC) + kC * kV));
}

TEST(FlopsProfiler, OfGpt2EqualsTheFormula) {
  Gpt2 model(sizes());
  const auto loss = [&] { return model->loss(tokens(0), tokens(1)); };
  const auto result = profile_gpt2(model, loss);
  expect_formula(result);
  EXPECT_EQ(result.total.parameters, sizes().parameter_count());
  {
    SCOPED_TRACE("recomputed");
    model->recompute({.every = 1});
    expect_formula(profile_gpt2(model, loss));
    model->recompute({.every = 0});
  }
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {  // fp16 by copies of the weights
    SCOPED_TRACE(c10::toString(dtype));
    model->to(dtype);
    expect_formula(profile_gpt2(model, loss));
  }
}

TEST(FlopsProfiler, CopiesOfParametersCountAsThose) {
  nn::Sequential model(nn::Linear(5, 7), nn::Linear(7, 3));
  const auto x = torch::rand({8, 5});
  const auto plain = profile(model, [&] { model->forward(x).sum().backward(); });
  const auto casts = profile(model, [&] {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto y = model->forward(x);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    y.sum().backward();
  });
  expect_same(plain, casts);
  const auto by_hand = profile(model, [&] {
    auto y = x;
    for (size_t i = 0; i < 2; ++i) {
      const auto layer = model->ptr<nn::LinearImpl>(i);
      const auto weight = layer->weight.to(at::kDouble);
      y = torch::addmm(layer->bias.to(at::kDouble), y.to(at::kDouble), weight.t());
    }
    y.sum().backward();
  });
  expect_same(plain, by_hand);
}

TEST(FlopsProfiler, CountsTheSameAtEachStage) {
  Gpt2 alone(sizes());
  const auto expected = profile_gpt2(alone, [&] { return alone->loss(tokens(0), tokens(1)); });
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    comm::run_as_threads(2, [&](auto group) {
      Gpt2 model(sizes());
      Engine engine(
          model,
          {.stage = stage, .unit_bytes = 4096, .max_live_parameters = 0, .optimizer = AdamW{}},
          group);
      for (int step = 0; step < 2; ++step) {
        FlopsProfiler profiler(model);
        engine.backward(model->loss(tokens(0), tokens(1)));
        profiler.stop();
        engine.step();
        const auto result = profiler.profile();
        expect_same(result, expected);
        expect_sums(result);
      }
    });
  }
}

// --- The report ---

FlopsCount count(int64_t parameters, int64_t macs, double ms) {
  return {.parameters = parameters, .macs = macs, .flops = 2 * macs, .ms = ms};
}

StepFlops made_up() {
  ModuleFlops model{.name = ""};
  ModuleFlops list{.name = "h"};
  for (const char* name : {"h.0", "h.1"})
    list.children.push_back({.name = name, .own = count(100, 400, 1), .total = count(100, 400, 1)});
  list.total = count(200, 800, 2);
  model.children = {list, {.name = "head", .own = count(50, 200, 2), .total = count(50, 200, 2)}};
  model.total = count(250, 1000, 4);
  return {.step = 2, .ranks = 2, .step_ms = 10, .tokens_per_s = 300, .peak = 1e6, .model = model};
}

TEST(FlopsReport, SetsTheStepBesideTheMachine) {
  auto step = made_up();
  EXPECT_EQ(step.flops(), 3 * 2000);
  EXPECT_DOUBLE_EQ(step.mfu(), 3 * 2000 / (1e6 * 0.010));
  step.recompute_factor = 0.5;
  EXPECT_EQ(step.flops(), 3.5 * 2000);
  EXPECT_DOUBLE_EQ(step.mfu(), 3 * 2000 / (1e6 * 0.010)) << "what is done twice is no use";
  const auto text = flops_report(step);
  for (const char* part :
       {"FLOPs of step 2, of rank 0 of 2", "1 K MACs, 2 K FLOPs, 4.0 ms in operators: 500 KFLOP/s",
        "5 K FLOPs: 2.5 x forward", "7 K FLOPs, 10.0 ms: 700 KFLOP/s, 300 tokens/s of all ranks",
        "1 MFLOP/s at best", "60.0 %"})
    EXPECT_THAT(text, HasSubstr(part));
  step.peak = 0;
  EXPECT_THAT(flops_report(step), testing::Not(HasSubstr("MFU")));
}

TEST(FlopsReport, HasTheLargestModulesOfEachDepthAndATable) {
  const auto kinds = kinds_by_depth(made_up().model);
  ASSERT_EQ(kinds.size(), 3u);
  ASSERT_EQ(kinds[2].size(), 1u);
  EXPECT_EQ(kinds[2][0].name, "h.*");
  EXPECT_EQ(kinds[2][0].modules, 2);
  EXPECT_EQ(kinds[2][0].total.macs, 800);
  const auto text = flops_report(made_up());
  EXPECT_THAT(text, HasSubstr("h.* (2 modules) 800 (80.0 %)"));
  EXPECT_THAT(text, HasSubstr("MACs        h 800 (80.0 %)\n")) << "the largest alone";
  EXPECT_THAT(text, HasSubstr("\n  head    "));
  EXPECT_THAT(text, HasSubstr("\n    1    "));
  EXPECT_THAT(flops_report(made_up(), {.top_modules = 2}),
              HasSubstr("h 800 (80.0 %), head 200 (20.0 %)"));
  const auto flat = flops_report(made_up(), {.module_depth = 1});
  EXPECT_THAT(flat, testing::Not(HasSubstr("h.*")));
  EXPECT_THAT(flat, testing::Not(HasSubstr("\n    1    ")));
  EXPECT_THAT(flops_report(made_up(), {.detailed = false}), testing::Not(HasSubstr("\n  head")));
}

}  // namespace
}  // namespace zero
