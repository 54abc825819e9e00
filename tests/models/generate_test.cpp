#include "zero/models/language/generate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "zero/base/error.h"
#include "zero/models/architectures.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/layers/key_value_cache.h"

namespace zero {
namespace {

const std::vector<int64_t> kPrompt{3};

// The same logits whatever the tokens.
LastLogits constant(std::vector<float> logits) {
  return [tensor = at::tensor(logits).unsqueeze(0)](const at::Tensor&) { return tensor; };
}

// How often each token comes.
std::vector<double> frequencies(const std::vector<int64_t>& tokens, size_t vocabulary) {
  std::vector<double> share(vocabulary);
  for (const int64_t token : tokens)
    share.at(static_cast<size_t>(token)) += 1.0 / static_cast<double>(tokens.size());
  return share;
}

TEST(Generate, TemperatureZeroTakesTheLikeliestToken) {
  // The token after t is t + 1.
  const LastLogits next = [](const at::Tensor& tokens) {
    auto logits = at::zeros({1, 10});
    logits[0][(tokens[0][-1].item<int64_t>() + 1) % 10] = 1;
    return logits;
  };
  EXPECT_EQ(generate(kPrompt, next, {.tokens = 8, .temperature = 0}),
            (std::vector<int64_t>{4, 5, 6, 7, 8, 9, 0, 1}));
  EXPECT_TRUE(generate(kPrompt, next, {.tokens = 0}).empty());
}

TEST(Generate, DrawsFromTheSoftmaxAtTheTemperature) {
  for (const double temperature : {0.5, 1.0, 2.0}) {
    const auto share = frequencies(
        generate(kPrompt, constant({0, 1, 2}), {.tokens = 4000, .temperature = temperature}), 3);
    double sum = 0;
    for (int i = 0; i < 3; ++i) sum += std::exp(i / temperature);
    for (int i = 0; i < 3; ++i) {
      const double p = std::exp(i / temperature) / sum;
      EXPECT_NEAR(share[i], p, 4 * std::sqrt(p * (1 - p) / 4000)) << temperature << " " << i;
    }
  }
}

// Logits are in fp32, which holds neither of these temperatures.
TEST(Generate, TakesTemperaturesThatAreNoFp32Numbers) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const auto drawn = [&](double temperature, double top_p = 1) {
    return frequencies(generate(kPrompt, constant({1, 2, kNever, 1.5}),
                                {.tokens = 400, .temperature = temperature, .top_p = top_p}),
                       4);
  };
  for (const double tiny : {1e-30, 1e-39, 1e-50, std::numeric_limits<double>::denorm_min()})
    EXPECT_NEAR(drawn(tiny)[1], 1, 1e-9) << tiny;
  for (const double huge : {1e30, 1e39, std::numeric_limits<double>::max()}) {
    const auto share = drawn(huge);
    EXPECT_EQ(share[2], 0);
    for (const size_t token : {0, 1, 3}) EXPECT_NEAR(share[token], 1.0 / 3, 0.1) << huge;
  }
  EXPECT_NEAR(drawn(1, 1e-50)[1], 1, 1e-9);
}

TEST(Generate, TopPLeavesTheLikeliestThatReachIt) {
  // Probabilities 0.1, 0.4, 0.3, 0.2.
  std::vector<float> logits;
  for (const double p : {0.1, 0.4, 0.3, 0.2}) logits.push_back(static_cast<float>(std::log(p)));
  const auto share = [&](double top_p, int64_t top_k = 0) {
    return frequencies(
        generate(kPrompt, constant(logits), {.tokens = 2000, .top_k = top_k, .top_p = top_p}), 4);
  };
  const auto two = share(0.6);
  EXPECT_NEAR(two[1], 4.0 / 7, 0.05);
  EXPECT_NEAR(two[1] + two[2], 1.0, 1e-9);
  EXPECT_NEAR(share(0.3)[1], 1.0, 1e-9);
  EXPECT_GT(share(0.95)[0], 0.05) << "0.9 is not enough without the last";
  const auto of_three = share(0.5, 3);
  EXPECT_NEAR(of_three[1] + of_three[2], 1.0, 1e-9) << "top_k leaves 4/9 for the first";
}

// Attention adds up in another order with a cache.
TEST(Generate, ACacheOfKeysAndValuesGivesTheSameLogits) {
  const char* mistral = R"({"model_type": "mistral", "vocab_size": 40, "hidden_size": 16,
      "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "max_position_embeddings": 32, "sliding_window": 4})";
  const char* gpt2 = R"({"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2,
      "n_head": 4, "n_positions": 32})";
  const char* gemma = R"({"model_type": "gemma3_text", "vocab_size": 40, "hidden_size": 16,
      "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6,
      "num_key_value_heads": 2, "max_position_embeddings": 32, "sliding_window": 4,
      "sliding_window_pattern": 2})";
  for (const char* json : {mistral, gpt2, gemma}) {
    torch::manual_seed(1);
    const auto model = language_model_config_from_json(json, "here")->build();
    model->module().eval();
    const torch::NoGradGuard no_grad;
    const auto cached = cached_logits(*model);
    const auto text = at::randint(40, {1, 32}, at::kLong);
    for (const int64_t length : {5, 6, 7, 12, 13, 32}) {
      const auto seen = text.narrow(1, 0, length).contiguous();
      EXPECT_TRUE(at::allclose(cached(seen), model->logits_last(seen), 1e-4, 1e-5)) << length;
    }
    const auto other = text.narrow(1, 3, 9).contiguous();
    EXPECT_TRUE(at::allclose(cached(other), model->logits_last(other), 1e-4, 1e-5)) << "a new text";
    KeyValueCache cache;
    model->logits_next(text, cache);
    EXPECT_THROW(model->logits_next(text.narrow(1, 0, 1), cache), ConfigError) << "the context";
  }
}

TEST(Generate, EndsBeforeAStopTokenAndTellsEachToken) {
  const LastLogits next = [](const at::Tensor& tokens) {
    auto logits = at::zeros({1, 10});
    logits[0][tokens[0][-1].item<int64_t>() + 1] = 1;
    return logits;
  };
  std::vector<int64_t> told;
  const auto tokens = generate(
      kPrompt, next,
      {.tokens = 5, .temperature = 0, .stop_tokens = {9, 6}, .on_token = [&](int64_t token) {
         told.push_back(token);
       }});
  EXPECT_EQ(tokens, (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(told, tokens);
}

TEST(Generate, TopKLeavesOnlyTheLikeliest) {
  const auto share =
      frequencies(generate(kPrompt, constant({5, 1, 5, 2, 0}), {.tokens = 500, .top_k = 2}), 5);
  EXPECT_NEAR(share[0], 0.5, 0.1);
  EXPECT_DOUBLE_EQ(share[0] + share[2], 1.0);
  EXPECT_EQ(generate(kPrompt, constant({0, 9, 1}), {.tokens = 3, .top_k = 1}),
            (std::vector<int64_t>{1, 1, 1}));
  EXPECT_EQ(generate(kPrompt, constant({0, 1, 2}), {.tokens = 50, .top_k = 100}),
            generate(kPrompt, constant({0, 1, 2}), {.tokens = 50}));
}

TEST(Generate, TheSeedDecidesAndTheDefaultGeneratorDoesNot) {
  const auto run = [](uint64_t seed) {
    return generate(kPrompt, constant({0, 0, 0, 0}), {.tokens = 40, .seed = seed});
  };
  at::manual_seed(1);
  const auto first = run(7);
  at::manual_seed(2);
  EXPECT_EQ(run(7), first);
  EXPECT_NE(run(8), first);
  at::manual_seed(3);
  const auto expected = at::rand({4});
  at::manual_seed(3);
  run(7);
  EXPECT_TRUE(at::equal(at::rand({4}), expected)) << "dropout's random numbers stay as they were";
}

TEST(Generate, TheModelSeesTheLastTokensOfTheContext) {
  std::vector<std::vector<int64_t>> seen;
  const LastLogits record = [&](const at::Tensor& tokens) {
    EXPECT_FALSE(at::GradMode::is_enabled());
    const auto* values = tokens.const_data_ptr<int64_t>();
    seen.emplace_back(values, values + tokens.numel());
    auto logits = at::zeros({1, 10});
    logits[0][9] = 1;
    return logits;
  };
  generate(std::vector<int64_t>{1, 2}, record, {.tokens = 4, .context = 3, .temperature = 0});
  EXPECT_EQ(seen, (std::vector<std::vector<int64_t>>{{1, 2}, {1, 2, 9}, {2, 9, 9}, {9, 9, 9}}));
}

TEST(Generate, WorksWithAModelInLowPrecision) {
  at::manual_seed(1);
  Gpt2 model(Gpt2Config{.vocab_size = 11, .context = 6, .width = 8, .layers = 1, .heads = 2});
  model->to(at::kBFloat16);
  const auto tokens = generate(kPrompt, [&](const at::Tensor& x) { return model->logits_last(x); },
                               {.tokens = 10, .context = 6});
  EXPECT_EQ(tokens.size(), 10U);
}

TEST(Generate, RefusesBrokenModelsAndOptions) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_THROW(generate(kPrompt, constant({0, nan}), {}), Error);
  EXPECT_THROW(generate(kPrompt, constant({0, infinity}), {}), Error);
  EXPECT_EQ(generate(kPrompt, constant({-infinity, 0}), {.tokens = 5}),
            (std::vector<int64_t>(5, 1)))
      << "a forbidden token";
  const auto good = constant({0, 1});
  EXPECT_THROW(generate({}, good, {}), ConfigError);
  EXPECT_THROW(generate(kPrompt, good, {.tokens = -1}), ConfigError);
  EXPECT_THROW(generate(kPrompt, good, {.context = 0}), ConfigError);
  EXPECT_THROW(generate(kPrompt, good, {.temperature = -1}), ConfigError);
  EXPECT_THROW(generate(kPrompt, good, {.temperature = HUGE_VAL}), ConfigError);
  EXPECT_THROW(generate(kPrompt, good, {.top_p = 0}), ConfigError);
  EXPECT_THROW(generate(kPrompt, good, {.top_p = 1.5}), ConfigError);
  EXPECT_THROW(generate(kPrompt, good, {.top_k = -1}), ConfigError);
}

}  // namespace
}  // namespace zero
