// Weights of Hugging Face's folders go straight into an engine's shards, and out of them again.
#include "zero/engine/pretrained.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <array>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/models/fixtures.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/checkpoint/foreign/pickle.h"
#include "zero/checkpoint/foreign/pt_writer.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/initial_values.h"
#include "zero/models/layers/projection.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/models/lora/lora.h"
#include "zero/models/lora/quantised_base.h"
#include "zero/train/adapter_files.h"

namespace zero {
namespace {

using comm::run_as_threads;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

// A language model whose engine has made its shards, without values.
struct Loaded {
  Loaded(const std::string& folder, Config config, std::shared_ptr<comm::Group> group,
         int64_t tile_elements = 0) {
    const WithoutValues none;
    model = language_model_config(folder)->build();
    tile_linears(model->module(), tile_elements);
    auto tensors = named_tensors(model->module());
    tensors.values_follow = true;
    engine =
        std::make_unique<Engine>(std::move(tensors), rest(), std::move(config), std::move(group));
  }
  static std::vector<ParameterGroup> rest() {
    return {ParameterGroup{.optimizer = AdamW{.lr = 1e-2}, .rest = true}};
  }
  PretrainedOptions options() const {
    return {.places = model->export_places(), .tied = model->tied_names()};
  }

  std::unique_ptr<LanguageModel> model;
  std::unique_ptr<Engine> engine;
};

Config config(int stage, bool bf16 = false) {
  Config result;
  result.stage = stage;
  result.bf16 = bf16;
  result.unit_bytes = 4096;
  return result;
}

TEST(Pretrained, EveryStageReadsTheSameWeights) {
  const TemporaryFolder saves;
  for (const std::string name : {"llama-tied", "qwen2"}) {  // one file, and shards
    const auto folder = fixtures::folder(name).string();
    const auto expected = fixtures::variants(name).front();
    const WeightFiles files(folder);
    std::array<float, 4> losses{};
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(name + ", stage " + std::to_string(stage));
      run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
        const bool first = group->rank() == 0;
        Loaded loaded(folder, config(stage), group);
        auto& engine = *loaded.engine;
        const std::function<void()> too_early[] = {
            [&] { engine.step(); }, [&] { engine.parameter(engine.parameter_names().front()); },
            [&] { engine.save((saves / "states").string()); },
            [&] { engine.save_full((saves / "states.safetensors").string()); },
            [&] { save_pretrained(engine, saves.path().string()); }};
        for (const auto& call : too_early)
          EXPECT_THAT(message_of<Error>(call), HasSubstr("without values"));
        EXPECT_TRUE(fs::is_empty(saves.path()));
        if (stage == 3) {
          const c10::NoGradGuard no_grad;
          EXPECT_THAT(message_of<Error>([&] { loaded.model->logits(expected.tokens); }),
                      HasSubstr("without values"));
        }
        const auto report = load_pretrained(engine, folder, loaded.options());
        EXPECT_THAT(report.missing, IsEmpty());
        EXPECT_THAT(report.left_over, IsEmpty());
        for (const auto& info : engine.parameter_infos())
          EXPECT_TRUE(engine.parameter(info.name).equal(files.read(info.name))) << info.name;
        for (int step = 0; step < 2; ++step) {
          const auto loss = loaded.model->loss(expected.tokens, expected.targets);
          if (step == 0) {
            EXPECT_NEAR(loss.item<double>(), expected.loss, 1e-5 * expected.loss);
          } else if (first) {
            losses[static_cast<size_t>(stage)] = loss.item<float>();
          }
          engine.backward(loss);
          engine.step();
        }
      });
      EXPECT_EQ(losses[static_cast<size_t>(stage)], losses[0]);
    }
    EXPECT_LT(losses[0], expected.loss);
  }
}

TEST(Pretrained, MasterWeightsKeepTheBitsOfTheFile) {
  const auto folder = fixtures::folder("qwen3").string();
  const WeightFiles files(folder);
  run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    Loaded loaded(folder, config(3, true), group);
    load_pretrained(*loaded.engine, folder, loaded.options());
    const auto name = loaded.engine->parameter_names().front();
    EXPECT_TRUE(loaded.engine->parameter(name).equal(files.read(name)));
    loaded.engine->visit_parameters([&](const std::string& each, const at::Tensor& value) {
      EXPECT_TRUE(value.equal(files.read(each).to(at::kBFloat16))) << each;
    });
  });
}

TEST(Pretrained, WhatIsWrittenIsReadAtAnyStageWholeOrInShards) {
  const TemporaryFolder folder;
  const auto source = fixtures::folder("llama").string();
  const WeightFiles files(source);
  const std::string copy = folder / "model-before.safetensors";  // of the folder's owner
  std::ofstream(copy) << "copy";
  for (const int64_t tiles : {0, 100}) {
    run_as_threads(3, [&](std::shared_ptr<comm::Group> group) {
      Loaded loaded(source, config(tiles > 0 ? 3 : 1), group, tiles);
      load_pretrained(*loaded.engine, source, loaded.options());
      save_pretrained(*loaded.engine, folder.path().string(),
                      {.places = loaded.model->export_places(),
                       .config_json = loaded.model->config().to_json(),
                       .shard_bytes = 4000});
      group->barrier();
      EXPECT_FALSE(fs::exists(folder / kWeightsFile));
      const WeightFiles written(folder.path());
      EXPECT_EQ(written.names(), files.names());
      for (const auto& name : files.names())
        EXPECT_TRUE(written.read(name).equal(files.read(name))) << name;

      // Another layout reads it; one file takes the place of the shards.
      Loaded other(folder.path().string(), config(2), group);
      load_pretrained(*other.engine, folder.path().string(), other.options());
      save_pretrained(*other.engine, folder.path().string());
      group->barrier();
      EXPECT_FALSE(fs::exists(folder / kWeightsIndex));
      EXPECT_EQ(WeightFiles(folder.path()).names(), files.names());
      group->barrier();
    });
  }
  EXPECT_TRUE(fs::exists(copy));
  EXPECT_EQ(language_model_config(folder.path().string())->to_json(),
            language_model_config(source)->to_json());
}

// A file of weights with changes.
using Tensors = std::map<std::string, at::Tensor>;
void write_changed(const std::string& model, const fs::path& path,
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

TEST(Pretrained, ListsWhatIsMissingAndWhatIsLeftOver) {
  const TemporaryFolder folder;
  const auto file = (folder / "w.safetensors").string();
  const auto source = fixtures::folder("llama-tied").string();
  const auto load = [&](const std::function<void(Tensors&)>& change, PretrainedReport& report,
                        bool allow_missing = false) {
    write_changed("llama-tied", file, change);
    Loaded loaded(source, config(3), comm::single());
    auto options = loaded.options();
    options.allow_missing = allow_missing;
    report = load_pretrained(*loaded.engine, file, options);
  };
  const std::string embedding = "model.embed_tokens.weight";
  const std::string norm = "model.norm.weight";
  PretrainedReport report;

  // Without the prefix, with a head that is tied here, in another dtype, and with a buffer of old
  // files.
  load(
      [&](Tensors& tensors) {
        Tensors stripped;
        for (const auto& [name, tensor] : tensors) stripped[name.substr(6)] = tensor;
        stripped["lm_head.weight"] = tensors.at(embedding).clone();
        stripped["layers.0.self_attn.rotary_emb.inv_freq"] = torch::ones({2});
        stripped["norm.weight"] = tensors.at(norm).to(at::kBFloat16);
        tensors = stripped;
      },
      report);
  EXPECT_THAT(report.left_over, ElementsAre("layers.0.self_attn.rotary_emb.inv_freq"));

  const auto refused = [&](const std::function<void(Tensors&)>& change, bool allow_missing) {
    return message_of<CheckpointError>([&] { load(change, report, allow_missing); });
  };
  const auto lose = [&](Tensors& tensors) {
    tensors.erase(norm);
    tensors.erase("model.layers.1.mlp.up_proj.bias");
  };
  EXPECT_THAT(refused(lose, false), AllOf(HasSubstr("2 of the model's"), HasSubstr(norm),
                                          HasSubstr("model.layers.1.mlp.up_proj.bias")));
  EXPECT_THAT(refused(lose, true), HasSubstr(norm)) << "there are no values to keep";
  EXPECT_THAT(refused([&](Tensors& t) { t["lm_head.weight"] = t.at(embedding) + 1; }, false),
              AllOf(HasSubstr("lm_head.weight"), HasSubstr("tie_word_embeddings")));
  EXPECT_THAT(refused([&](Tensors& t) { t[norm] = torch::ones({17}); }, false),
              AllOf(HasSubstr(norm), HasSubstr("(17)"), HasSubstr("(16)")));
  EXPECT_THAT(refused([&](Tensors& t) { t[norm] = torch::ones({16}, at::kLong); }, false),
              HasSubstr("Long"));

  // A model that has values keeps those that are missing.
  write_changed("llama-tied", file, lose);
  const auto model = language_model_config(source)->build();
  Engine engine(model->module(), AdamW{}, config(2));
  report = load_pretrained(engine, file, {.allow_missing = true});
  EXPECT_THAT(report.missing,
              testing::UnorderedElementsAre(norm, "model.layers.1.mlp.up_proj.bias"));
  EXPECT_TRUE(engine.parameter(norm).equal(torch::ones({16})));
}

TEST(Pretrained, ARankHoldsItsSlicesAndAPiece) {
  const TemporaryFolder folder;
  const auto sizes = language_model_config_from_json(
      R"({"model_type": "llama", "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 1024,
          "num_hidden_layers": 4, "num_attention_heads": 4})",
      "sizes");
  {
    const auto model = sizes->build();
    Engine engine(model->module(), AdamW{}, config(0));
    save_pretrained(engine, folder.path().string(), {.config_json = sizes->to_json()});
  }
  const int64_t whole = 4 * sizes->parameter_count();
  auto& allocator = HostAllocator::instance();
  allocator.trim();
  run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    if (group->rank() == 0) allocator.reset_peaks();
    group->barrier();
    const auto before = allocator.usage().used.current;
    Loaded loaded(folder.path().string(), config(3), group);
    load_pretrained(*loaded.engine, folder.path().string(), loaded.options());
    group->barrier();
    // Two ranks of one process: each had room for its largest parameter, a third of the model.
    EXPECT_LT(allocator.usage().used.peak - before, whole * 3 / 4);
  });
}

// Writes tensors as torch.save writes a state dict; `within`: under this key, beside another.
void write_torch_file(const fs::path& path, const Tensors& tensors,
                      const std::string& within = {}) {
  foreign::PtWriter writer;
  std::vector<std::pair<std::string, std::string>> items;
  for (const auto& [name, tensor] : tensors)
    items.emplace_back(foreign::pickled::text(name), writer.tensor(tensor, true));
  auto root = foreign::pickled::dict(items);
  if (!within.empty()) {
    root =
        foreign::pickled::dict({{foreign::pickled::text(within), root},
                                {foreign::pickled::text("epoch"), foreign::pickled::integer(3)}});
  }
  writer.write(path, root);
}

TEST(Pretrained, FilesOfTorchAreReadByRangesAtEveryStage) {
  const auto source = fixtures::folder("llama-tied").string();
  const WeightFiles files(source);
  Tensors first;
  Tensors second;
  for (const auto& name : files.names()) {
    auto value = files.read(name);
    // A transpose that was saved as a view is read too.
    if (name.ends_with("down_proj.weight")) value = value.t().contiguous().t();
    (name < "model.layers.1" ? first : second)[name] = value;
  }
  const auto expect_equal = [&](const fs::path& folder) {
    for (const int stage : {0, 3}) {
      run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
        Loaded loaded(source, config(stage), group);
        const auto report = load_pretrained(*loaded.engine, folder.string(), loaded.options());
        EXPECT_THAT(report.missing, IsEmpty());
        for (const auto& name : files.names())
          EXPECT_TRUE(loaded.engine->parameter(name).equal(files.read(name))) << name;
      });
    }
  };
  const TemporaryFolder shards;
  write_torch_file(shards / "pytorch_model-00001-of-00002.bin", first);
  write_torch_file(shards / "pytorch_model-00002-of-00002.bin", second);
  nlohmann::json map;
  for (const auto& [name, tensor] : first) map[name] = "pytorch_model-00001-of-00002.bin";
  for (const auto& [name, tensor] : second) map[name] = "pytorch_model-00002-of-00002.bin";
  shards.write(kTorchWeightsIndex, nlohmann::json{{"weight_map", map}}.dump());
  shards.write("training_args.bin", "no weights");
  expect_equal(shards.path());

  // Within a checkpoint of DistributedDataParallel.
  const TemporaryFolder one;
  Tensors wrapped;
  for (const auto* part : {&first, &second}) {
    for (const auto& [name, tensor] : *part) wrapped["module." + name] = tensor;
  }
  write_torch_file(one / "model.pt", wrapped, "state_dict");
  expect_equal(one.path());
  EXPECT_THAT(WeightFiles(one.path()).left_out(), ElementsAre(HasSubstr("epoch")));

  const auto text = TemporaryFolder::read(one / "model.pt");
  one.write("model.pt", text.substr(0, text.size() / 2));
  EXPECT_THAT(message_of<CheckpointError>([&] { WeightFiles damaged(one.path()); }),
              HasSubstr("model.pt"));
  map["lost.weight"] = "pytorch_model-00002-of-00002.bin";
  shards.write(kTorchWeightsIndex, nlohmann::json{{"weight_map", map}}.dump());
  EXPECT_THAT(message_of<CheckpointError>([&] { WeightFiles damaged(shards.path()); }),
              AllOf(HasSubstr("lost.weight"), HasSubstr("00002-of-00002.bin")));
}

TEST(Pretrained, AModelWhoseOnlyPartIsNamedModuleLoadsWhatItWrote) {
  struct Wrapper : torch::nn::Module {
    Wrapper() { register_module("module", torch::nn::Linear(3, 2)); }
  };
  const TemporaryFolder folder;
  const auto written = std::make_shared<Wrapper>();
  Engine writer(written, Sgd{});
  save_pretrained(writer, folder.path().string());
  Engine reader(std::make_shared<Wrapper>(), Sgd{});
  EXPECT_THAT(load_pretrained(reader, folder.path().string()).left_over, IsEmpty());
  for (const auto& name : reader.parameter_names())
    EXPECT_TRUE(reader.parameter(name).equal(writer.parameter(name))) << name;
}

TEST(Pretrained, BuffersAreWrittenAndReadBack) {
  const auto net = [] {
    return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  };
  const TemporaryFolder folder;
  auto written = net();
  Engine writer(*written, Sgd{});
  written->forward(at::arange(24, at::kFloat).view({8, 3}));  // which counts as a batch
  save_pretrained(writer, folder.path().string());
  auto read = net();
  Engine reader(*read, Sgd{});
  EXPECT_THAT(load_pretrained(reader, folder.path().string()).left_over, IsEmpty());
  auto found = read->named_buffers();
  for (const auto& buffer : written->named_buffers())
    EXPECT_TRUE(found[buffer.key()].equal(buffer.value())) << buffer.key();
  EXPECT_EQ(found["1.num_batches_tracked"].item<int64_t>(), 1);

  auto others = torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  others->register_buffer("scale", at::ones({1}));
  Engine lacking(*others, Sgd{});
  EXPECT_THAT(load_pretrained(lacking, folder.path().string()).kept_buffers, ElementsAre("scale"));
}

// A model of convolutions, whose parameters have 0 to 4 dimensions.
struct Convolutions : torch::nn::Module {
  Convolutions() {
    const auto options = torch::nn::Conv2dOptions(3, 8, 3).bias(false);
    first = register_module("first", torch::nn::Conv2d(options));
    second = register_module("second", torch::nn::Conv2d(options));
    scale = register_parameter("scale", torch::ones({}));
    head = register_module("head", Projection(ProjectionOptions{.in = 4, .out = 6}));
  }
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  at::Tensor scale;
  Projection head{nullptr};
};

TEST(Pretrained, PartsOfTensorsMayHaveAnyNumberOfDimensions) {
  const std::map<std::string, TensorPlace> places{
      {"first.weight", {.tensor = "both", .sizes = {8, 6, 3, 3}, .offsets = {0, 3, 0, 0}}},
      {"second.weight", {.tensor = "both", .sizes = {8, 6, 3, 3}, .offsets = {0, 0, 0, 0}}},
      {"scale", {.tensor = "factor", .sizes = {}, .offsets = {}}},
      {"head.weight",
       {.tensor = "turned", .sizes = {4, 6}, .offsets = {0, 0}, .transposed = true}}};
  const TemporaryFolder folder;
  run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    torch::manual_seed(3);
    Engine engine(std::make_shared<Convolutions>(), AdamW{}, config(3), group);
    std::map<std::string, at::Tensor> values;
    for (const auto& name : engine.parameter_names()) values[name] = engine.parameter(name);
    save_pretrained(engine, folder.path().string(), {.places = places});
    group->barrier();
    const WeightFiles files(folder.path());
    EXPECT_TRUE(files.read("both").equal(
        at::cat({values.at("second.weight"), values.at("first.weight")}, 1)));
    EXPECT_EQ(files.info("factor").shape, std::vector<int64_t>());
    EXPECT_TRUE(files.read("turned").equal(values.at("head.weight").t()));
    for (const auto& [name, value] : values) engine.set_parameter(name, torch::zeros_like(value));
    const auto report = load_pretrained(engine, folder.path().string(), {.places = places});
    EXPECT_THAT(report.left_over, IsEmpty());
    for (const auto& [name, value] : values)
      EXPECT_TRUE(engine.parameter(name).equal(value)) << name;
    group->barrier();
  });
}

TEST(Pretrained, OptionsThatDoNotFitAreRefusedOnEveryRankBeforeAnythingChanges) {
  using Places = std::map<std::string, TensorPlace>;
  const TemporaryFolder folder;
  const auto path = folder.path().string();
  const auto head = [](std::vector<int64_t> sizes, std::vector<int64_t> offsets) {
    return Places{{"head.weight", {.tensor = "t", .sizes = sizes, .offsets = offsets}}};
  };
  const std::vector<std::pair<Places, std::string>> places{
      {head({6, 4}, {}), "an offset for each dimension"},
      {head({6, 4}, {3, 0}), "beyond dimension 0"},
      {head({6, 4}, {0, -1}), "beyond dimension 1"},
      {head({4, 6}, {0, 0}), "beyond dimension 0"},
      {head({24}, {0}), "another number of dimensions"},
      {{{"first.weight",
         {.tensor = "t", .sizes = {3, 3, 3, 8}, .offsets = {0, 0, 0, 0}, .transposed = true}}},
       "only a parameter of two dimensions"},
      {{{"head.wieght", {.tensor = "t", .sizes = {}, .offsets = {}}}},
       "Did you mean 'head.weight'?"}};
  run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    const auto model = std::make_shared<Convolutions>();
    const Lora lora = add_lora(*model, {.rank = 2, .targets = {.all_linear = true}});
    quantise_frozen(*model);
    Engine engine(model, AdamW{}, config(3), group);
    const auto matrices = quantised_weights(*model);
    save_pretrained(engine, path, {.packed = matrices});
    group->barrier();
    const auto before = TemporaryFolder::read(folder / kWeightsFile);
    const auto saves = [&](const SavePretrainedOptions& options, const std::string& message) {
      EXPECT_THAT(message_of<ConfigError>([&] { save_pretrained(engine, path, options); }),
                  HasSubstr(message));
    };
    const auto loads = [&](const PretrainedOptions& options, const std::string& message) {
      EXPECT_THAT(message_of<ConfigError>([&] { load_pretrained(engine, path, options); }),
                  HasSubstr(message));
    };
    loads({.tied = {{"other.weight", "head.wieght"}}}, "PretrainedOptions::tied names 'head.wieg");
    loads({.added = {"head.bais"}}, "Did you mean 'head.bias'?");
    loads({.packed = {{"head.bias", {.sizes = {6}}}}}, "has Float of shape (6)");
    loads({.packed = {{"head.weight", {.sizes = {6, 40}}}}}, "sizes (6, 40)");
    saves({.merged = merged_products(lora)}, "'head.weight', which keeps its values in bytes");
    auto merged = merged_products(lora);
    merged["first.weight"] = merged.at("head.weight");
    saves({.packed = matrices, .merged = merged}, "to 'first.weight' of shape (8, 3, 3, 3)");
    merged = merged_products(lora);
    merged.at("head.weight").b = "head.lora_b.weight";
    saves({.packed = matrices, .merged = merged}, "'head.lora_b.weight', which is none of");
    // Parts that overlap, leave gaps, or take the name of another tensor.
    const auto bias = [](const std::string& tensor, int64_t size) {
      return Places{{"head.bias", {.tensor = tensor, .sizes = {size}, .offsets = {0}}}};
    };
    saves({.places = bias("b", 30), .packed = matrices}, "of which 24 elements belong to no");
    saves({.places = bias("scale", 6), .packed = matrices},
          "both be written as the tensor 'scale'");
    const TensorPlace whole{.tensor = "c", .sizes = {8, 3, 3, 3}, .offsets = {0, 0, 0, 0}};
    saves({.places = {{"first.weight", whole}, {"second.weight", whole}}, .packed = matrices},
          "'first.weight' and 'second.weight' on the same elements");
    group->barrier();
    EXPECT_EQ(TemporaryFolder::read(folder / kWeightsFile), before);

    Engine plain(std::make_shared<Convolutions>(), AdamW{}, config(3), group);
    for (const auto& [bad, message] : places) {
      EXPECT_THAT(message_of<ConfigError>([&] { save_pretrained(plain, path, {.places = bad}); }),
                  HasSubstr(message));
      EXPECT_THAT(message_of<ConfigError>([&] { load_pretrained(plain, path, {.places = bad}); }),
                  HasSubstr(message));
    }
    EXPECT_TRUE(plain.parameter("scale").equal(torch::ones({})));  // the ranks are in step
    group->barrier();
  });
}

TEST(Pretrained, TiedTensorsOfAnySpellingAreCompared) {
  struct Tied : torch::nn::Module {
    Tied() {
      register_module("embed", torch::nn::Embedding(6, 4));
      register_parameter("weight", torch::zeros({2}));
      auto head =
          register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 6).bias(false)));
      head->weight.set_data(named_parameters()["embed.weight"].data());
    }
  };
  const TemporaryFolder folder;
  for (const std::string prefix : {"", "model."}) {
    for (const double difference : {0.0, 1.0}) {
      SCOPED_TRACE(prefix + std::to_string(difference));
      SafetensorsWriter writer(folder / kWeightsFile,
                               {{prefix + "embed.weight", at::kFloat, {6, 4}},
                                {"head.weight", at::kFloat, {6, 4}},
                                {"weight", at::kFloat, {2}}});
      const auto values = torch::arange(24.0).view({6, 4});
      writer.write(prefix + "embed.weight", values);
      writer.write("head.weight", values + difference);
      writer.write("weight", torch::ones({2}));
      writer.commit();
      for (const bool named : {false, true}) {
        run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
          Engine engine(std::make_shared<Tied>(), AdamW{}, config(3), group);
          PretrainedOptions options;
          if (named) options.tied = {{"head.weight", "embed.weight"}};
          const auto load = [&] { load_pretrained(engine, folder.path().string(), options); };
          if (difference == 0) {
            load();
            EXPECT_TRUE(engine.parameter("embed.weight").equal(values));
          } else {
            EXPECT_THAT(message_of<CheckpointError>(load),
                        AllOf(HasSubstr("head.weight"), HasSubstr("embed.weight"),
                              HasSubstr("with different values")));
          }
        });
      }
    }
  }
}

TEST(WeightFiles, RefuseDamagedFolders) {
  const TemporaryFolder folder;
  const auto of = [&] {
    return message_of<CheckpointError>([&] { WeightFiles files(folder.path()); });
  };
  EXPECT_THAT(of(), HasSubstr("neither model.safetensors nor"));
  folder.write(kWeightsIndex, "{");
  EXPECT_THAT(of(), AllOf(HasSubstr(kWeightsIndex), HasSubstr("weight_map")));
  folder.write(kWeightsIndex, R"({"weight_map": {"a": "../x.safetensors"}})");
  EXPECT_THAT(of(), HasSubstr("../x.safetensors"));
  folder.write(kWeightsIndex, R"({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}})");
  EXPECT_THAT(of(), AllOf(HasSubstr("x.safetensors is missing"), HasSubstr(kWeightsIndex)));
  const auto write = [&](const char* file, const char* tensor) {
    SafetensorsWriter writer(folder / file, {{tensor, at::kFloat, {2}}});
    writer.write(tensor, torch::ones({2}));
    writer.commit();
  };
  write("x.safetensors", "a");
  write("y.safetensors", "a");
  EXPECT_THAT(of(), AllOf(HasSubstr("Both"), HasSubstr("'a'")));
  write("y.safetensors", "c");
  EXPECT_THAT(of(), AllOf(HasSubstr("y.safetensors"), HasSubstr("'b'")));
  const auto text = TemporaryFolder::read(folder / "x.safetensors");
  folder.write("x.safetensors", text.substr(0, text.size() - 1));
  EXPECT_THAT(of(), HasSubstr("truncated"));
}

}  // namespace
}  // namespace zero
