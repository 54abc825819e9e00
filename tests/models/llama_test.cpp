// Llama and its relatives compute what transformers computes with the same files, and refuse what
// they do not compute.
#include "zero/models/llama/llama.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "tests/models/fixtures.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/models/architectures.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/layers/attention.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

double relative(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

// A model with the weights of its folder.
Llama loaded(const std::string& model, const std::string& config) {
  Llama llama(LlamaConfig::from_json(config, model));
  const WeightFiles files(fixtures::folder(model));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : llama->named_parameters())
    parameter.value().copy_(files.read(parameter.key()));
  EXPECT_EQ(files.names().size(), llama->named_parameters().size()) << model;
  return llama;
}

// Logits, loss, gradients, and logits in bf16.
template <class Model>
void expect_values(Model& model, const fixtures::Variant& expected) {
  SCOPED_TRACE(expected.name);
  const auto logits = model->logits(expected.tokens);
  EXPECT_LT(relative(logits, expected.logits), 1e-5);
  EXPECT_LT(relative(model->logits_last(expected.tokens), logits.select(1, -1)), 1e-5);

  const auto loss = model->loss(expected.tokens, expected.targets);
  EXPECT_NEAR(loss.template item<double>(), expected.loss, 1e-5 * expected.loss);
  loss.backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& parameter : model->named_parameters())
    gradients[parameter.key()] = parameter.value().grad().to(at::kDouble).flatten();
  int64_t row = 0;
  for (const auto& [name, gradient] : gradients) {
    const auto wanted = expected.gradients[row++];
    const double norm = wanted[0].template item<double>();
    const auto waves = torch::arange(1, gradient.numel() + 1, at::kDouble).sin();
    EXPECT_NEAR(gradient.norm().template item<double>(), norm, 1e-5 * norm) << name;
    EXPECT_NEAR(gradient.dot(waves).template item<double>(), wanted[1].template item<double>(),
                2e-5 * norm)
        << name;
  }

  model->to(at::kBFloat16);
  EXPECT_LT(
      relative(model->logits(expected.tokens).to(at::kFloat), expected.logits_bf16.to(at::kFloat)),
      2e-2);
}

TEST(Llama, ComputesWhatTransformersComputes) {
  for (const auto& model : fixtures::models()) {
    for (const auto& expected : fixtures::variants(model)) {
      auto llama = loaded(model, expected.config);
      expect_values(llama, expected);
    }
  }
}

TEST(Gpt2, ComputesWhatTransformersComputes) {
  const WeightFiles files(fixtures::folder("gpt2"));
  for (const auto& expected : fixtures::variants("gpt2")) {
    Gpt2 gpt2(Gpt2Config::from_json(expected.config, "gpt2"));
    gpt2->eval();
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : gpt2->named_parameters())
        parameter.value().copy_(files.read("transformer." + parameter.key()));
    }
    expect_values(gpt2, expected);
  }
}

TEST(Llama, GivesTheSameBitsByLayersAndRecomputed) {
  const auto expected = fixtures::variants("qwen2").back();
  auto llama = loaded("qwen2", expected.config);
  const auto loss_of = [&] {
    llama->zero_grad();
    const auto loss = llama->loss(expected.tokens, expected.tokens);
    loss.backward();
    return std::pair(loss.detach(), llama->parameters().front().grad().clone());
  };
  const auto plain = loss_of();
  llama->recompute({.every = 1});
  const auto again = loss_of();
  EXPECT_TRUE(again.first.equal(plain.first));
  EXPECT_TRUE(again.second.equal(plain.second));
  const auto layers = llama->layers({expected.tokens}, {expected.tokens});
  auto values = layers.inputs().front();
  for (const auto& layer : layers.layers) values = layer(values);
  EXPECT_TRUE(layers.loss(values, 0).equal(plain.first));
}

// transformers: the quotient is rounded before it is multiplied by the weight.
TEST(Llama, CastsAsTransformersDoes) {
  torch::manual_seed(5);
  const auto x = torch::randn({64, 48}).to(at::kBFloat16);
  const auto weight = torch::randn({48}).to(at::kBFloat16);
  const auto wide = x.to(at::kFloat);
  const auto quotient = wide * at::rsqrt(wide.pow(2).mean(-1, true) + 1e-5);
  const auto y = rms_norm(x, weight, 1e-5);
  EXPECT_TRUE(y.equal(weight * quotient.to(at::kBFloat16)));
  EXPECT_FALSE(y.equal((weight * quotient).to(at::kBFloat16)));

  const auto table = rotary_table({}, 8, 64, 64, at::kCPU);
  const auto turned = rotate(x.view({1, 64, 6, 8}), table, at::kBFloat16);
  const auto halves = x.view({1, 64, 6, 8}).chunk(2, -1);
  EXPECT_TRUE(turned.equal(x.view({1, 64, 6, 8}) * table.cosines.to(at::kBFloat16) +
                           at::cat({-halves[1], halves[0]}, -1) * table.sines.to(at::kBFloat16)));
}

TEST(Llama, AWindowCountsItsOwnPosition) {
  const auto mask = window_mask(4, 2, at::kCPU);
  EXPECT_TRUE(mask.equal(
      torch::tensor({{1, 0, 0, 0}, {1, 1, 0, 0}, {0, 1, 1, 0}, {0, 0, 1, 1}}).to(at::kBool)));
  EXPECT_FALSE(window_mask(4, 4, at::kCPU).defined());
  EXPECT_FALSE(window_mask(4, 0, at::kCPU).defined());
}

TEST(LlamaConfig, IsWrittenAsItIsRead) {
  for (const auto& model : fixtures::models()) {
    for (const auto& variant : fixtures::variants(model)) {
      SCOPED_TRACE(variant.name);
      const auto config = LlamaConfig::from_json(variant.config, "config.json");
      EXPECT_EQ(LlamaConfig::from_json(config.to_json(), "again"), config) << config.to_json();

      const auto sizes = language_model_config_from_json(variant.config, "config.json");
      const auto built = sizes->build();
      int64_t elements = 0;
      std::vector<std::array<int64_t, 2>> matrices;
      for (const auto& parameter : built->module().parameters()) {
        elements += parameter.numel();
        if (parameter.dim() == 2) matrices.push_back({parameter.size(0), parameter.size(1)});
      }
      EXPECT_EQ(elements, sizes->parameter_count());
      EXPECT_THAT(sizes->matrices(), ::testing::UnorderedElementsAreArray(matrices));
    }
  }
}

TEST(LlamaConfig, HasTheDefaultsOfTransformers) {
  const auto of = [](const std::string& json) { return LlamaConfig::from_json(json, "c"); };
  EXPECT_EQ(of(R"({"model_type": "llama"})").parameter_count(), 6738415616);  // Llama-2-7B's
  EXPECT_EQ(of(R"({"model_type": "mistral"})").parameter_count(), 7241732096);
  EXPECT_EQ(of(R"({"model_type": "mistral"})").windows.front(), 4096);
  EXPECT_EQ(of(R"({"model_type": "mistral", "sliding_window": null})").windows.front(), 0);
  EXPECT_EQ(of(R"({"model_type": "mistral", "num_key_value_heads": null})").key_heads, 32);
  EXPECT_EQ(of(R"({"model_type": "qwen3"})").head_dim, 128);
  EXPECT_EQ(of(R"({"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
                   "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
                   "tie_word_embeddings": true})")
                .parameter_count(),
            494032768);                                                       // Qwen2.5-0.5B's
  EXPECT_EQ(of(R"({"model_type": "gemma"})").parameter_count(), 8537680896);  // Gemma-7B's
  const auto gemma =
      of(R"({"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26,
                   "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 6912,
                   "sliding_window": 512, "vocab_size": 262144, "cache_implementation": "hybrid",
                   "sliding_window_pattern": 6, "rope_local_base_freq": 10000})");
  EXPECT_EQ(gemma.parameter_count(), 999885952);  // Gemma-3-1B's
  // transformers takes no 256.0.
  EXPECT_THAT(gemma.to_json(), HasSubstr("\"query_pre_attn_scalar\": 256,"));
  EXPECT_EQ(gemma.windows[4], 512);
  EXPECT_EQ(gemma.windows[5], 0);
  EXPECT_EQ(of(R"({"model_type": "gemma", "hidden_act": "gelu", "pad_token_id": null,
                   "hidden_activation": "gelu_pytorch_tanh"})")
                .padding,
            -1);
}

TEST(LlamaConfig, ReadsBothSpellingsOfRotaryPositions) {
  const auto rotary = [](const std::string& json) {
    return LlamaConfig::from_json(R"({"model_type": "llama", )" + json + "}", "c").rotary;
  };
  const auto llama3 = rotary(
      R"("rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1,
         "high_freq_factor": 4, "original_max_position_embeddings": 8192})");
  EXPECT_EQ(llama3, rotary(R"("rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5,
         "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
         "original_max_position_embeddings": 8192})"));
  EXPECT_EQ(llama3.kind, RotaryKind::llama3);
  // A rope_scaling with keys drops rope_parameters, with their theta; an empty one counts for
  // nothing.
  const std::string parameters =
      R"(, "rope_parameters": {"rope_type": "dynamic", "factor": 4, "rope_theta": 7})";
  const std::string scaling = R"("rope_scaling": {"type": "linear", "factor": 2})";
  const auto both = rotary(R"("rope_theta": 3, )" + scaling + parameters);
  EXPECT_EQ(both.kind, RotaryKind::linear);
  EXPECT_EQ(both.theta, 3);
  EXPECT_EQ(both.factor, 2);
  EXPECT_EQ(rotary(scaling + parameters).theta, 10000);
  const auto empty = rotary(R"("rope_theta": 3, "rope_scaling": {})" + parameters);
  EXPECT_EQ(empty.kind, RotaryKind::dynamic);
  EXPECT_EQ(empty.theta, 7);
  EXPECT_EQ(empty.factor, 4);
  // Gemma 3 puts its keys among those of full attention.
  const auto gemma = LlamaConfig::from_json(R"({"model_type": "gemma3_text", "rope_theta": 3,
      "rope_scaling": {"rope_type": "linear", "factor": 8},
      "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 4, "rope_theta": 7},
                          "sliding_attention": {"rope_theta": 5}}})",
                                            "c");
  EXPECT_EQ(gemma.rotary.kind, RotaryKind::linear);
  EXPECT_EQ(gemma.rotary.factor, 8);
  EXPECT_EQ(gemma.rotary.theta, 7);
  EXPECT_EQ(gemma.window_rotary->theta, 5);
}

TEST(LlamaConfig, TakesWeightsThatBitsandbytesHasQuantised) {
  EXPECT_NO_THROW(language_model_config_from_json(
      R"({"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}})",
      "config.json"));
}

TEST(LlamaConfig, RefusesByNameWhatIsNotComputed) {
  const std::vector<std::array<std::string, 3>> cases{
      {R"({"model_type": "llama", "hidden_act": "gelu"})", "hidden_act", "\"silu\""},
      {R"({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})",
       "quantization_config", "gptq"},
      {R"({"model_type": "llama", "logit_scale": 2.0})", "logit_scale", "2.0"},
      {R"({"model_type": "mistral", "attention_bias": true})", "attention_bias", "true"},
      {R"({"model_type": "llama", "rope_scaling": {"rope_type": "longrope"}})", "rope_type",
       "longrope"},
      {R"({"model_type": "llama", "rope_scaling": {"type": "linear"}})", "factor", "absent"},
      {R"({"model_type": "llama", "rope_scaling": {"type": "llama3", "factor": 8,
          "low_freq_factor": 1, "high_freq_factor": 4}})",
       "original_max_position_embeddings", "absent"},
      {R"({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2, "mrope": 1}})",
       "mrope", "rope_scaling"},
      {R"({"model_type": "llama", "partial_rotary_factor": 0.5})", "partial_rotary_factor", "0.5"},
      {R"({"model_type": "llama", "num_key_value_heads": 5})", "num_key_value_heads", "5"},
      {R"({"model_type": "llama", "head_dim": 7})", "head_dim", "7"},
      {R"({"model_type": "llama", "vocab_size": 4611686018427387904})", "vocab_size",
       "at most 2147483647"},
      {R"({"model_type": "bert", "hidden_size": 4611686018427387904})", "hidden_size",
       "at most 1048576"},
      {R"({"model_type": "gpt2", "n_inner": 4611686018427387904})", "n_inner", "at most 16777216"},
      {R"({"model_type": "llama", "hidden_size": "x"})", "hidden_size", "whole number"},
      {R"({"model_type": "llama", "pad_token_id": 32000})", "pad_token_id", "32000"},
      {R"({"model_type": "qwen2", "use_sliding_window": true, "layer_types": ["x"]})",
       "layer_types", "32 layers"},
      {R"({"model_type": "gemma2"})", "gemma2", "\"gemma3_text\""},
      {R"({"model_type": "gemma", "hidden_act": "silu"})", "hidden_act", "gelu_pytorch_tanh"},
      {R"({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0})", "attn_logit_softcapping",
       "50.0"},
      {R"({"model_type": "gemma3_text", "query_pre_attn_scalar": -1})", "query_pre_attn_scalar",
       "-1"},
      {R"({"model_type": "gemma3_text",
           "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}})",
       "sliding_attention", "default"},
      {R"({"model_type": "mixtral"})", "mixtral", "\"qwen3\""}};
  for (const auto& [json, key, value] : cases) {
    EXPECT_THAT(message_of<ConfigError>(
                    [&, text = json] { language_model_config_from_json(text, "this.json"); }),
                AllOf(HasSubstr("this.json"), HasSubstr(key), HasSubstr(value)))
        << json;
  }
}

TEST(Llama, RefusesSequencesBeyondItsContext) {
  auto llama = loaded("llama", fixtures::config("llama").dump());
  EXPECT_THAT(message_of<ConfigError>([&] {
                llama->logits(torch::zeros({1, 65}, at::kLong));
              }),
              AllOf(HasSubstr("65"), HasSubstr("max_position_embeddings")));
}

}  // namespace
}  // namespace zero
