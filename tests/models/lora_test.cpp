// LoRA as a change of a model: what it computes, what an engine keeps and sends of it, and peft's
// files.
#include "zero/models/lora/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/models/tuned.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/layers/projection.h"
#include "zero/train/adapter_files.h"

namespace zero {
namespace {

namespace nn = torch::nn;
using comm::Collective;
using comm::run_as_threads;
using fixtures::config;
using fixtures::Tuned;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(NamePattern, ReadsNamesAndExpressions) {
  EXPECT_THAT(NamePattern::parse("q_proj, v_proj").names, ElementsAre("q_proj", "v_proj"));
  EXPECT_EQ(NamePattern::parse(R"(.*\.(q|v)_proj)").expression, R"(.*\.(q|v)_proj)");
  EXPECT_TRUE(NamePattern::parse("all-linear").all_linear);
  for (const char* text : {"q_proj,v_proj", ".*_proj", "all-linear", ""})
    EXPECT_EQ(NamePattern::parse(text).text(), text);
  EXPECT_THAT(message_of<ConfigError>([] { NamePattern::parse("(q"); }), HasSubstr("'(q'"));
}

TEST(AddLora, AddsAProductToALinearLayerOfAnyModule) {
  nn::Sequential net(nn::Linear(6, 5), nn::Tanh(), nn::Linear(nn::LinearOptions(5, 4).bias(false)));
  net->to(at::kDouble);
  const void* data = net[0]->as<nn::LinearImpl>()->weight.data_ptr();
  const auto x = torch::randn({3, 6}, at::kDouble);
  const auto before = net->forward(x).detach();
  const auto lora = add_lora(*net, {.rank = 2, .alpha = 6, .targets = {.names = {"0"}}});
  EXPECT_EQ(lora.elements(), 2 * (6 + 5));
  EXPECT_TRUE(net->forward(x).equal(before)) << "B begins as zeros";

  std::vector<std::string> trained;
  for (const auto& parameter : net->named_parameters()) {
    if (parameter.value().requires_grad()) trained.push_back(parameter.key());
    EXPECT_EQ(parameter.value().scalar_type(), at::kDouble);
  }
  EXPECT_THAT(trained, ElementsAre("0.lora_A.weight", "0.lora_B.weight"));
  auto parameters = net->named_parameters();
  const auto weight = parameters["0.weight"];
  EXPECT_EQ(weight.data_ptr(), data);
  const auto a = parameters["0.lora_A.weight"];
  const auto b = parameters["0.lora_B.weight"];
  EXPECT_LE(a.abs().max().item<double>(), 1 / std::sqrt(6));
  EXPECT_GT(a.std().item<double>(), 0.1);
  {
    const at::NoGradGuard no_grad;
    b.normal_();
  }
  const auto merged = weight + 3 * b.mm(a);
  const auto hidden = x.mm(merged.t()) + parameters["0.bias"];
  const auto y = hidden.tanh().mm(parameters["2.weight"].t());
  EXPECT_TRUE(net->forward(x).allclose(y));
  const auto expected = torch::autograd::grad({y.pow(2).sum()}, {a, b});
  const auto found = torch::autograd::grad({net->forward(x).pow(2).sum()}, {a, b});
  EXPECT_TRUE(found[0].allclose(expected[0]) && found[1].allclose(expected[1]));

  // The order of magnitude alone differs with rank-stabilised scales.
  EXPECT_DOUBLE_EQ((LoraSettings{.rank = 16, .alpha = 8}).scale(), 0.5);
  EXPECT_DOUBLE_EQ((LoraSettings{.rank = 16, .alpha = 8, .rslora = true}).scale(), 2);
  const auto clone = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(clone->forward(x).equal(net->forward(x)));
}

TEST(AddLora, LearnsTheLengthsOfRowsWithDora) {
  nn::Sequential net(nn::Linear(6, 5));
  net->to(at::kDouble);
  const auto x = torch::randn({3, 6}, at::kDouble);
  const auto before = net->forward(x).detach();
  const auto lora =
      add_lora(*net, {.rank = 2, .alpha = 6, .dora = true, .targets = {.names = {"0"}}});
  EXPECT_EQ(lora.elements(), 2 * (6 + 5) + 5);
  auto parameters = net->named_parameters();
  const auto weight = parameters["0.weight"];
  const auto magnitude = parameters["0.lora_magnitude_vector"];
  EXPECT_TRUE(magnitude.allclose(weight.norm(2, 1), 1e-6));
  EXPECT_TRUE(net->forward(x).allclose(before, 1e-6));
  const auto a = parameters["0.lora_A.weight"];
  const auto b = parameters["0.lora_B.weight"];
  {
    const at::NoGradGuard no_grad;
    b.normal_();
    magnitude.normal_();
  }
  // The lengths of the sum's rows are constants in backward.
  const auto sum = weight + 3 * b.mm(a);
  const auto factor = magnitude / sum.detach().norm(2, 1);
  const auto y = x.mm((factor.unsqueeze(1) * sum).t()) + parameters["0.bias"];
  EXPECT_TRUE(net->forward(x).allclose(y, 1e-5, 1e-6));
  const auto expected = torch::autograd::grad({y.pow(2).sum()}, {a, b, magnitude});
  const auto found = torch::autograd::grad({net->forward(x).pow(2).sum()}, {a, b, magnitude});
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(found[i].allclose(expected[i], 1e-5, 1e-6)) << i;
  const auto clone = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(clone->forward(x).equal(net->forward(x)));

  const auto model = language_model_config(fixtures::folder("llama").string())->build();
  tile_linears(model->module(), 100);
  EXPECT_THAT(message_of<ConfigError>([&] { add_lora(model->module(), {.dora = true}); }),
              HasSubstr("in tiles"));
}

TEST(AddLora, DropsInputsOfTheProductInTrainingAlone) {
  nn::Sequential net(nn::Linear(64, 64));
  add_lora(*net, {.rank = 4, .dropout = 0.5, .targets = {.all_linear = true}});
  {
    const at::NoGradGuard no_grad;
    net->named_parameters()["0.lora_B.weight"].normal_();
  }
  const auto x = torch::randn({8, 64});
  EXPECT_FALSE(net->forward(x).equal(net->forward(x)));
  net->eval();
  EXPECT_TRUE(net->forward(x).equal(net->forward(x)));
}

TEST(AddLora, RefusesWhatItCannotAdapt) {
  const auto message = [](const LoraSettings& settings) {
    struct Net : nn::Module {
      Net() {
        fc = register_module("fc", nn::Linear(4, 4));
        norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({4})));
        ours = register_module("ours", Projection(ProjectionOptions{4, 4}));
        shared = register_module("shared", std::make_shared<nn::Module>("shared"));
        shared->register_parameter("weight", ours->weight);
      }
      nn::Linear fc{nullptr};
      nn::LayerNorm norm{nullptr};
      Projection ours{nullptr};
      std::shared_ptr<nn::Module> shared;
    };
    Net net;
    const auto text = message_of<ConfigError>([&] { add_lora(net, settings); });
    for (const auto& parameter : net.named_parameters())
      EXPECT_TRUE(parameter.value().requires_grad()) << "nothing was changed";
    return text;
  };
  EXPECT_THAT(message({.targets = {.names = {"fc"}}}),
              AllOf(HasSubstr("'fc'"), HasSubstr("zero::Projection")));
  EXPECT_THAT(message({.targets = {.names = {"norm"}}}), HasSubstr("'norm' is no linear layer"));
  EXPECT_THAT(message({.targets = {.names = {"oure"}}}), HasSubstr("'ours'"));
  EXPECT_THAT(message({.targets = {.names = {"none"}}, .names_may_miss = true}),
              HasSubstr("'none' fits no module"));
  EXPECT_THAT(message({.targets = {.expression = "h\\..*"}}),
              HasSubstr("regular expression 'h\\..*', which fits no module's whole path ('fc')"));
  EXPECT_THAT(message({.targets = {.names = {"ours"}}}), HasSubstr("shares its weight"));
  EXPECT_THAT(message({}), HasSubstr("q_proj"));
  EXPECT_THAT(message({.rank = 0}), HasSubstr("rank"));
  EXPECT_THAT(message({.dropout = 1}), HasSubstr("dropout"));
  nn::Sequential twice(nn::Linear(4, 4));
  add_lora(*twice, {.targets = {.names = {"0"}}});
  EXPECT_THAT(message_of<ConfigError>([&] { add_lora(*twice, {.targets = {.names = {"0"}}}); }),
              HasSubstr("already"));
}

TEST(Freeze, TakesNamesOfParametersAndOfModules) {
  const auto model = language_model_config(fixtures::folder("llama").string())->build();
  auto& module = model->module();
  const auto trained = [&] {
    int64_t count = 0;
    for (const auto& parameter : module.parameters()) count += parameter.requires_grad() ? 1 : 0;
    return count;
  };
  const auto all = trained();
  const auto count = freeze(module, NamePattern::parse("embed_tokens, layers.0"));
  EXPECT_EQ(count, all - trained());
  EXPECT_FALSE(module.named_parameters()["model.embed_tokens.weight"].requires_grad());
  EXPECT_FALSE(module.named_parameters()["model.layers.0.mlp.up_proj.weight"].requires_grad());
  EXPECT_TRUE(module.named_parameters()["model.layers.1.mlp.up_proj.weight"].requires_grad());
  freeze(module, NamePattern::parse(R"(.*layers\.[0-9]+\..*)"));
  EXPECT_FALSE(module.named_parameters()["model.layers.1.mlp.up_proj.weight"].requires_grad());
  EXPECT_THAT(message_of<ConfigError>([&] { freeze(module, NamePattern::parse("embed_token")); }),
              HasSubstr("embed_token"));
}

const LoraSettings kSettings{
    .rank = 4, .alpha = 8, .targets = {.names = {"q_proj", "v_proj", "down_proj"}}};

TEST(Lora, EveryStageTrainsItAlikeAndKeepsTheRest) {
  const auto folder = fixtures::folder("llama").string();
  const auto data = fixtures::variants("llama").front();
  const WeightFiles files(folder);
  for (const int ranks : {1, 2, 3}) {
    std::array<std::vector<float>, 4> losses;
    for (int stage = 0; stage <= 3; ++stage) {
      run_as_threads(ranks, [&, stage](std::shared_ptr<comm::Group> group) {
        Tuned tuned(folder, kSettings, config(stage), group);
        std::vector<float> mine;
        for (int i = 0; i < 3; ++i) mine.push_back(tuned.step(data));
        for (const auto& name : files.names())
          EXPECT_TRUE(tuned.engine->parameter(name).equal(files.read(name))) << name;
        if (group->rank() == 0) losses[static_cast<size_t>(stage)] = mine;
      });
      EXPECT_NEAR(losses[static_cast<size_t>(stage)][0], data.loss, 1e-5 * data.loss);
      EXPECT_LT(losses[static_cast<size_t>(stage)][2], data.loss);
      EXPECT_EQ(losses[static_cast<size_t>(stage)], losses[0]) << stage << ", ranks " << ranks;
    }
  }
}

TEST(Lora, EveryStageTrainsMagnitudesAlikeAndMergesThem) {
  const auto folder = fixtures::folder("llama").string();
  const auto data = fixtures::variants("llama").front();
  auto settings = kSettings;
  settings.dora = true;
  const TemporaryFolder merged;
  for (const auto& each : kBaseFormats) {
    const auto format = each.second;
    std::vector<float> expected;
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(std::to_string(stage) + ", " + std::string(each.first));
      run_as_threads(2, [&, stage](std::shared_ptr<comm::Group> group) {
        Tuned tuned(folder, settings, config(stage), group, 0, format);
        begin_magnitudes(*tuned.engine, tuned.lora, quantised_weights(tuned.model->module()));
        const auto before = tuned.engine->parameter(tuned.lora.layers.front().magnitude());
        std::vector<float> losses;
        for (int i = 0; i < 3; ++i) losses.push_back(tuned.step(data));
        EXPECT_FALSE(tuned.engine->parameter(tuned.lora.layers.front().magnitude()).equal(before));
        const auto logits = tuned.logits(data);
        tuned.export_merged(merged.path().string());
        group->barrier();
        if (group->rank() != 0) return;
        if (expected.empty()) expected = losses;
        EXPECT_EQ(losses, expected);
        if (format == BaseFormat::as_they_are) {
          EXPECT_NEAR(losses[0], data.loss, 1e-5 * data.loss);
        }
        const auto model = language_model_config(merged.path().string())->build();
        Engine engine(model->module(), AdamW{}, config(0));
        load_pretrained(engine, merged.path().string());
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(model->logits_last(data.tokens).allclose(logits, 1e-4, 1e-5));
      });
    }
  }
}

TEST(Lora, OnlyAdaptersHaveGradientsAndStatesAndAreReduced) {
  const auto folder = fixtures::folder("llama").string();
  const auto data = fixtures::variants("llama").front();
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      auto c = config(stage, /*bf16=*/true);
      c.unit_bytes = 1;  // each parameter is a unit, which one operator of a pass uses
      Tuned tuned(folder, kSettings, c, group);
      auto& engine = *tuned.engine;
      tuned.step(data);
      group->traffic().reset();
      tuned.step(data);
      int64_t frozen = 0;
      int64_t trained = 0;
      for (const auto& unit : engine.layout().units()) {
        const auto first = static_cast<size_t>(unit.segments.front().parameter);
        const auto& name = engine.layout().parameters()[first].name;
        (name.find("lora_") == std::string::npos ? frozen : trained) += unit.numel;
      }
      EXPECT_GE(trained, tuned.lora.elements());
      const auto share = [&](int from) { return stage >= from ? 2 : 1; };
      const auto& ledger = *group->ledger();
      EXPECT_EQ(ledger.usage(Category::parameters).current, 2 * (frozen + trained) / share(3));
      EXPECT_EQ(ledger.usage(Category::gradients).peak, 2 * trained / share(2));
      EXPECT_EQ(ledger.usage(Category::optimizer).current, 12 * trained / share(1));
      const auto sent = [&](Collective kind) { return group->traffic().count(kind).logical_bytes; };
      EXPECT_EQ(sent(Collective::all_reduce), stage == 0 ? 2 * trained : 0);
      EXPECT_EQ(sent(Collective::reduce_scatter), stage == 0 ? 0 : trained);
      if (stage < 3) {
        EXPECT_EQ(sent(Collective::all_gather), stage == 0 ? 0 : trained);
      }
      const auto formula = engine.traffic_formula();
      EXPECT_EQ(sent(Collective::all_reduce), formula.all_reduce);
      EXPECT_EQ(sent(Collective::reduce_scatter), formula.reduce_scatter);
      // At stage 3 the embedding's look-up is not repeated in backward, nor are the norms.
      if (stage == 3) {
        EXPECT_LE(sent(Collective::all_gather), formula.all_gather);
        EXPECT_EQ(formula.all_gather, 2 * (frozen + trained));
      } else {
        EXPECT_EQ(sent(Collective::all_gather), formula.all_gather);
      }
      const auto memory = engine.memory_formula();
      EXPECT_EQ(memory.parameters, ledger.usage(Category::parameters).current);
      EXPECT_EQ(memory.optimizer, ledger.usage(Category::optimizer).current);
    });
  }
}

TEST(Lora, RecomputationAndTilesChangeNoLoss) {
  const auto folder = fixtures::folder("llama").string();
  const auto data = fixtures::variants("llama").front();
  std::vector<float> expected;
  for (const int variant : {0, 1, 2}) {
    run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      Tuned tuned(folder, kSettings, config(3), group, variant == 2 ? 100 : 0);
      if (variant == 1) tuned.model->recompute({.every = 1});
      std::vector<float> losses;
      for (int i = 0; i < 3; ++i) losses.push_back(tuned.step(data));
      if (group->rank() != 0) return;
      if (variant == 0) expected = losses;
      for (size_t i = 0; i < losses.size(); ++i) {
        const double tolerance = variant == 1 ? 0 : 1e-5 * expected[i];
        EXPECT_NEAR(losses[i], expected[i], tolerance);
      }
    });
  }
}

TEST(AdapterFiles, AreReadAtAnyStageAndMergedWithOneRounding) {
  for (const std::string name : {"llama", "gpt2"}) {
    const auto base = fixtures::folder(name).string();
    const auto data = fixtures::variants(name).front();
    const bool gpt2 = name == "gpt2";
    const LoraSettings settings{.rank = 4,
                                .alpha = 6,
                                .rslora = true,
                                .targets = {.all_linear = true},
                                .prefix = gpt2 ? "transformer." : ""};
    const TemporaryFolder files;
    const TemporaryFolder whole;
    const auto folder = files.path().string();
    for (const int64_t tiles : {0, 100}) {
      SCOPED_TRACE(name + " in tiles of " + std::to_string(tiles));
      run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
        Tuned tuned(base, settings, config(tiles > 0 ? 3 : 1, /*bf16=*/true), group, tiles);
        if (tiles == 0) {
          tuned.draw();
          save_adapter(*tuned.engine, tuned.lora, folder, {.base_model = "the/base"});
          group->barrier();
        } else {  // others read what these have written
          load_adapter(*tuned.engine, tuned.lora, folder);
        }
        const SafetensorsReader adapter(files / kAdapterWeights);
        EXPECT_EQ(adapter.tensors().size(), 2 * tuned.lora.layers.size());
        tuned.export_merged(whole.path().string());
        group->barrier();
        const WeightFiles merged(whole.path());
        const WeightFiles original(base);
        EXPECT_EQ(merged.names().size(), original.names().size());
        const auto prefix = std::string("base_model.model.") + settings.prefix;
        for (const auto& layer : tuned.lora.layers) {
          const auto a = adapter.read(prefix + layer.a());
          const auto b = adapter.read(prefix + layer.b());
          EXPECT_TRUE(tuned.engine->parameter(layer.a()).equal(a));
          auto product = b.mm(a).mul(3);  // 6 / sqrt(4)
          if (gpt2) product = product.t();
          const auto rounded =
              original.read(settings.prefix + layer.path + ".weight").to(at::kBFloat16);
          const auto sum = (rounded.to(at::kFloat) + product).to(at::kBFloat16);
          EXPECT_TRUE(merged.read(layer.path + ".weight").equal(sum)) << layer.path;
        }
        group->barrier();
      });
    }
    auto read = read_adapter_config(folder);
    EXPECT_EQ(read.rank, 4);
    EXPECT_EQ(read.alpha, 6);
    EXPECT_TRUE(read.rslora);
    EXPECT_EQ(read.targets.names.size(), gpt2 ? 8u : 14u);
    EXPECT_THAT(read.targets.names.front(), HasSubstr(gpt2 ? "transformer.h.0" : "model.layers.0"));
    // The merged model computes what the adapted one does.
    run_as_threads(1, [&](std::shared_ptr<comm::Group> group) {
      read.prefix = settings.prefix;
      Tuned tuned(base, read, config(0), group);
      load_adapter(*tuned.engine, tuned.lora, folder);
      const auto expected = tuned.logits(data);
      tuned.export_merged(whole.path().string());
      const auto model = language_model_config(whole.path().string())->build();
      Engine engine(model->module(), AdamW{}, config(0));
      load_pretrained(engine, whole.path().string());
      const at::NoGradGuard no_grad;
      model->module().eval();
      EXPECT_TRUE(model->logits_last(data.tokens).allclose(expected, 1e-4, 1e-5));
    });
  }
}

TEST(AdapterFiles, KeepModulesThatAreTrainedWhole) {
  const auto base = fixtures::folder("llama").string();
  const auto data = fixtures::variants("llama").front();
  auto settings = kSettings;
  // An adapter's file may name modules that other models have.
  settings.modules_to_save = {"lm_head", "norm", "layers.1.post_attention_layernorm", "score"};
  settings.targets.names.emplace_back("query");
  settings.names_may_miss = true;
  const TemporaryFolder files;
  run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    Tuned tuned(base, settings, config(2), group);
    EXPECT_THAT(tuned.lora.saved_parameters,
                ::testing::UnorderedElementsAre("lm_head.weight", "model.norm.weight",
                                                "model.layers.1.post_attention_layernorm.weight"));
    for (int i = 0; i < 2; ++i) tuned.step(data);
    EXPECT_FALSE(
        tuned.engine->parameter("lm_head.weight").equal(WeightFiles(base).read("lm_head.weight")));
    save_adapter(*tuned.engine, tuned.lora, files.path().string());
    group->barrier();
    const auto read = read_adapter_config(files.path().string());
    // To peft "norm" would be every module whose name ends with these letters.
    EXPECT_THAT(read.modules_to_save,
                ElementsAre("lm_head", "model.norm", "layers.1.post_attention_layernorm"));
    Tuned again(base, read, config(3), group);
    load_adapter(*again.engine, again.lora, files.path().string());
    EXPECT_TRUE(again.logits(data).equal(tuned.logits(data)));
  });
  settings.modules_to_save = {"q_proj"};
  const auto model = language_model_config(base)->build();
  EXPECT_THAT(message_of<ConfigError>(
                  [&] { add_lora(model->module(), {.targets = {.names = {"lm_head"}}}); }),
              AllOf(HasSubstr("'lm_head' is a table"), HasSubstr("modules_to_save")));
  EXPECT_THAT(message_of<ConfigError>([&] { add_lora(model->module(), settings); }),
              HasSubstr("either"));
  settings.targets = {.all_linear = true};
  settings.modules_to_save = {"layers.0", "q_proj", "lm_head"};  // one lies in another
  const auto lora = add_lora(model->module(), settings);
  for (const auto& layer : lora.layers) {
    EXPECT_THAT(layer.path, ::testing::Not(HasSubstr("q_proj")));
    EXPECT_THAT(layer.path, ::testing::Not(HasSubstr("layers.0.")));
  }
  EXPECT_EQ(std::count(lora.saved_parameters.begin(), lora.saved_parameters.end(),
                       "model.layers.0.self_attn.q_proj.weight"),
            1);
}

TEST(AdapterFiles, RefuseWhatIsNotComputed) {
  const TemporaryFolder folder;
  const auto of = [&](const char* text) {
    folder.write(kAdapterConfig, text);
    return message_of<CheckpointError>([&] { read_adapter_config(folder.path().string()); });
  };
  EXPECT_THAT(of("{"), HasSubstr(kAdapterConfig));
  EXPECT_THAT(of(R"({"peft_type": "IA3"})"), HasSubstr("IA3"));
  EXPECT_THAT(of(R"({"peft_type": "LORA", "use_qalora": true})"), HasSubstr("use_qalora"));
  EXPECT_THAT(of(R"({"peft_type": "LORA", "bias": "all"})"), HasSubstr("bias"));
  EXPECT_THAT(of(R"({"peft_type": "LORA", "rank_pattern": {"q": 4}})"), HasSubstr("rank_pattern"));
  EXPECT_THAT(of(R"({"peft_type": "LORA", "r": -1})"), HasSubstr("-1"));
  EXPECT_THAT(of(R"({"peft_type": "LORA", "init_lora_weights": "pissa"})"), HasSubstr("pissa"));
  EXPECT_THAT(of(R"({"peft_type": "LORA", "target_modules": "(q"})"), HasSubstr("nothing was"))
      << "the expression is read with the model";
  EXPECT_EQ(of(R"({"peft_type": "LORA", "rank_pattern": {}, "use_dora": false, "eva_config": null,
                   "init_lora_weights": "gaussian", "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]})"),
            "nothing was thrown");

  const auto base = fixtures::folder("llama").string();
  Tuned tuned(base, kSettings, config(0), comm::single());
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { load_adapter(*tuned.engine, tuned.lora, folder.path().string()); }),
              HasSubstr(kAdapterWeights));
  save_adapter(*tuned.engine, tuned.lora, folder.path().string());
  auto others = kSettings;
  others.targets.names = {"q_proj"};
  Tuned fewer(base, others, config(0), comm::single());
  const auto load = [&](Tuned& into) {
    return message_of<CheckpointError>(
        [&] { load_adapter(*into.engine, into.lora, folder.path().string()); });
  };
  EXPECT_THAT(load(fewer), AllOf(HasSubstr("down_proj"), HasSubstr("does not have")));
  others = kSettings;
  others.rank = 2;
  Tuned thinner(base, others, config(0), comm::single());
  EXPECT_THAT(load(thinner), AllOf(HasSubstr("(4, "), HasSubstr("(2, ")));
  others = kSettings;
  others.targets = {.all_linear = true};
  Tuned more(base, others, config(0), comm::single());
  EXPECT_THAT(load(more), HasSubstr("has no tensor"));
}

}  // namespace
}  // namespace zero
