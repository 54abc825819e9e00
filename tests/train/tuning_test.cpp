// Fine-tuning runs: which tokens and which parameters are trained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ops/allclose.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/message_of.h"
#include "tests/train/tiny_run.h"
#include "zero/base/error.h"
#include "zero/checkpoint/weight_files.h"
#include "zero/comm/gather_records.h"
#include "zero/data/token_file.h"
#include "zero/engine/tiers.h"
#include "zero/models/architectures.h"
#include "zero/models/layers/packed_weight.h"
#include "zero/train/adapter_files.h"
#include "zero/train/run.h"
#include "zero/train/step_passes.h"
#include "zero/train/trainer.h"
#include "zero/train/tuning.h"

namespace zero::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kTiny =
    R"({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})";
constexpr int64_t kSequence = 8;
constexpr int64_t kSequences = 72;  // a step takes them all

class TuningTest : public ::testing::Test {
 protected:
  TuningTest() {
    options_ = tiny_run(folder_, "line ", kTiny);
    options_.overwrite = true;
    options_.seq = kSequence;
    options_.data = {write_answers()};
  }

  /// Writes tokens of which each sequence supervises another number, every fifth none.
  std::string write_answers() {
    std::string tokens;
    std::string marks;
    for (int64_t i = 0; i <= kSequence * kSequences; ++i) {
      tokens += {static_cast<char>(i * i % 251), '\0'};
      const int64_t sequence = (i - 1) / kSequence;
      const bool supervised = sequence % 5 != 0 && i % kSequence < sequence % kSequence;
      marks += static_cast<char>(supervised ? kSupervised : kBeginsDocument);
    }
    test::write_file(folder_ / "answers.bin", tokens);
    test::write_file(folder_ / "answers.marks.bin", marks);
    return folder_ / "answers.bin";
  }

  Settings settings(int64_t accumulate = 1) const {
    Settings all{.program = options_};
    all.engine.gradient_accumulation_steps = accumulate;
    all.engine.optimizer = Sgd{.lr = 0.5};
    return all;
  }

  test::TemporaryFolder folder_;
  Options options_;
};

using Weights = std::map<std::string, at::Tensor>;
struct Outcome {
  std::vector<double> losses;
  Weights weights;
};

Weights weights_of(Engine& engine) {
  Weights weights;
  for (const auto& name : engine.parameter_names()) weights[name] = engine.parameter(name);
  return weights;
}

Outcome two_steps(const Settings& settings, const std::shared_ptr<comm::Group>& group) {
  train::Run run(settings, group, {});
  StepPasses passes(run);
  Outcome outcome;
  for (int64_t step = 1; step <= 2; ++step) {
    passes.begin(step);
    passes.pass(nullptr);
    double mine = 0;
    for (const float loss : passes.losses()) mine += loss;
    double sum = 0;
    for (const double of_rank : comm::gather_records(*group, mine, "losses")) sum += of_rank;
    outcome.losses.push_back(sum / static_cast<double>(run.micro_batches() * group->size()));
    EXPECT_TRUE(run.engine->step().updated);
  }
  outcome.weights = weights_of(*run.engine);
  return outcome;
}

TEST_F(TuningTest, AnswersCountAlikeOnAnyNumberOfRanksAndMicroBatches) {
  Outcome whole;
  for (const int ranks : {1, 2, 3}) {
    for (int64_t accumulate = 1; accumulate <= 4; ++accumulate) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(accumulate) +
                   " micro-batches");
      auto given = settings(accumulate);
      given.engine.stage = ranks;
      given.program.micro_batch_size = kSequences / (ranks * accumulate);
      comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
        const auto outcome = two_steps(given, group);
        if (group->rank() != 0) return;
        if (whole.losses.empty()) whole = outcome;
        for (size_t i = 0; i < 2; ++i)
          EXPECT_NEAR(outcome.losses[i], whole.losses[i], 2e-6 * whole.losses[i]);
        for (const auto& [name, weight] : outcome.weights)
          EXPECT_TRUE(at::allclose(weight, whole.weights.at(name), 1e-4, 1e-6)) << name;
      });
    }
  }
  // One micro-batch of one rank is the mean that LibTorch takes.
  auto all = settings();
  all.program.micro_batch_size = kSequences;
  train::Run run(all, comm::single(), {});
  auto batch = run.task->next();
  EXPECT_EQ(run.task->weight(batch), (batch[1] != -100).sum().item<double>());
  EXPECT_EQ(run.task->step_weight(), std::nullopt);
  // Layers that all micro-batches pass together give the same.
  auto major = settings(4);
  major.program.micro_batch_size = kSequences / 4;
  major.engine.layer_major_accumulation = true;
  const auto outcome = two_steps(major, comm::single());
  EXPECT_NEAR(outcome.losses[1], whole.losses[1], 2e-6 * whole.losses[1]);
}

TEST_F(TuningTest, ABatchWithoutAnAnswerHasNoLossAndNoGradient) {
  options_.micro_batch_size = 1;
  train::Run run(settings(), comm::single(), {});
  int64_t empty = 0;
  for (int64_t i = 0; i < kSequences; ++i) {
    const auto batch = run.task->next();
    const auto loss = run.task->loss(batch);
    EXPECT_EQ(loss.item<float>() == 0, run.task->weight(batch) == 0);
    if (run.task->weight(batch) > 0) continue;
    ++empty;
    run.engine->backward(loss);
    EXPECT_EQ(run.engine->gradient("h.0.attn.c_attn.weight").abs().max().item<float>(), 0);
    run.engine->zero_grad();
  }
  EXPECT_GE(empty, kSequences / 5);
}

TEST_F(TuningTest, TheTaskFollowsTheMarksUnlessToldOtherwise) {
  options_.task = TrainingTask::language;
  const auto whole = train::Run(settings(), comm::single(), {}).task->next();
  EXPECT_FALSE((whole[1] == -100).any().item<bool>());
  options_.task = TrainingTask::supervised;
  const auto marked = options_.data.front();
  options_.data = {folder_ / "text.txt"};
  EXPECT_THAT(message_of<DataError>([&] { check_run(settings(), 1); }), HasSubstr("--task lm"));
  std::filesystem::copy_file(marked, folder_ / "plain.bin");
  options_.data = {marked, folder_ / "plain.bin"};
  EXPECT_THAT(message_of<DataError>([&] { check_run(settings(), 1); }),
              AllOf(HasSubstr("plain.bin has no marks"), HasSubstr("--task lm")));
}

TEST_F(TuningTest, AnAdapterIsTrainedSavedAndResumed) {
  auto given = settings();
  given.engine.stage = 3;
  auto& program = given.program;
  program.lora.rank = 4;
  program.lora.dropout = 0.1;
  program.lora.targets = "c_attn,c_fc";
  program.save_every = 2;
  const std::string adapter = folder_ / ("run/" + std::string(kAdapterWeights));
  const auto run = [&](int64_t steps, int ranks) {
    program.steps = steps;
    program.micro_batch_size = 4 / ranks;
    comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
      Trainer trainer(given, group);
      EXPECT_EQ(trainer.train(), 0);
    });
    return test::read_file(adapter);
  };
  program.schedule = optim::Decay::constant;
  given.engine.layer_major_accumulation = true;  // a frozen weight that layers share is in the way
  const auto through = run(4, 1);
  const auto half = run(2, 1);
  EXPECT_NE(through, half);
  program.overwrite = false;
  program.resume = true;
  std::filesystem::create_directory(folder_ / "run/merged");
  const std::vector<std::string> others{"labels.json", "model-before.safetensors",
                                        "merged/model.safetensors"};
  for (const auto& name : others) test::write_file(folder_ / ("run/" + name), "its owner's");
  EXPECT_EQ(run(4, 1), through) << "dropout's masks too";
  for (const auto& name : others) EXPECT_TRUE(std::filesystem::remove(folder_ / ("run/" + name)));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/config.json"));

  // The adapter begins another run, on other ranks, which writes merged weights.
  program.resume = false;
  program.overwrite = true;
  const std::string start = folder_ / "start";
  std::filesystem::rename(folder_ / "run", start);
  program.lora = {.adapter = start, .merge = true};
  given.engine.optimizer = Sgd{.lr = 0};
  EXPECT_EQ(run(1, 2), through);
  const WeightFiles merged(folder_ / "run/merged");
  EXPECT_FALSE(merged.contains("h.0.attn.c_attn.lora_A.weight"));
  EXPECT_TRUE(merged.contains("h.0.attn.c_attn.weight"));
  program.lora.merge = false;
  EXPECT_EQ(run(1, 2), through);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/merged/model.safetensors")) << "of before";
}

TEST_F(TuningTest, AReplacedRunLeavesNoTokenizerBehind) {
  begin_with_saved_weights(options_, folder_);
  const auto run = [&](bool merge) {
    options_.steps = 1;
    options_.lora = {.rank = 2, .targets = "c_attn", .merge = merge};
    options_.overwrite = true;
    Trainer(settings(), comm::single()).train();
  };
  const std::filesystem::path from = options_.from;
  const std::filesystem::path out = folder_ / "run";
  const auto generation = [](const std::filesystem::path& folder) {
    return std::filesystem::exists(folder / "generation_config.json");
  };
  test::write_file(from / "generation_config.json", "{}");
  run(true);
  EXPECT_TRUE(generation(out) && generation(out / "merged"));
  std::filesystem::remove(from / "generation_config.json");
  run(true);
  EXPECT_FALSE(generation(out) || generation(out / "merged"));
  run(false);
  EXPECT_FALSE(std::filesystem::exists(out / "merged"));
  test::write_file(out / "notes.txt", "their owner's");
  run(true);  // what the log does not know of is not in the way
  EXPECT_TRUE(std::filesystem::exists(out / "notes.txt"));
}

class QuantisedTuningTest : public TuningTest, public ::testing::WithParamInterface<BaseFormat> {};

INSTANTIATE_TEST_SUITE_P(Formats, QuantisedTuningTest,
                         ::testing::Values(BaseFormat::nf4, BaseFormat::int8),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(QuantisedTuningTest, AQuantisedBaseIsTrainedResumedAndMerged) {
  const auto format = GetParam();
  begin_with_saved_weights(options_, folder_);
  auto given = settings();
  given.engine.stage = 3;
  auto& program = given.program;
  program.lora = {.rank = 4, .targets = "all-linear", .quantize_base = format};
  program.save_every = 2;
  program.schedule = optim::Decay::constant;
  const auto run = [&](int64_t steps, bool resume, int ranks = 1) {
    program.steps = steps;
    program.micro_batch_size = 4 / ranks;
    program.resume = resume;
    program.overwrite = !resume;
    comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
      Trainer trainer(given, group);
      EXPECT_EQ(trainer.train(), 0);
    });
    return test::read_file(folder_ / ("run/" + std::string(kAdapterWeights)));
  };
  const auto through = run(4, false);
  EXPECT_TRUE(run(2, false) != through);
  EXPECT_TRUE(run(4, true) == through);
  // A step of no size leaves B at zero, so the merged weights are those that are read back.
  given.engine.optimizer = Sgd{.lr = 0};
  program.lora.merge = true;
  run(1, false, 2);
  const WeightFiles base(options_.from);
  const WeightFiles merged(folder_ / "run/merged");
  const std::string name = "h.1.mlp.c_fc.weight";
  const auto weight = base.read(name);
  EXPECT_TRUE(merged.read(name).equal(unpacked_weight(packed_weight(weight, format), format,
                                                      weight.size(0), weight.size(1), at::kFloat)));
  EXPECT_FALSE(merged.read(name).equal(weight));
  EXPECT_TRUE(merged.read("wte.weight").equal(base.read("wte.weight")));
  const train::Run described(given, comm::single(), {});
  EXPECT_THAT(
      described.describe(1, {}).weights,
      HasSubstr(format == BaseFormat::nf4 ? "are kept in nf4 (4." : "are kept in int8 (8.25"));
  EXPECT_EQ(
      described.describe(1, {}).parameters,
      language_model_config(base.path().string())->parameter_count() + described.lora->elements());
}

TEST_F(TuningTest, FrozenParametersKeepTheirValues) {
  options_.freeze = "wte,wpe,h.0";
  options_.micro_batch_size = 2;
  train::Run run(settings(), comm::single(), {});
  const auto before = weights_of(*run.engine);
  StepPasses passes(run);
  passes.begin(1);
  passes.pass(nullptr);
  run.engine->step();
  for (const auto& [name, weight] : weights_of(*run.engine)) {
    const bool frozen = name.starts_with("w") || name.starts_with("h.0.");
    EXPECT_EQ(weight.equal(before.at(name)), frozen) << name;
  }
  EXPECT_THAT(run.describe(1, {}).weights, HasSubstr("parameters are trained"));
}

TEST_F(TuningTest, WhatCannotBeTrainedIsRefusedBeforeTheRun) {
  const auto refused = [&](const std::function<void(Options&)>& change) {
    auto given = settings();
    change(given.program);
    return message_of<Error>([&] { check_run(given, 1); });
  };
  EXPECT_THAT(refused([](Options& o) { o.freeze = "wtf"; }), HasSubstr("wtf"));
  EXPECT_THAT(refused([](Options& o) { o.freeze = "h,wte,wpe,ln_f"; }),
              HasSubstr("--freeze h,wte,wpe,ln_f freezes every parameter"));
  EXPECT_THAT(refused([](Options& o) { o.lora.targets = "c_attn"; }), HasSubstr("--lora-rank"));
  EXPECT_THAT(refused([](Options& o) { o.lora.quantize_base = BaseFormat::nf4; }),
              HasSubstr("--lora-rank"));
  auto tiled = settings();
  tiled.program.lora = {.rank = 2, .quantize_base = BaseFormat::nf4};
  tiled.model.tile_elements = 100;
  EXPECT_THAT(message_of<ConfigError>([&] { tiled.validate(); }), HasSubstr("--tile-elements"));
  EXPECT_THAT(refused([](Options& o) {
                o.lora.rank = 2;
                o.freeze = "wte";
              }),
              HasSubstr("freezes all weights"));
  EXPECT_THAT(refused([](Options& o) {
                o.lora.rank = 2;
                o.lora.targets = "c_atn";
              }),
              AllOf(HasSubstr("'c_atn'"), HasSubstr("c_attn")));
  EXPECT_THAT(refused([](Options& o) {
                o.lora.rank = 2;
                o.lora.modules_to_save = "wte";
              }),
              HasSubstr("ties"));
  EXPECT_THAT(refused([](Options& o) { o.lora.adapter = "/nowhere"; }),
              HasSubstr("/nowhere/adapter_config.json"));
}

TEST_F(TuningTest, AnAdapterDoesNotTakeThePlaceOfItsModel) {
  begin_with_saved_weights(options_, folder_);
  const std::filesystem::path base = options_.from;
  std::filesystem::copy_file(options_.model, base / "log.jsonl");  // as a run leaves it
  options_.out = base / "";
  options_.lora.rank = 2;
  EXPECT_THAT(message_of<ConfigError>([&] { check_run(settings(), 1); }),
              AllOf(HasSubstr("--from names"), HasSubstr("Give another --out")));
}

TEST_F(TuningTest, MemoryIsPredictedWithoutStatesOfFrozenParameters) {
  options_.lora.rank = 2;
  const auto sizes = language_model_config(options_.model);
  const auto counts = count_parameters(options_, *sizes);
  const int64_t adapters = 2 * 2 * (32 + 96);
  EXPECT_EQ(counts.all, sizes->parameter_count() + adapters);
  EXPECT_EQ(counts.all - counts.frozen, adapters);
  Config config;
  config.stage = 3;
  config.bf16 = true;
  const auto states = predicted_states(config, counts.all, 2, Bound::most, counts.frozen);
  EXPECT_NEAR(states.parameters, 2.0 * static_cast<double>(counts.all) / 2, 1);
  EXPECT_NEAR(states.gradients, 2.0 * static_cast<double>(adapters) / 2, 1);
  EXPECT_NEAR(states.optimizer, 12.0 * static_cast<double>(adapters) / 2, 1);

  options_.lora.quantize_base = BaseFormat::nf4;
  const auto packed = count_parameters(options_, *sizes);
  EXPECT_EQ(packed.all, counts.all);
  EXPECT_EQ(packed.packed, 2 * 12 * 32 * 32);  // the matrices of two layers
  const auto memory = packed.by_memory(2);
  EXPECT_EQ(memory.all - memory.frozen, adapters);
  EXPECT_EQ(memory.all, counts.all - packed.packed + packed.packed_bytes / 2);
  EXPECT_NEAR(8.0 * static_cast<double>(packed.packed_bytes),
              (4 + 8.0 / 64) * static_cast<double>(packed.packed), 8 * 8 * 8);  // 8 bytes a matrix

  options_.lora.quantize_base = BaseFormat::int8;
  const auto bytes = count_parameters(options_, *sizes);
  EXPECT_EQ(bytes.packed, packed.packed);
  EXPECT_EQ(8 * bytes.packed_bytes, 8 * bytes.packed + 32 * bytes.packed / 128);
}

}  // namespace
}  // namespace zero::train
