// Frozen weights in few bits beneath adapters: what layers compute, what an engine keeps, sends,
// saves and writes of them.
#include "zero/models/lora/quantised_base.h"

#include <ATen/ceil_div.h>
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

#include "tests/checkpoint/bitsandbytes.h"
#include "tests/models/tuned.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/engine/matrix_packer.h"
#include "zero/models/layers/linear.h"
#include "zero/models/layers/packed_weight.h"
#include "zero/models/layers/projection.h"

namespace zero {
namespace {

namespace nn = torch::nn;
using comm::Collective;
using comm::run_as_threads;
using fixtures::config;
using fixtures::Tuned;
using ::testing::AllOf;
using ::testing::HasSubstr;

const LoraSettings kSettings{
    .rank = 4, .alpha = 8, .targets = {.names = {"q_proj", "v_proj", "down_proj"}}};

/// A language of one rule: each token follows from the one before.
fixtures::Variant sequences(int64_t first) {
  const auto begin = torch::arange(first, first + 4).view({4, 1});
  const auto tokens = begin.add(torch::arange(16) * 7).remainder(40);
  const auto targets = tokens.roll(-1, 1);
  targets.select(1, -1).fill_(-100);
  fixtures::Variant variant;
  variant.tokens = tokens;
  variant.targets = targets;
  return variant;
}

at::Tensor read_back(const at::Tensor& values, BaseFormat format, at::ScalarType dtype) {
  return unpacked_weight(packed_weight(values, format), format, values.size(0), values.size(1),
                         dtype);
}

class QuantisedBase : public ::testing::TestWithParam<BaseFormat> {};

INSTANTIATE_TEST_SUITE_P(Formats, QuantisedBase,
                         ::testing::Values(BaseFormat::nf4, BaseFormat::int8),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(QuantisedBase, ALayerIsTheLinearLayerOfWhatIsReadBack) {
  const auto format = GetParam();
  torch::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
      const auto weight =
          layout == WeightLayout::in_out ? torch::randn({30, 20}) : torch::randn({20, 30});
      const auto values = read_back(weight, format, dtype);
      const auto packed = packed_weight(weight, format);
      EXPECT_TRUE(values.equal(
          unpacked_weight_reference(packed, format, weight.size(0), weight.size(1), dtype)));
      EXPECT_LT((values.to(at::kFloat) - weight).norm().item<double>(),
                (format == BaseFormat::nf4 ? 0.1 : 0.01) * weight.norm().item<double>());
      const auto x = torch::randn({2, 5, 30}, dtype).requires_grad_();
      const auto bias = torch::randn({20}, dtype).requires_grad_();
      const auto y = packed_linear(x, packed, format, 20, bias, layout);
      const auto expected = linear(x, values, bias, layout);
      EXPECT_TRUE(y.equal(expected));
      const auto dy = torch::randn_like(y);
      const auto of = torch::autograd::grad({y}, {x, bias}, {dy});
      const auto gradients = torch::autograd::grad({expected}, {x, bias}, {dy});
      EXPECT_TRUE(of[0].equal(gradients[0]) && of[1].equal(gradients[1]));
    }
  }
  const auto packed = packed_weight(torch::randn({8, 8}), format);
  EXPECT_THAT(message_of<ConfigError>([&] {
                packed_linear(torch::randn({2, 8}), packed, format, 9, {});
              }),
              AllOf(HasSubstr("9 by 8"), HasSubstr("zero::packed_weight")));
}

TEST_P(QuantisedBase, RangesOfAMatrixHaveTheBytesOfTheWhole) {
  const auto format = GetParam();
  for (const int64_t numel : {int64_t{1}, int64_t{1000}, (int64_t{1} << 22) + 1000}) {
    const auto values = at::randn({numel}, at::kFloat).to(at::kBFloat16);
    const auto whole = packed_weight(values, format);
    MatrixPacker packer(format, numel, [&](int64_t begin, int64_t count) {
      return values.narrow(0, begin, count);
    });
    const int64_t bytes = whole.numel();
    for (const int64_t parts : {1, 2, 3, 64}) {
      for (int64_t part = 0; part < parts; ++part) {
        const partition::Range range{bytes * part / parts, bytes * (part + 1) / parts};
        ASSERT_TRUE(packer.bytes(range).equal(whole.narrow(0, range.begin, range.size())))
            << numel << " elements, bytes from " << range.begin << " to " << range.end;
      }
    }
  }
}

TEST_P(QuantisedBase, AnyModulesFrozenLinearLayersAreChanged) {
  const auto format = GetParam();
  nn::Sequential net(nn::Linear(16, 24), nn::Tanh(), nn::Linear(nn::LinearOptions(24, 8)));
  EXPECT_THAT(message_of<ConfigError>([&] { quantise_frozen(*net, format); }),
              HasSubstr("zero::add_lora"));
  std::map<std::string, at::Tensor> weights;
  for (const auto* name : {"0.weight", "2.weight"})
    weights[name] = net->named_parameters()[name].detach().clone();
  add_lora(*net, {.rank = 2, .targets = {.all_linear = true}});
  {
    const at::NoGradGuard no_grad;
    net->named_parameters()["0.lora_B.weight"].normal_();
  }
  EXPECT_EQ(quantise_frozen(*net, format), 2);
  std::vector<std::string> names;
  for (const auto& parameter : net->named_parameters()) names.push_back(parameter.key());
  EXPECT_EQ(names.front(), "0.weight") << "the order is that of before";
  const auto sizes = quantised_weights(*net);
  EXPECT_EQ(sizes.at("2.weight"), (PackedMatrix{format, {8, 24}}));
  const auto parameters = net->named_parameters();
  for (const auto& [name, weight] : weights) {
    EXPECT_TRUE(parameters[name].equal(packed_weight(weight, format)));
    EXPECT_FALSE(parameters[name].requires_grad());
  }
  const auto x = torch::randn({3, 16});
  const auto hidden = torch::nn::functional::linear(
      x,
      read_back(weights["0.weight"], format, at::kFloat) +
          4 * parameters["0.lora_B.weight"].mm(parameters["0.lora_A.weight"]),
      parameters["0.bias"]);
  const auto y = torch::nn::functional::linear(
      hidden.tanh(), read_back(weights["2.weight"], format, at::kFloat), parameters["2.bias"]);
  EXPECT_TRUE(net->forward(x).allclose(y, 1e-4, 1e-5));
  const auto clone = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(clone->forward(x).equal(net->forward(x)));
}

TEST(QuantiseFrozen, RefusesTiles) {
  const auto model = language_model_config(fixtures::folder("llama").string())->build();
  tile_linears(model->module(), 100);
  add_lora(model->module(), kSettings);
  EXPECT_THAT(message_of<ConfigError>([&] { quantise_frozen(model->module()); }),
              AllOf(HasSubstr("in tiles"), HasSubstr("--tile-elements")));
}

TEST_P(QuantisedBase, EveryStageAndNumberOfRanksTrainsItAlike) {
  const auto format = GetParam();
  const auto folder = fixtures::folder("llama").string();
  const WeightFiles files(folder);
  const auto data = sequences(0);
  const auto held_out = sequences(20);
  std::vector<float> expected;
  for (const int ranks : {1, 2}) {
    for (int stage = ranks == 1 ? 3 : 0; stage <= 3; ++stage) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, stage " + std::to_string(stage));
      run_as_threads(ranks, [&, stage](std::shared_ptr<comm::Group> group) {
        Tuned tuned(folder, kSettings, config(stage, /*bf16=*/true), group, 0, format);
        const auto loss_of = [&](const fixtures::Variant& of) {
          const at::NoGradGuard no_grad;
          return tuned.model->loss(of.tokens, of.targets).item<float>();
        };
        std::vector<float> losses{loss_of(held_out)};
        for (int i = 0; i < 12; ++i) losses.push_back(tuned.step(data));
        losses.push_back(loss_of(held_out));
        for (const auto& [name, matrix] : quantised_weights(tuned.model->module())) {
          EXPECT_TRUE(tuned.engine->parameter(name).equal(packed_weight(files.read(name), format)))
              << name;
        }
        if (group->rank() != 0) return;
        if (expected.empty()) expected = losses;
        EXPECT_EQ(losses, expected);
        EXPECT_LT(losses.back(), losses.front() - 0.1) << "of what was not trained on";
      });
    }
  }
}

TEST_P(QuantisedBase, MemoryAndTrafficAreOfPackedBytes) {
  const auto format = GetParam();
  const auto folder = fixtures::folder("llama").string();
  const auto data = sequences(0);
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      auto c = config(stage, /*bf16=*/true);
      c.unit_bytes = 1;  // each parameter is a unit
      // Bytes are not quantised a second time on their way.
      c.quantised.frozen_weights = stage == 3;
      Tuned tuned(folder, kSettings, c, group, 0, format);
      auto& engine = *tuned.engine;
      tuned.step(data);
      group->traffic().reset();
      tuned.step(data);
      const auto sizes = quantised_weights(tuned.model->module());
      EXPECT_EQ(sizes.size(), 14u);
      int64_t bytes = 0;
      for (const auto& info : engine.parameter_infos()) {
        int64_t numel = c10::multiply_integers(info.shape);
        if (const auto packed = sizes.find(info.name); packed != sizes.end()) {
          const int64_t numbers = c10::multiply_integers(packed->second.sizes);
          const int64_t blocks = at::ceil_div(numbers, int64_t{64});
          EXPECT_EQ(numel, format == BaseFormat::nf4
                               ? 32 * blocks + 4 + 4 * at::ceil_div(blocks, int64_t{256}) + blocks
                               : numbers + 4 * at::ceil_div(numbers, int64_t{128}));
          bytes += at::round_up(numel, int64_t{2 * 64});  // a slice begins on a multiple of 64
        } else {
          bytes += 2 * at::round_up(numel, int64_t{2 * 64});
        }
      }
      const auto& ledger = *group->ledger();
      EXPECT_EQ(ledger.usage(Category::parameters).current, bytes / (stage == 3 ? 2 : 1));
      EXPECT_EQ(engine.memory_formula().parameters, ledger.usage(Category::parameters).current);
      EXPECT_EQ(engine.memory_formula().optimizer, ledger.usage(Category::optimizer).current);
      const auto gathered = group->traffic().count(Collective::all_gather).logical_bytes;
      if (stage == 3) {  // in forward and in backward, from the other rank
        EXPECT_EQ(engine.traffic_formula().all_gather, bytes);
        EXPECT_LE(gathered, bytes);
        EXPECT_GT(gathered, bytes / 2);
      } else {
        EXPECT_EQ(gathered, engine.traffic_formula().all_gather);
      }
    });
  }
}

TEST_P(QuantisedBase, ResumesWithEqualBitsAtAnotherStageAndTier) {
  const auto format = GetParam();
  const auto folder = fixtures::folder("llama").string();
  const auto data = sequences(0);
  const TemporaryFolder saves;
  std::vector<float> expected;
  run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    Tuned tuned(folder, kSettings, config(3, true), group, 0, format);
    tuned.step(data);
    tuned.engine->save((saves / "slices").string());
    tuned.engine->save_full((saves / "whole").string());
    for (int i = 0; i < 2; ++i) {
      const float loss = tuned.step(data);
      if (group->rank() == 0) expected.push_back(loss);
    }
  });
  for (const int ranks : {1, 2}) {
    for (const bool whole : {false, true}) {
      run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
        auto c = config(ranks == 1 ? 0 : 3, true);
        if (whole && ranks == 2) c.offload_param.device = OffloadDevice::cpu;
        Tuned tuned(folder, kSettings, c, group, 0, format);
        if (whole) {
          tuned.engine->load_full((saves / "whole").string());
        } else {
          tuned.engine->load((saves / "slices").string());
        }
        for (const float loss : expected) EXPECT_EQ(tuned.step(data), loss);
      });
    }
  }
  Tuned plain(folder, kSettings, config(0, true), comm::single());
  EXPECT_THAT(message_of<CheckpointError>([&] { plain.engine->load((saves / "slices").string()); }),
              AllOf(HasSubstr("q_proj.weight"), HasSubstr("shape")));
}

TEST_P(QuantisedBase, IsMergedWithOneRounding) {
  const auto format = GetParam();
  for (const std::string name : {"llama", "gpt2"}) {
    SCOPED_TRACE(name);
    const auto folder = fixtures::folder(name).string();
    const bool gpt2 = name == "gpt2";
    const LoraSettings settings{.rank = 4,
                                .alpha = 8,
                                .targets = {.all_linear = true},
                                .prefix = gpt2 ? "transformer." : ""};
    const TemporaryFolder out;
    run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      Tuned tuned(folder, settings, config(3, /*bf16=*/true), group, 0, format);
      tuned.draw();
      tuned.export_merged(out.path().string());
      group->barrier();
      const WeightFiles merged(out.path());
      const WeightFiles original(folder);
      for (const auto& layer : tuned.lora.layers) {
        const auto a = tuned.engine->parameter(layer.a());
        auto product = tuned.engine->parameter(layer.b()).mm(a).mul(2);
        if (gpt2) product = product.t();
        const auto weight = original.read(settings.prefix + layer.path + ".weight");
        const auto sum = (read_back(weight, format, at::kFloat) + product).to(at::kBFloat16);
        EXPECT_TRUE(merged.read(layer.path + ".weight").equal(sum)) << layer.path;
      }
      group->barrier();
    });
  }
}

TEST_P(QuantisedBase, AFolderOfBitsandbytesIsReadBackAndQuantised) {
  const auto format = GetParam();
  const auto original = fixtures::folder("llama");
  const WeightFiles files(original);
  const TemporaryFolder folder;
  test::Tensors tensors;
  std::map<std::string, at::Tensor> values;  // of the layers' matrices
  torch::manual_seed(4);
  for (const auto& name : files.names()) {
    const auto tensor = files.read(name);
    if (!name.ends_with("_proj.weight")) {
      tensors[name] = tensor;
    } else if (name.find("mlp") == std::string::npos) {
      values[name] = test::add_nf4(tensors, name, tensor.size(0), tensor.size(1));
    } else {
      const auto layer = name.substr(0, name.size() - std::string(".weight").size());
      values[name] = test::add_int8(tensors, layer, tensor.size(0), tensor.size(1));
    }
  }
  test::write_tensors(folder / kWeightsFile, tensors);
  auto config_json = TemporaryFolder::read(original / "config.json");
  config_json.insert(config_json.find('{') + 1,
                     R"("quantization_config": {"quant_method": "bitsandbytes"},)");
  folder.write("config.json", config_json);

  for (const int ranks : {1, 2}) {
    for (const auto kept : {BaseFormat::as_they_are, format}) {
      run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
        Tuned tuned(folder.path().string(), kSettings, config(3), group, 0, kept);
        for (const auto& [name, matrix] : values) {
          const auto parameter = tuned.engine->parameter(name);
          if (kept == BaseFormat::as_they_are) {
            EXPECT_TRUE(parameter.equal(matrix)) << name;
            continue;
          }
          EXPECT_TRUE(parameter.equal(packed_weight(matrix, format))) << name;
          // The codes of NF4 are those of the file, where a block's scale is above zero.
          const auto& codes = tensors.at(name);
          if (format != BaseFormat::nf4 || codes.scalar_type() != at::kByte) continue;
          for (int64_t b = 0; b < codes.numel() / 32; ++b) {
            const bool negative = matrix.view({-1})[64 * b].item<float>() < 0;
            if (negative != (b % 3 == 0)) continue;  // of a scale below zero
            EXPECT_TRUE(
                parameter.narrow(0, 32 * b, 32).equal(codes.view({-1}).narrow(0, 32 * b, 32)))
                << name << ", block " << b;
          }
        }
      });
    }
  }
}

TEST_P(QuantisedBase, FilesThatDoNotFitAreNamed) {
  const auto format = GetParam();
  const auto folder = fixtures::folder("llama").string();
  std::unique_ptr<LanguageModel> model;
  {
    const WithoutValues none;
    model = language_model_config(folder)->build();
  }
  add_lora(model->module(), kSettings);
  quantise_frozen(model->module(), format);
  auto tensors = named_tensors(model->module());
  tensors.values_follow = true;
  Engine engine(std::move(tensors), {ParameterGroup{.optimizer = AdamW{}, .rest = true}}, Config{},
                comm::single());
  const auto load = [&](std::map<std::string, PackedMatrix> packed) {
    return message_of<CheckpointError>([&] {
      load_pretrained(engine, folder, {.packed = std::move(packed), .allow_missing = true});
    });
  };
  EXPECT_THAT(load({}), AllOf(HasSubstr("_proj.weight"), HasSubstr("takes Byte")));
  auto sizes = quantised_weights(model->module());
  std::ranges::reverse(sizes.begin()->second.sizes);
  EXPECT_THAT(load(sizes), AllOf(HasSubstr(sizes.begin()->first), HasSubstr("shape")));
  sizes.begin()->second.sizes.front() += 1;
  EXPECT_THAT(message_of<ConfigError>([&] { load(sizes); }),
              AllOf(HasSubstr(sizes.begin()->first), HasSubstr("has Byte of shape")));

  nn::Module net;
  net.register_parameter("codes", torch::zeros({4}, at::kInt), /*requires_grad=*/false);
  EXPECT_THAT(message_of<ConfigError>([&] { const Engine refused(net, AdamW{}); }),
              AllOf(HasSubstr("'codes'"), HasSubstr("Int"), HasSubstr("Byte")));
}

}  // namespace
}  // namespace zero
