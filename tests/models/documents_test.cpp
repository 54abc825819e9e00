// Documents that are packed into rows are computed as if each were alone.
#include "zero/models/layers/documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/models/fixtures.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/attention.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The lengths of the documents of two rows of 16 tokens, with other boundaries.
const std::vector<int64_t> kLengths{5, 1, 7, 3, 4, 12};
constexpr int64_t kSequence = 16;

at::Tensor packed_positions() {
  std::vector<at::Tensor> each;
  for (const auto length : kLengths) each.push_back(at::arange(length, at::kLong));
  return at::cat(each).view({2, kSequence});
}

// Targets of the next token, but none behind the end of a document.
at::Tensor packed_targets(const at::Tensor& tokens) {
  auto targets = tokens.flatten().roll(-1);
  int64_t end = 0;
  for (const auto length : kLengths) targets[(end += length) - 1].fill_(-100);
  return targets.view({2, kSequence});
}

std::unique_ptr<LanguageModel> model_of(const std::string& fixture, int64_t window) {
  auto config = fixtures::config(fixture);
  if (fixture == "mistral" || fixture == "gemma3") config["sliding_window"] = window;
  const auto sizes = language_model_config_from_json(config.dump(), fixture);
  sizes->set_dropout(0);
  at::manual_seed(7);
  auto model = sizes->build();
  const at::NoGradGuard no_grad;
  for (auto& each : model->module().parameters()) {
    if (each.dim() == 2) each.mul_(4);  // attention is not even
  }
  return model;
}

std::map<std::string, at::Tensor> gradients_of(LanguageModel& model) {
  std::map<std::string, at::Tensor> all;
  for (auto& each : model.module().named_parameters()) {
    all[each.key()] = each.value().grad().clone();
    each.value().mutable_grad() = at::Tensor();
  }
  return all;
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

TEST(Documents, BeginWherePositionsDoNotFollow) {
  const auto positions = at::tensor({0, 1, 2, 0, 1, 3, 4, 0, 1, 2}, at::kLong).view({2, 5});
  const auto documents = documents_in(positions, positions);
  EXPECT_THAT(documents.lengths, ElementsAre(3, 2, 2, 3));
  EXPECT_EQ(documents.longest, 3);
  EXPECT_EQ(documents.end, 5);
  EXPECT_THAT(documents_in(at::arange(6).view({2, 3}), at::zeros({2, 3})).lengths,
              ElementsAre(3, 3))
      << "a row begins a document";
  EXPECT_THAT(message_of<ConfigError>([&] { documents_in(positions, positions[0]); }),
              AllOf(HasSubstr("(5)"), HasSubstr("(2, 5)")));
  EXPECT_THAT(message_of<ConfigError>([&] { documents_in(positions.to(at::kInt), positions); }),
              HasSubstr("Int"));
  EXPECT_THAT(message_of<ConfigError>([&] { documents_in(positions - 1, positions); }),
              HasSubstr("-1"));
}

// The plain reference: one mask of (B, T, T), and a softmax.
at::Tensor masked_attention(const at::Tensor& queries, const at::Tensor& keys,
                            const at::Tensor& values, int64_t window, double scale) {
  const int64_t groups = queries.size(2) / keys.size(2);
  const auto k = keys.repeat_interleave(groups, 2).transpose(1, 2);
  const auto v = values.repeat_interleave(groups, 2).transpose(1, 2);
  std::vector<at::Tensor> numbers;
  for (size_t i = 0; i < kLengths.size(); ++i)
    numbers.push_back(at::full({kLengths[i]}, static_cast<int64_t>(i), at::kLong));
  const auto number = at::cat(numbers).view({2, kSequence});
  auto seen = number.unsqueeze(2).eq(number.unsqueeze(1)).tril();
  if (window > 0) seen = seen.triu(1 - window);
  const auto scores = at::matmul(queries.transpose(1, 2), k.transpose(2, 3)) * scale;
  const auto masked =
      scores.masked_fill(seen.logical_not().unsqueeze(1), -std::numeric_limits<double>::infinity());
  return at::matmul(masked.softmax(-1), v).transpose(1, 2).flatten(2);
}

TEST(Documents, AreAttendedToAsThroughAMask) {
  at::manual_seed(3);
  const auto random = [](int64_t heads) {
    return at::randn({2, kSequence, heads, 6}, at::kDouble).requires_grad_();
  };
  const auto queries = random(4);
  const auto keys = random(2);
  const auto values = random(2);
  const auto documents =
      std::make_shared<const Documents>(documents_in(packed_positions(), at::zeros({2, 16})));
  const auto weights = at::randn({2, kSequence, 24}, at::kDouble);
  for (const int64_t window : {0, 3}) {
    std::vector<at::Tensor> results;
    for (const bool fast : {false, true}) {
      const auto y =
          fast ? causal_attention(queries, keys, values,
                                  {.seen = window_mask(documents->longest, window, at::kCPU),
                                   .documents = documents},
                                  0, 0.3)
               : masked_attention(queries, keys, values, window, 0.3);
      (y * weights).sum().backward();
      results.push_back(y);
      for (const auto& each : {queries, keys, values}) {
        results.push_back(each.grad().clone());
        each.mutable_grad() = at::Tensor();
      }
    }
    for (size_t i = 0; i < 4; ++i)
      EXPECT_LT(difference(results[i + 4], results[i]), 1e-13) << window << ' ' << i;
  }
}

TEST(Documents, HaveTheLogitsAndGradientsOfEachAlone) {
  for (const auto& name : {"gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma3"}) {
    SCOPED_TRACE(name);
    const auto model = model_of(name, 4);
    const auto tokens = at::randint(1, 40, {2, kSequence}, at::kLong);
    const auto targets = packed_targets(tokens);
    const auto positions = packed_positions();
    const auto supervised = (targets != -100).sum().item<double>();

    std::vector<at::Tensor> alone, alone_bf16;
    double sum = 0;
    int64_t begin = 0;
    const auto part = [&](const at::Tensor& of, int64_t length) {
      return of.flatten().narrow(0, begin, length).unsqueeze(0);
    };
    for (const auto length : kLengths) {
      alone.push_back(model->logits(part(tokens, length)).squeeze(0));
      if (length > 1) {
        const auto loss = model->loss(part(tokens, length), part(targets, length)) *
                          static_cast<double>(length - 1) / supervised;
        loss.backward();
        sum += loss.item<double>();
      }
      begin += length;
    }
    const auto packed = model->logits(tokens, positions);
    EXPECT_LT(difference(packed.flatten(0, 1), at::cat(alone)), 2e-6);
    EXPECT_GT(difference(packed, model->logits(tokens)), 1e-2) << "documents make a difference";

    const auto expected = gradients_of(*model);
    const auto loss = model->loss(tokens, targets, positions);
    EXPECT_NEAR(loss.item<double>(), sum, 1e-6 * sum);
    loss.backward();
    for (const auto& [parameter, gradient] : gradients_of(*model))
      EXPECT_LT(difference(gradient, expected.at(parameter)), 5e-6) << parameter;

    model->module().to(at::kBFloat16);
    begin = 0;
    for (const auto length : kLengths) {
      alone_bf16.push_back(model->logits(part(tokens, length)).squeeze(0).to(at::kFloat));
      begin += length;
    }
    const auto packed_bf16 = model->logits(tokens, positions).flatten(0, 1).to(at::kFloat);
    EXPECT_LT(difference(packed_bf16, at::cat(alone_bf16)), 1e-2);
  }
}

TEST(Documents, GiveTheSameBitsByLayersAndRecomputed) {
  for (const auto& name : {"gpt2", "mistral"}) {
    SCOPED_TRACE(name);
    const auto model = model_of(name, 4);
    const auto tokens = at::randint(1, 40, {2, kSequence}, at::kLong);
    const auto targets = packed_targets(tokens);
    const auto positions = packed_positions();
    const auto loss = model->loss(tokens, targets, positions);
    loss.backward();
    const auto expected = gradients_of(*model);
    model->recompute({.every = 1});
    const auto again = model->loss(tokens, targets, positions);
    again.backward();
    EXPECT_TRUE(again.equal(loss));
    for (const auto& [parameter, gradient] : gradients_of(*model))
      EXPECT_TRUE(gradient.equal(expected.at(parameter))) << parameter;

    // Micro-batches of a row each, which have other documents.
    const auto rows = [](const at::Tensor& of) { return of.split(1); };
    const auto layers = model->layers(rows(tokens), rows(targets), rows(positions));
    auto inputs = layers.inputs();
    for (int64_t i = 0; i < 2; ++i) {
      auto values = inputs[static_cast<size_t>(i)];
      for (const auto& layer : layers.layers) values = layer(values);
      EXPECT_TRUE(layers.loss(values, i).equal(
          model->loss(rows(tokens)[i], rows(targets)[i], rows(positions)[i])));
    }
    EXPECT_THAT(
        message_of<ConfigError>([&] { model->layers(rows(tokens), rows(targets), {positions}); }),
        HasSubstr("positions of 1"));
  }
}

TEST(Documents, ThatFillTheirRowsChangeNothing) {
  const auto model = model_of("mistral", 4);
  const auto tokens = at::randint(1, 40, {2, kSequence}, at::kLong);
  const auto positions = at::arange(kSequence, at::kLong).expand({2, kSequence});
  EXPECT_TRUE(model->logits(tokens, positions).equal(model->logits(tokens)));
}

TEST(Documents, MustFitTheContextAndTheModel) {
  const auto model = model_of("gpt2", 0);  // with a context of 24
  const auto tokens = at::ones({1, 32}, at::kLong);
  const auto halves = at::arange(16, at::kLong).repeat({2}).unsqueeze(0);
  EXPECT_EQ(model->logits(tokens, halves).size(1), 32) << "a row may be longer";
  EXPECT_THAT(message_of<ConfigError>([&] { model->logits(tokens, halves + 9); }),
              AllOf(HasSubstr("25 tokens"), HasSubstr("24")));
  const auto bert = language_model_config_from_json(
                        R"({"model_type": "bert", "vocab_size": 40, "hidden_size": 16,
                            "intermediate_size": 24, "num_hidden_layers": 1,
                            "num_attention_heads": 2})",
                        "bert")
                        ->build();
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { bert->loss(tokens, tokens, halves); }, [&] { bert->logits(tokens, halves); },
           [&] { bert->layers({tokens}, {tokens}, {halves}); }})
    EXPECT_THAT(message_of<ConfigError>(call), HasSubstr("A BERT"));
}

}  // namespace
}  // namespace zero
