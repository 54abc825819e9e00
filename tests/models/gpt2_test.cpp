#include "zero/models/gpt2/gpt2.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "zero/base/error.h"
#include "zero/models/layers/tied_embedding.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Gpt2Config small() {
  return {.vocab_size = 61, .context = 12, .width = 24, .layers = 3, .heads = 4};
}

at::Tensor tokens(int64_t batch, int64_t sequence) {
  return at::randint(61, {batch, sequence}, at::kLong);
}

TEST(Gpt2, HasThePublishedNumberOfParameters) {
  EXPECT_EQ(Gpt2Config::preset("gpt2").parameter_count(), 124439808);
  EXPECT_EQ(Gpt2Config::preset("gpt2-medium").parameter_count(), 354823168);
  EXPECT_EQ(Gpt2Config::preset("gpt2-large").parameter_count(), 774030080);
  EXPECT_EQ(Gpt2Config::preset("gpt2-xl").parameter_count(), 1557611200);
  for (auto config : {small(), Gpt2Config{.vocab_size = 7,
                               .context = 3,
                               .width = 4,
                               .layers = 1,
                               .heads = 2,
                               .inner = 5,
                               .tie_word_embeddings = false}}) {
    int64_t count = 0;
    for (const auto& parameter : Gpt2(config)->parameters()) count += parameter.numel();
    EXPECT_EQ(count, config.parameter_count());
  }
}

TEST(Gpt2, NamesItsParametersAsHuggingFaceDoes) {
  auto config = small();
  config.layers = 1;
  std::vector<std::string> names;
  for (const auto& item : Gpt2(config)->named_parameters()) names.push_back(item.key());
  EXPECT_THAT(names, ::testing::ElementsAre(
                         "wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias",
                         "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "h.0.attn.c_proj.weight",
                         "h.0.attn.c_proj.bias", "h.0.ln_2.weight", "h.0.ln_2.bias",
                         "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias", "h.0.mlp.c_proj.weight",
                         "h.0.mlp.c_proj.bias", "ln_f.weight", "ln_f.bias"));
  Gpt2 model(config);
  EXPECT_EQ(model->named_parameters()["h.0.attn.c_attn.weight"].sizes(),
            (std::vector<int64_t>{24, 72}))
      << "(in, out)";
  EXPECT_EQ(model->named_parameters()["h.0.mlp.c_proj.weight"].sizes(),
            (std::vector<int64_t>{96, 24}));
}

TEST(Gpt2, StartsFromGpt2sDistribution) {
  auto config = small();
  config.width = 256;
  config.layers = 8;
  at::manual_seed(1);
  for (const auto& item : Gpt2(config)->named_parameters()) {
    const auto& name = item.key();
    const auto& value = item.value();
    if (name.ends_with("bias")) {
      EXPECT_EQ(value.abs().max().item<float>(), 0.0F) << name;
    } else if (name.find("ln_") != std::string::npos) {
      EXPECT_TRUE(value.eq(1).all().item<bool>()) << name;
    } else {
      const double expected = name.ends_with("c_proj.weight") ? 0.02 / 4 : 0.02;
      EXPECT_NEAR(value.std().item<double>(), expected, 0.05 * expected) << name;
    }
  }
}

TEST(Gpt2, GivesHiddenStatesLogitsAndLoss) {
  Gpt2 model(small());
  const auto x = tokens(2, 9);
  EXPECT_EQ(model->forward(x).sizes(), (std::vector<int64_t>{2, 9, 24}));
  const auto logits = model->logits(x);
  EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{2, 9, 61}));
  EXPECT_TRUE(at::allclose(model->logits_last(x), logits.select(1, 8), 1e-5, 1e-6));
  const auto loss = model->loss(x, tokens(2, 9));
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_NEAR(loss.item<double>(), std::log(61.0), 0.2) << "an untrained model knows nothing";
}

TEST(Gpt2, ALaterTokenDoesNotAlterEarlierOutputs) {
  Gpt2 model(small());
  auto x = tokens(1, 12);
  const auto before = model->forward(x);
  x[0][7] = (x[0][7] + 1).remainder(61);
  const auto after = model->forward(x);
  EXPECT_TRUE(at::equal(before.narrow(1, 0, 7), after.narrow(1, 0, 7)));
  for (int64_t i = 7; i < 12; ++i)
    EXPECT_FALSE(at::equal(before.select(1, i), after.select(1, i))) << i;
}

// The model written a second time, from its parameters by name and the plainest operators.
at::Tensor plain_loss(const Gpt2Config& config,
                      const torch::OrderedDict<std::string, at::Tensor>& p, const at::Tensor& x,
                      const at::Tensor& y) {
  const auto norm = [&](const at::Tensor& v, const std::string& name) {
    const auto centred = v - v.mean(-1, true);
    const auto variance = centred.pow(2).mean(-1, true);
    return centred / (variance + config.layer_norm_eps).sqrt() * p[name + ".weight"] +
           p[name + ".bias"];
  };
  const auto conv = [&](const at::Tensor& v, const std::string& name) {
    return at::matmul(v, p[name + ".weight"]) + p[name + ".bias"];
  };
  const int64_t sequence = x.size(1);
  const int64_t size = config.width / config.heads;
  const auto future = at::ones({sequence, sequence}, at::kBool).triu(1);
  auto state = p["wte.weight"].index({x}) + p["wpe.weight"].slice(0, 0, sequence);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto name = "h." + std::to_string(layer);
    const auto qkv = conv(norm(state, name + ".ln_1"), name + ".attn.c_attn");
    std::vector<at::Tensor> heads;
    for (int64_t head = 0; head < config.heads; ++head) {
      const auto part = [&](int64_t which) {
        return qkv.slice(2, which * config.width + head * size,
                         which * config.width + (head + 1) * size);
      };
      const auto scores =
          at::matmul(part(0), part(1).transpose(1, 2)) / std::sqrt(static_cast<double>(size));
      heads.push_back(at::matmul(at::softmax(scores.masked_fill(future, -INFINITY), -1), part(2)));
    }
    state = state + conv(at::cat(heads, 2), name + ".attn.c_proj");
    const auto u = conv(norm(state, name + ".ln_2"), name + ".mlp.c_fc");
    const auto gelu = 0.5 * u * (1 + at::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u.pow(3))));
    state = state + conv(gelu, name + ".mlp.c_proj");
  }
  const auto head = config.tie_word_embeddings ? p["wte.weight"] : p["lm_head.weight"];
  const auto logits = at::matmul(norm(state, "ln_f"), head.t());
  return at::cross_entropy_loss(logits.reshape({-1, config.vocab_size}), y.reshape({-1}));
}

TEST(Gpt2, LossAndEveryGradientEqualThePlainComposition) {
  for (const bool tied : {true, false}) {
    auto config = small();
    config.tie_word_embeddings = tied;
    at::manual_seed(5);
    Gpt2 model(config);
    {
      torch::NoGradGuard no_grad;  // far from the start, where biases and norms matter
      for (auto& parameter : model->parameters()) parameter.add_(at::randn_like(parameter), 0.1);
    }
    const auto parameters = model->named_parameters();
    const auto x = tokens(3, 11);
    const auto y = tokens(3, 11);
    const auto expected = plain_loss(config, parameters, x, y);
    expected.backward();
    std::map<std::string, at::Tensor> gradients;
    for (const auto& item : parameters) gradients[item.key()] = item.value().grad().clone();
    model->zero_grad();
    const auto loss = model->loss(x, y);
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5);
    for (const auto& item : parameters) {
      const auto& wanted = gradients[item.key()];
      const auto difference = (item.value().grad() - wanted).norm().item<double>();
      EXPECT_LT(difference, 1e-4 * wanted.norm().item<double>() + 1e-7) << item.key();
    }
  }
}

TEST(TiedEmbedding, AddsItsRowsInPlaceToWhatTheSlotHolds) {
  const auto weight = at::arange(12, at::kFloat).view({4, 3}).requires_grad_();
  const auto indices = at::tensor({2, 0, 2}, at::kLong);
  for (const bool filled : {false, true}) {
    auto slot = gradient_slot(weight);
    const auto rows = tied_embedding(weight, indices, slot);
    EXPECT_TRUE(at::equal(rows, at::embedding(weight, indices)));
    auto held = at::full({4, 3}, 10.0F);
    const void* memory = held.data_ptr();
    if (filled) {
      slot.set_data(held);
      held = at::Tensor();
    }
    slot = at::Tensor();
    const auto loss = rows.sum();
    loss.backward({}, true);
    const float base = filled ? 10 : 0;
    const auto column = at::tensor({base + 1, base, base + 2, base}).view({4, 1});
    EXPECT_TRUE(at::equal(weight.grad(), column.expand({4, 3})));
    EXPECT_EQ(weight.grad().data_ptr() == memory, filled) << "no copy";
    EXPECT_THROW(loss.backward(), Error);
    weight.mutable_grad() = at::Tensor();
  }
}

TEST(Gpt2, TiedEmbeddingsAreOneParameter) {
  Gpt2 model(small());
  const auto x = tokens(1, 4);
  model->loss(x, x).backward();
  const auto rows = model->wte->weight.grad().abs().sum(1);
  EXPECT_TRUE(rows.gt(0).all().item<bool>())
      << "the output projection reaches the rows of every token";
  auto config = small();
  config.tie_word_embeddings = false;
  Gpt2 untied(config);
  EXPECT_TRUE(untied->named_parameters().contains("lm_head.weight"));
}

TEST(Gpt2, RunsInBfloat16) {
  at::manual_seed(6);
  Gpt2 model(small());
  const auto x = tokens(2, 12);
  const auto y = tokens(2, 12);
  const auto expected = model->loss(x, y).item<double>();
  model->to(at::kBFloat16);
  const auto loss = model->loss(x, y);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), expected, 0.02);
  loss.backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_EQ(item.value().grad().scalar_type(), at::kBFloat16);
    EXPECT_TRUE(item.value().grad().isfinite().all().item<bool>()) << item.key();
  }
}

TEST(Gpt2, EachDropoutActsInTrainingOnly) {
  for (const auto member : {&Gpt2Config::embedding_dropout, &Gpt2Config::attention_dropout,
                            &Gpt2Config::residual_dropout}) {
    auto config = small();
    config.*member = 0.5;
    Gpt2 model(config);
    const auto x = tokens(2, 8);
    EXPECT_FALSE(at::equal(model->forward(x), model->forward(x)));
    at::manual_seed(4);
    const auto first = model->forward(x);
    at::manual_seed(4);
    EXPECT_TRUE(at::equal(model->forward(x), first)) << "the generator's seed decides";
    model->loss(x, x).backward();
    model->eval();
    EXPECT_TRUE(at::equal(model->forward(x), model->forward(x)));
  }
}

TEST(Gpt2, CanBeCloned) {
  Gpt2 model(small());
  const auto copy = std::dynamic_pointer_cast<Gpt2Impl>(model->clone());
  const auto x = tokens(1, 5);
  EXPECT_TRUE(at::equal(copy->forward(x), model->forward(x)));
  const auto originals = model->parameters();
  const auto copies = copy->parameters();
  ASSERT_EQ(copies.size(), originals.size());
  for (size_t i = 0; i < copies.size(); ++i) EXPECT_FALSE(copies[i].is_alias_of(originals[i])) << i;
}

TEST(Gpt2, LearnsASequenceByHeart) {
  at::manual_seed(7);
  Gpt2 model(small());
  const auto x = tokens(1, 12);
  const auto y = tokens(1, 12);
  double loss = 0;
  for (int step = 0; step < 200; ++step) {
    model->zero_grad();
    auto value = model->loss(x, y);
    value.backward();
    torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.add_(parameter.grad(), -0.5);
    loss = value.item<double>();
  }
  EXPECT_LT(loss, 0.1);
}

TEST(Gpt2, RefusesTokensThatDoNotFit) {
  Gpt2 model(small());
  EXPECT_THAT([&] { model->forward(tokens(1, 13)); },
              ThrowsMessage<ConfigError>(HasSubstr("context of 12")));
  EXPECT_THROW(model->forward(at::zeros({4}, at::kLong)), ConfigError);
  EXPECT_THROW(model->forward(at::zeros({1, 4})), ConfigError);
  EXPECT_THROW(model->loss(tokens(1, 4), tokens(1, 5)), ConfigError);
}

TEST(Gpt2Config, JsonRoundTrips) {
  Gpt2Config config = small();
  config.inner = 50;
  config.embedding_dropout = 0.125;
  config.attention_dropout = 0.25;
  config.residual_dropout = 0.375;
  config.layer_norm_eps = 1e-6;
  config.initializer_range = 0.01;
  config.tie_word_embeddings = false;
  EXPECT_EQ(Gpt2Config::from_json(config.to_json(), "test"), config);
  for (const auto& name : Gpt2Config::preset_names()) {
    EXPECT_EQ(Gpt2Config::from_json(Gpt2Config::preset(name).to_json(), name),
              Gpt2Config::preset(name));
  }
}

TEST(Gpt2Config, ReadsHuggingFacesFile) {
  const auto config = Gpt2Config::from_json(
      R"({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
          "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
          "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
          "summary_type": "cls_index", "task_specific_params": {"text-generation": {"do_sample": true}}, "vocab_size": 50257})",
      "config.json");
  EXPECT_THAT(config.to_json(), HasSubstr("\"eos_token_id\": 50256"));
  auto published = Gpt2Config{}.set_dropout(0.1);
  published.token_ids = config.token_ids;
  EXPECT_EQ(config, published);
  EXPECT_EQ(Gpt2Config::from_json(config.to_json(), "again"), config);
  const auto distilled = Gpt2Config::from_json(
      R"({"_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
          "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
          "label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
          "n_layer": 6, "n_positions": 1024, "n_special": 0, "output_past": true, "predict_special_tokens": true, "pruned_heads": {},
          "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
          "summary_type": "cls_index", "summary_use_proj": true,
          "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257})",
      "config.json");
  EXPECT_EQ(distilled.layers, 6);
  EXPECT_EQ(Gpt2Config::from_json("{}", "x"), Gpt2Config{}.set_dropout(0.1))
      << "Hugging Face's defaults";
  const auto variant =
      Gpt2Config::from_json(R"({"scale_attn_weights": false, "activation_function": "swish",
          "scale_attn_by_inverse_layer_idx": true})",
                            "x");
  EXPECT_EQ(variant.activation, "silu");
  EXPECT_EQ(Gpt2Config::from_json(variant.to_json(), "again"), variant);
}

// transformers' attribute_map sets the common names after the others.
TEST(Gpt2Config, TakesTheNamesThatAllModelsHave) {
  const auto config = Gpt2Config::from_json(
      R"({"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3,
          "max_position_embeddings": 12, "n_embd": 64, "n_head": 7, "vocab_size": 61})",
      "x");
  EXPECT_EQ(config, small().set_dropout(0.1));
}

TEST(Gpt2Config, NamesTheNearestPreset) {
  EXPECT_THAT([] { Gpt2Config::preset("gpt2-nono"); },
              ThrowsMessage<ConfigError>(HasSubstr("Did you mean 'gpt2-nano'?")));
  EXPECT_EQ(Gpt2Config::preset("gpt2-nano").width, 384);
}

TEST(Gpt2Config, NamesTheKeyThatIsWrong) {
  const auto expect = [](const char* text, const char* message) {
    EXPECT_THAT(
        [&] { Gpt2Config::from_json(text, "my.json"); },
        ThrowsMessage<ConfigError>(::testing::AllOf(HasSubstr("my.json"), HasSubstr(message))))
        << text;
  };
  expect("{", "is not JSON (it ends too early)");
  EXPECT_THAT(
      [&] {
        // nlohmann stops at a NUL.
        Gpt2Config::from_json(std::string_view("{\"n_layer\": 2}\0\n, 3", 19), "my.json");
      },
      ThrowsMessage<ConfigError>(HasSubstr("my.json is not JSON (line 1, column 15, at")));
  expect(R"({"n_layer": 2, "n_layer": 3})", "names 'n_layer' twice");
  expect("[1]", "JSON object");
  expect(R"({"model_type": "llama"})", "'model_type' is \"llama\"");
  expect(R"({"activation_function": "relu6"})", "'relu6'");
  expect(R"({"n_layer": 2.5})", "'n_layer' is 2.5, which is not a whole number");
  expect(R"({"n_layer": "2"})", "'n_layer'");
  expect(R"({"n_head": 0})", "n_head is 0");
  expect(R"({"n_head": 7})", "not a multiple");
  expect(R"({"attn_pdrop": 1.0})", "attn_pdrop is 1");
  expect(R"({"tie_word_embeddings": 1})", "true or false");
  expect(R"({"scale_attn_weights": 1})", "'scale_attn_weights'");
  expect(R"({"n_layers": 2})", "'n_layers' is 2");
  expect(R"({"hidden_act": "relu"})", "'hidden_act'");
  expect(R"({"add_cross_attention": true})", "'add_cross_attention'");
  expect(R"({"pruned_heads": {"1": [0]}})", "'pruned_heads'");
  expect(R"({"num_hidden_layers": "2"})", "'num_hidden_layers'");
}

}  // namespace
}  // namespace zero
