// BERT computes what transformers computes with the same files, trains at every stage to the same
// bits, reads the names of old files, and refuses what it does not compute.
#include "zero/models/bert/bert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/models/fixtures.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/engine/pretrained.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/initial_values.h"

namespace zero {
namespace {

using comm::run_as_threads;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

const std::vector<std::string> kModels{"bert", "bert-classes"};

struct Sample {
  Texts texts;
  at::Tensor targets;
};

Sample sample(const std::string& model) {
  const SafetensorsReader file(fixtures::folder(model) / "expected.safetensors");
  return {{file.read("tokens"), file.read("types"), file.read("mask").to(at::kBool)},
          file.read("targets")};
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

Bert loaded(const std::string& model, const std::string& config) {
  Bert bert(BertConfig::from_json(config, model));
  const WeightFiles files(fixtures::folder(model));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : bert->named_parameters())
    parameter.value().copy_(files.read(parameter.key()));
  EXPECT_EQ(files.names().size(), bert->named_parameters().size()) << model;
  bert->eval();
  return bert;
}

std::map<std::string, at::Tensor> gradients_of(const Bert& bert) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& parameter : bert->named_parameters())
    gradients[parameter.key()] = parameter.value().grad().clone();
  return gradients;
}

TEST(Bert, ComputesWhatTransformersComputes) {
  for (const auto& model : kModels) {
    const auto [texts, targets] = sample(model);
    for (const auto& expected : fixtures::variants(model)) {
      SCOPED_TRACE(expected.name);
      auto bert = loaded(model, expected.config);
      EXPECT_LT(relative(bert->logits(texts), expected.logits), 1e-5);
      const auto loss = bert->loss(texts, targets);
      EXPECT_NEAR(loss.item<double>(), expected.loss, 1e-5 * expected.loss);
      loss.backward();
      // A gradient that is zero in mathematics (the keys' biases) is rounding: it is compared with
      // the largest.
      const double largest = expected.gradients.select(1, 0).max().item<double>();
      int64_t row = 0;
      for (const auto& [name, gradient] : gradients_of(bert)) {
        const auto flat = gradient.to(at::kDouble).flatten();
        const double norm = expected.gradients[row][0].item<double>();
        const auto waves = torch::arange(1, flat.numel() + 1, at::kDouble).sin();
        const double close = 2e-5 * norm + 1e-6 * largest;
        EXPECT_NEAR(flat.norm().item<double>(), norm, close) << name;
        EXPECT_NEAR(flat.dot(waves).item<double>(), expected.gradients[row][1].item<double>(),
                    close)
            << name;
        ++row;
      }
      EXPECT_EQ(row, expected.gradients.size(0));
      bert->to(at::kBFloat16);
      EXPECT_LT(relative(bert->logits(texts).to(at::kFloat), expected.logits_bf16.to(at::kFloat)),
                2e-2);
    }
  }
}

TEST(Bert, PaddingChangesNothing) {
  for (const auto& model : kModels) {
    auto [texts, targets] = sample(model);
    auto bert = loaded(model, fixtures::config(model).dump());
    const auto whole = bert->logits(texts);
    const Texts alone{texts.tokens.narrow(0, 1, 1).narrow(1, 0, 10),
                      texts.types.narrow(0, 1, 1).narrow(1, 0, 10)};
    const auto part =
        model == "bert" ? whole.narrow(0, 1, 1).narrow(1, 0, 10) : whole.narrow(0, 1, 1);
    EXPECT_LT(relative(bert->logits(alone), part), 1e-5) << model;
  }
}

TEST(Bert, GivesTheSameBitsByLayersAndRecomputed) {
  for (const auto& model : kModels) {
    SCOPED_TRACE(model);
    const auto [texts, targets] = sample(model);
    auto bert = loaded(model, fixtures::config(model).dump());
    bert->train();  // with dropout
    const auto pass = [&, &texts = texts, &targets = targets] {
      bert->zero_grad();
      torch::manual_seed(3);
      const auto loss = bert->loss(texts, targets);
      loss.backward();
      return std::pair(loss.detach(), gradients_of(bert));
    };
    const auto plain = pass();
    bert->recompute({.every = 1});
    const auto again = pass();
    EXPECT_TRUE(again.first.equal(plain.first));
    for (const auto& [name, gradient] : plain.second)
      EXPECT_TRUE(again.second.at(name).equal(gradient)) << name;
    torch::manual_seed(3);
    const auto layers = bert->layers({texts}, {targets});
    auto values = layers.inputs().front();
    for (const auto& layer : layers.layers) values = layer(values);
    EXPECT_TRUE(layers.loss(values, 0).equal(plain.first));
  }
}

// The gradients of a bias beside those of the plain composition, in several chunks.
TEST(LinearCrossEntropy, AddsABias) {
  torch::manual_seed(2);
  const auto leaf = [](at::IntArrayRef sizes) { return torch::randn(sizes).requires_grad_(); };
  const auto x = leaf({9, 8});
  const auto weight = leaf({70, 8});
  const auto bias = leaf({70});
  const auto targets = torch::randint(70, {9});
  targets[4] = -100;
  const auto pass = [&](const at::Tensor& loss) {
    for (const auto& each : {x, weight, bias}) each.mutable_grad() = at::Tensor();
    (loss * 3).backward();
    return std::vector<at::Tensor>{loss.detach(), x.grad(), weight.grad(), bias.grad()};
  };
  const auto plain = pass(at::cross_entropy_loss(at::linear(x, weight, bias), targets));
  const auto chunks =
      pass(linear_cross_entropy(x, weight, targets, {.logits_bytes = 2 * 4 * 70, .bias = bias}));
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_LT(relative(chunks[i], plain[i]), 1e-5) << i;
  EXPECT_THAT(message_of<ConfigError>([&] {
                linear_cross_entropy(x, weight, targets, {.bias = bias.narrow(0, 0, 5)});
              }),
              HasSubstr("bias"));
}

// A BERT whose engine has made its shards; its head has values of its own.
struct Loaded {
  Loaded(const LanguageModelConfig& sizes, int stage, std::shared_ptr<comm::Group> group,
         int64_t unit_bytes = 2048) {
    {
      const WithoutValues none;
      model = sizes.build();
    }
    auto tensors = named_tensors(model->module());
    tensors.values_follow = true;
    Config config;
    config.stage = stage;
    config.unit_bytes = unit_bytes;
    engine = std::make_unique<Engine>(
        std::move(tensors),
        std::vector{ParameterGroup{.optimizer = AdamW{.lr = 1e-2}, .rest = true}}, config,
        std::move(group));
  }
  PretrainedReport load(const std::string& path) const {
    return load_pretrained(*engine, path,
                           {.tied = model->tied_names(), .added = model->head_parameters()});
  }

  std::unique_ptr<LanguageModel> model;
  std::unique_ptr<Engine> engine;
};

TEST(Bert, TrainsToTheSameBitsAtEveryStageAndIsWrittenAsItWasRead) {
  for (const auto& model : kModels) {
    const auto folder = fixtures::folder(model).string();
    const auto sizes = language_model_config(folder);
    sizes->set_dropout(0);
    const auto [texts, targets] = sample(model);
    std::array<std::map<std::string, at::Tensor>, 4> weights;
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(model + ", stage " + std::to_string(stage));
      const TemporaryFolder out;
      run_as_threads(
          2, [&, &texts = texts, &targets = targets](std::shared_ptr<comm::Group> group) {
            const bool first = group->rank() == 0;
            const Loaded loaded(*sizes, stage, group);
            const auto report = loaded.load(folder);
            EXPECT_THAT(report.kept, IsEmpty());
            EXPECT_THAT(report.left_over, IsEmpty());
            save_pretrained(*loaded.engine, out.path().string());
            group->barrier();
            if (first) {
              const WeightFiles files(folder);
              const WeightFiles written(out.path());
              EXPECT_EQ(written.names(), files.names());
              for (const auto& name : files.names())
                EXPECT_TRUE(written.read(name).equal(files.read(name))) << name;
            }
            for (int step = 0; step < 3; ++step) {
              const auto row = group->rank();
              const auto of = [&](const at::Tensor& all) { return all.narrow(0, row, 1); };
              loaded.engine->backward(loaded.model->encoder()->loss(
                  {of(texts.tokens), of(texts.types), of(texts.mask)}, of(targets)));
              loaded.engine->step();
            }
            for (const auto& name : loaded.engine->parameter_names()) {
              const auto value = loaded.engine->parameter(name);
              if (first) weights[static_cast<size_t>(stage)][name] = value;
            }
          });
      for (const auto& [name, value] : weights[0])
        EXPECT_TRUE(weights[static_cast<size_t>(stage)].at(name).equal(value)) << name;
    }
  }
}

// Writes the fixture's tensors with changes.
using Tensors = std::map<std::string, at::Tensor>;
void write_changed(const std::string& model, const std::filesystem::path& path,
                   const std::function<void(Tensors&)>& change) {
  const WeightFiles files(fixtures::folder(model));
  Tensors tensors;
  for (const auto& name : files.names()) tensors[name] = files.read(name);
  change(tensors);
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : tensors)
    infos.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SafetensorsWriter writer(path, infos);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

TEST(Bert, ReadsTheNamesOfOldFilesAndOfABodyAlone) {
  const TemporaryFolder folder;
  const auto file = (folder / "w.safetensors").string();
  const WeightFiles files(fixtures::folder("bert"));
  // As the first files were written: gamma and beta, a tied decoder, a second task, a buffer.
  write_changed("bert", file, [](Tensors& tensors) {
    Tensors old;
    for (const auto& [name, tensor] : tensors) {
      auto key = name;
      if (const auto at = key.find("LayerNorm.weight"); at != std::string::npos)
        key.replace(at, std::string::npos, "LayerNorm.gamma");
      if (const auto at = key.find("LayerNorm.bias"); at != std::string::npos)
        key.replace(at, std::string::npos, "LayerNorm.beta");
      old[key] = tensor;
    }
    old["cls.predictions.decoder.weight"] =
        tensors.at("bert.embeddings.word_embeddings.weight").clone();
    old["cls.predictions.decoder.bias"] = tensors.at("cls.predictions.bias").clone();
    old["cls.seq_relationship.bias"] = torch::zeros({2});
    old["bert.embeddings.position_ids"] = torch::arange(24).view({1, 24});
    tensors = old;
  });
  const auto sizes = language_model_config(fixtures::folder("bert").string());
  const Loaded old(*sizes, 3, comm::single());
  const auto report = old.load(file);
  EXPECT_THAT(report.kept, IsEmpty());
  EXPECT_THAT(report.left_over,
              ElementsAre("bert.embeddings.position_ids", "cls.seq_relationship.bias"));
  for (const auto& name : files.names())
    EXPECT_TRUE(old.engine->parameter(name).equal(files.read(name))) << name;

  // Parameters that lie far within a unit, and a tied one that differs at its end.
  EXPECT_THAT(Loaded(*sizes, 3, comm::single(), 1 << 20).load(file).kept, IsEmpty());
  const auto other = (folder / "other.safetensors").string();
  write_changed("bert", other, [](Tensors& tensors) {
    auto bias = tensors.at("cls.predictions.bias").clone();
    bias[bias.size(0) - 1] += 1;
    tensors["cls.predictions.decoder.bias"] = bias;
  });
  EXPECT_THAT(
      message_of<CheckpointError>([&] { Loaded(*sizes, 3, comm::single(), 1 << 20).load(other); }),
      HasSubstr("cls.predictions.decoder.bias"));

  // A BertModel's file begins at the embeddings, and a head for classes is new.
  write_changed("bert", file, [](Tensors& tensors) {
    Tensors body;
    for (const auto& [name, tensor] : tensors) {
      if (name.starts_with("bert.")) body[name.substr(5)] = tensor;
    }
    tensors = body;
  });
  const auto classes = language_model_config(fixtures::folder("bert").string());
  classes->set_head(Head::classes, {"no", "yes", "perhaps"});
  const Loaded fresh(*classes, 2, comm::single());
  EXPECT_THAT(fresh.load(file).kept,
              UnorderedElementsAre("bert.pooler.dense.weight", "bert.pooler.dense.bias",
                                   "classifier.weight", "classifier.bias"));
  EXPECT_GT(fresh.engine->parameter("classifier.weight").abs().sum().item<double>(), 0);
  EXPECT_THAT(message_of<CheckpointError>([&] { load_pretrained(*fresh.engine, file); }),
              AllOf(HasSubstr("classifier.weight"), HasSubstr("bert.pooler.dense.bias")));
}

TEST(BertConfig, IsWrittenAsItIsReadAndCountsItsParameters) {
  for (const auto& model : kModels) {
    const auto config = BertConfig::from_json(fixtures::config(model).dump(), "config.json");
    EXPECT_EQ(BertConfig::from_json(config.to_json(), "again"), config) << config.to_json();
    const auto sizes = language_model_config(fixtures::folder(model).string());
    int64_t elements = 0;
    std::vector<std::array<int64_t, 2>> matrices;
    const auto built = sizes->build();
    for (const auto& parameter : built->module().parameters()) {
      elements += parameter.numel();
      if (parameter.dim() == 2) matrices.push_back({parameter.size(0), parameter.size(1)});
    }
    EXPECT_EQ(elements, sizes->parameter_count());
    EXPECT_THAT(sizes->matrices(), ::testing::UnorderedElementsAreArray(matrices));
  }
  EXPECT_THAT(language_model_config(fixtures::folder("bert-classes").string())->labels(),
              ElementsAre("bad", "fair", "good"));
  const auto of = [](const std::string& json) { return BertConfig::from_json(json, "c"); };
  EXPECT_EQ(of(R"({"model_type": "bert"})").parameter_count(), 109514298);  // BERT-base's
  EXPECT_EQ(of(R"({"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24,
                   "num_attention_heads": 16, "intermediate_size": 4096})")
                .parameter_count(),
            335174458);  // BERT-large's
  EXPECT_EQ(of(R"({"pad_token_id": null})").padding, -1);
}

TEST(BertConfig, RefusesByNameWhatIsNotComputed) {
  const std::vector<std::array<std::string, 3>> cases{
      {R"({"model_type": "bert", "hidden_act": "mish"})", "hidden_act", "mish"},
      {R"({"model_type": "bert", "position_embedding_type": "relative_key"})",
       "position_embedding_type", "relative_key"},
      {R"({"model_type": "bert", "is_decoder": true})", "is_decoder", "true"},
      {R"({"model_type": "bert", "add_cross_attention": true})", "add_cross_attention", "true"},
      {R"({"model_type": "bert", "tie_word_embeddings": false})", "tie_word_embeddings", "false"},
      {R"({"model_type": "bert", "problem_type": "regression"})", "problem_type", "regression"},
      {R"({"model_type": "bert", "quantization_config": {"bits": 4}})", "quantization_config", ""},
      {R"({"model_type": "bert", "hidden_size": 10})", "hidden_size", "12"},
      {R"({"model_type": "bert", "pad_token_id": 30522})", "pad_token_id", "30522"},
      {R"({"model_type": "bert", "hidden_dropout_prob": 1})", "hidden_dropout_prob", "1"},
      {R"({"model_type": "bert", "id2label": {"1": "a", "2": "b"}})", "id2label", "from 0"},
      {R"({"model_type": "bert", "architectures": ["BertForSequenceClassification"],
          "id2label": {"0": "a"}})",
       "id2label", "1 classes"}};
  for (const auto& [json, key, value] : cases) {
    EXPECT_THAT(message_of<ConfigError>(
                    [&, text = json] { language_model_config_from_json(text, "this.json"); }),
                AllOf(HasSubstr("this.json"), HasSubstr(key), HasSubstr(value)))
        << json;
  }
  EXPECT_THAT(message_of<ConfigError>([] {
                language_model_config(fixtures::folder("llama").string())
                    ->set_head(Head::classes, {"a", "b"});
              }),
              HasSubstr("next token"));
}

TEST(Bert, RefusesWhatDoesNotFit) {
  const auto model = language_model_config(fixtures::folder("bert").string())->build();
  const auto tokens = torch::ones({2, 5}, at::kLong);
  const auto refused = [&](const Texts& texts, const at::Tensor& targets) {
    return message_of<ConfigError>([&] { model->encoder()->loss(texts, targets); });
  };
  EXPECT_THAT(refused({tokens.to(at::kInt)}, tokens), HasSubstr("tokens as Long"));
  EXPECT_THAT(refused({tokens, tokens.narrow(1, 0, 2)}, tokens), HasSubstr("types as Long"));
  EXPECT_THAT(refused({tokens, tokens * 2}, tokens), HasSubstr("type_vocab_size"));
  EXPECT_THAT(refused({tokens, {}, tokens}, tokens), HasSubstr("a mask as Bool"));
  EXPECT_THAT(refused({tokens}, tokens.select(1, 0)), AllOf(HasSubstr("(2, 5)"), HasSubstr("(2)")));
  EXPECT_THAT(refused({torch::ones({1, 25}, at::kLong)}, torch::ones({1, 25}, at::kLong)),
              AllOf(HasSubstr("25"), HasSubstr("24"), HasSubstr("max_position_embeddings")));
  EXPECT_THAT(message_of<ConfigError>([&] { model->logits_last(tokens); }),
              HasSubstr("next token"));
}

}  // namespace
}  // namespace zero
