// A run of DeepSpeed or of PyTorch goes on in libzero: its checkpoint is imported, loads at any
// number of ranks and stage, and the losses that follow are those that the other program had.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/checkpoint/samples.h"
#include "tests/engine/worlds.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/foreign/checkpoint_view.h"

namespace zero {
namespace {

using ::testing::HasSubstr;

nlohmann::json read_json(const std::string& name) {
  std::ifstream file(samples() / name);
  return nlohmann::json::parse(file);
}

// The model of the samples: tied weights, a frozen matrix, a buffer of fractions and one of
// integers, sizes that nothing divides.
struct Tiny : nn::Module {
  Tiny()
      : emb(register_module("emb", nn::Embedding(11, 6))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})))),
        frozen(register_module("frozen", nn::Linear(nn::LinearOptions(6, 6).bias(false)))),
        fc1(register_module("fc1", nn::Linear(6, 7))),
        fc2(register_module("fc2", nn::Linear(7, 6))) {
    register_module("head", std::make_shared<nn::Module>())
        ->register_parameter("weight", emb->weight);
    frozen->weight.requires_grad_(false);
    scale = register_parameter("scale", torch::ones(1));
    mean = register_buffer("mean", torch::zeros(6));
    count = register_buffer("count", torch::tensor(0, at::kLong));
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    auto h = emb(tokens);
    h = h + fc2(torch::tanh(fc1(norm(h)))) * scale;
    h = h + frozen(h) + mean.to(h.scalar_type());
    const auto logits = torch::matmul(h, emb->weight.t());
    return nn::functional::cross_entropy(logits.to(at::kFloat).view({-1, 11}), targets.view(-1));
  }
  nn::Embedding emb;
  nn::LayerNorm norm;
  nn::Linear frozen, fc1, fc2;
  at::Tensor scale, mean, count;
};

class Batches {
 public:
  at::Tensor loss(Tiny& net, int step, int rank) const {
    const auto& batch = all_[std::to_string(step) + "." + std::to_string(rank)];
    return net.loss(tensor(batch[0]), tensor(batch[1]));
  }

 private:
  static at::Tensor tensor(const nlohmann::json& rows) {
    std::vector<int64_t> values;
    for (const auto& row : rows) values.insert(values.end(), row.begin(), row.end());
    return torch::tensor(values).view({static_cast<int64_t>(rows.size()), -1});
  }
  const nlohmann::json all_ = read_json("batches.json");
};

std::vector<ParameterGroup> groups_of(Optimizer matrices, Optimizer others) {
  return {
      {.optimizer = matrices, .matches = [](auto, const at::Tensor& p) { return p.dim() >= 2; }},
      {.optimizer = others, .rest = true}};
}

std::vector<ParameterGroup> adam_groups(const nlohmann::json& rates) {
  const AdamW base{.beta1 = 0.9, .beta2 = 0.95};
  auto matrices = base;
  matrices.lr = rates[0];
  matrices.weight_decay = 0.1;
  auto others = base;
  others.lr = rates[1];
  others.weight_decay = 0;
  return groups_of(matrices, others);
}

Config clipped(int stage) {
  auto made = config(stage);
  made.gradient_clipping = 1;
  return made;
}

TEST(Import, DeepSpeedsRunsGoOnWithTheirLosses) {
  const TemporaryFolder folder;
  const Batches batches;
  for (const auto& [sample, stage] :
       {std::pair{"z0-fp32", 1}, {"z1-fp32", 3}, {"z2-fp32", 2}, {"z3-fp32", 0}}) {
    SCOPED_TRACE(sample);
    const auto said = read_json("ds/" + std::string(sample) + ".expected.json");
    foreign::write_checkpoint(foreign::view_checkpoint(samples() / "ds" / sample),
                              folder / "imported");
    run_in({1, 2}, [&, stage = stage](auto group) {
      const auto net = std::make_shared<Tiny>();
      Engine engine(net, adam_groups(said["lr_after"]), clipped(stage), group);
      engine.load(folder / "imported");
      EXPECT_EQ(engine.steps(), 3);
      EXPECT_EQ(engine.parameter_steps("fc1.weight"), 3);
      const auto& mine = said["by_rank"][static_cast<size_t>(group->rank())];
      {
        const torch::NoGradGuard guard;
        EXPECT_NEAR(batches.loss(*net, 100, group->rank()).template item<double>(),
                    mine["eval_loss_batch_100"].template get<double>(), 1e-5);
      }
      // The first needs the weights, the second the moments, step counts and rates too.
      for (int step = 3; step < 5; ++step) {
        const auto loss = batches.loss(*net, step, group->rank());
        EXPECT_NEAR(loss.template item<double>(),
                    mine["next_losses"][static_cast<size_t>(step - 3)][0].template get<double>(),
                    1e-5)
            << "step " << step;
        engine.backward(loss);
        engine.step();
      }
    });
  }
}

TEST(Import, EveryRankCountLoadsTheSameBits) {
  const TemporaryFolder folder;
  foreign::write_checkpoint(foreign::view_checkpoint(samples() / "ds/z3-bf16-subgroups"),
                            folder / "imported");
  const auto expected = tensors_of(samples() / "ds/z3-bf16-subgroups.expected.safetensors");
  const auto said = read_json("ds/z3-bf16-subgroups.expected.json");
  for (const int ranks : {1, 3, 4}) {
    for (const bool bf16 : {false, true}) {
      run_in({1, ranks}, [&](auto group) {
        const auto net = std::make_shared<Tiny>();
        auto place = config(3, bf16);
        Engine engine(net, adam_groups(said["lr_after"]), place, group);
        engine.load(folder / "imported");
        for (const auto& [key, value] : expected) {
          const auto dot = key.find('.');
          const auto kind = key.substr(0, dot);
          const auto name = key.substr(dot + 1);
          if (kind == "exp_avg" || kind == "exp_avg_sq") {
            EXPECT_TRUE(same_bits(engine.optimizer_state(name, kind), value)) << key;
          } else if (kind == "fp32" && !bf16) {
            EXPECT_TRUE(same_bits(engine.parameter(name), value)) << key;
          } else if (kind == "param" && bf16) {
            EXPECT_TRUE(same_bits(engine.parameter(name).to(at::kBFloat16), value)) << key;
          }
        }
        EXPECT_TRUE(same_bits(net->count, expected.at("buffer.count")));
      });
    }
  }
}

// PyTorch's distributed checkpoints and plain weights do not say which tensors are buffers, and
// have tied weights once for each name.
TEST(Import, WeightsFindTheirParametersAndBuffers) {
  const TemporaryFolder folder;
  const auto plain = tensors_of(samples() / "plain/plain.expected.safetensors");
  const auto sharded = tensors_of(samples() / "dcp/fsdp2.expected.safetensors");
  for (const auto* sample : {"dcp/fsdp2", "dcp/fsdp2-flat", "plain/plain-zip.pt",
                             "plain/hf-sharded", "plain/hf-sharded-bin"}) {
    SCOPED_TRACE(sample);
    const bool trained = std::string(sample).starts_with("dcp");
    foreign::write_checkpoint(foreign::view_checkpoint(samples() / sample), folder / "imported");
    run_in({1, 2}, [&](auto group) {
      const auto net = std::make_shared<Tiny>();
      Engine engine(net, adam_groups({0.01, 0.005}), config(2), group);
      engine.load(folder / "imported");
      EXPECT_EQ(engine.steps(), trained ? 3 : 0);
      const auto value = [&](const std::string& name) {
        return trained
                   ? sharded.at((name == "mean" || name == "count" ? "buffer." : "param.") + name)
                   : plain.at(name);
      };
      for (const auto& name : engine.parameter_names())
        EXPECT_TRUE(same_bits(engine.parameter(name), value(name))) << name;
      EXPECT_TRUE(same_bits(net->mean, value("mean")));
      EXPECT_TRUE(same_bits(net->count, value("count")));
      const auto moment = engine.optimizer_state("fc1.weight", "exp_avg");
      EXPECT_TRUE(same_bits(
          moment, trained ? sharded.at("exp_avg.fc1.weight") : torch::zeros_like(moment)));
    });
  }
}

TEST(Import, AnotherOptimizerIsRefused) {
  const TemporaryFolder folder;
  foreign::write_checkpoint(foreign::view_checkpoint(samples() / "ds/z1-fp32-sgd"),
                            folder / "imported");
  run_in({1, 1}, [&](auto group) {
    const auto net = std::make_shared<Tiny>();
    Engine engine(net, adam_groups({0.01, 0.005}), config(1), group);
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(folder / "imported"); }),
                HasSubstr("holds states of SGD (momentum_buffer)"));
    const auto same = std::make_shared<Tiny>();
    Engine sgd(same, groups_of(Sgd{.momentum = 0.9}, Sgd{.momentum = 0.9}), config(1), group);
    sgd.load(folder / "imported");
    EXPECT_EQ(sgd.steps(), 3);
  });
}

}  // namespace
}  // namespace zero
