// Runs and evaluations of an encoder: masked tokens and classes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/message_of.h"
#include "tests/train/tiny_run.h"
#include "zero/base/error.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/data/prepare.h"
#include "zero/engine/pretrained.h"
#include "zero/models/architectures.h"
#include "zero/train/evaluate.h"
#include "zero/train/run.h"
#include "zero/train/trainer.h"

namespace zero::train {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kBert =
    R"({"model_type": "bert", "vocab_size": 502, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})";

class EncoderTest : public ::testing::Test {
 protected:
  EncoderTest() {
    options_ = tiny_run(folder_, "line ", kBert);
    options_.overwrite = true;
    fs::create_directory(folder_ / "tokenizer");
    fs::copy_file(std::string(TOKENIZER_FIXTURES) + "/bert.json",
                  fs::path(folder_ / "tokenizer/tokenizer.json"));
    std::string lines;
    for (int i = 0; i < 40; ++i) {
      const bool good = i % 3 == 0;
      std::string text = good ? "good" : "bad";  // 4 and 3 tokens of the fixture
      for (int word = 0; word < i % 5; ++word) text += " b";
      lines += nlohmann::json{{"text", text}, {"label", good ? "good" : "bad"}}.dump() + "\n";
    }
    test::write_file(folder_ / "lines.jsonl", lines);
    prepare({.inputs = {std::string(folder_ / "lines.jsonl")},
             .output = std::string(folder_ / "classes"),
             .tokenizer = folder_ / "tokenizer",
             .validation_fraction = 0.3,
             .classify = true});
    prepare({.inputs = {std::string(folder_ / "text.txt")},
             .output = std::string(folder_ / "tokens"),
             .tokenizer = folder_ / "tokenizer"});
    // Ranks that are threads draw from one generator, so they begin with weights that are saved.
    write_model("masked", {});
    write_model("classifier", {"bad", "good"});
    options_.from = folder_ / "masked";
  }

  void write_model(const std::string& name, const std::vector<std::string>& classes) {
    fs::create_directory(folder_ / name);
    const auto sizes = language_model_config(options_.model);
    if (!classes.empty()) sizes->set_head(Head::classes, classes);
    at::manual_seed(5);
    const auto model = sizes->build();
    Engine engine(model->module(), Sgd{});
    save_pretrained(engine, std::string(folder_ / name), {.config_json = sizes->to_json()});
  }

  // Two steps' batches of all ranks, in the order of the samples.
  std::vector<Batch> batches(int ranks, int64_t rows, int64_t from = 0) {
    options_.micro_batch_size = rows;
    std::vector<std::vector<Batch>> of_rank(static_cast<size_t>(ranks));
    comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
      train::Run run({.program = options_}, group, {});
      auto position = run.task->position();
      position.sample = from;
      run.task->restore(position);
      auto& mine = of_rank[static_cast<size_t>(group->rank())];
      for (int64_t i = 0; i < 12 / (ranks * rows); ++i) {
        auto batch = run.task->next();
        for (auto& tensor : batch) tensor = tensor.clone();
        if (batch[2].item<int64_t>() == 0) batch[1].fill_(-100);  // whatever stands for none
        mine.push_back(std::move(batch));
      }
    });
    std::vector<Batch> all;
    for (size_t i = 0; i < of_rank.front().size(); ++i) {
      for (const auto& mine : of_rank) all.push_back(mine[i]);
    }
    return all;
  }

  // Trains, and returns the file of the weights.
  std::string trained(int ranks, int stage, int64_t steps, int64_t accumulate = 1) {
    Settings given{.program = options_};
    given.engine.stage = stage;
    given.engine.optimizer = AdamW{.lr = 1e-2};
    given.engine.gradient_accumulation_steps = accumulate;
    given.program.steps = steps;
    given.program.schedule = optim::Decay::constant;
    comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
      Trainer trainer(given, group);
      EXPECT_EQ(trainer.train(), 0);
    });
    return test::read_file(folder_ / "run/model.safetensors");
  }

  Evaluation evaluated(const EvaluateOptions& options, int ranks = 1) {
    Evaluation result;
    comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
      const auto of_rank = evaluate(options, group);
      if (group->rank() == 0) result = of_rank;
    });
    return result;
  }

  test::TemporaryFolder folder_;
  Options options_;
};

TEST_F(EncoderTest, MasksAreThoseOfTheSampleAtAnyRanks) {
  options_.data = {folder_ / "tokens"};
  const auto rows_of = [&](const std::vector<Batch>& all, size_t part) {
    std::vector<at::Tensor> rows;
    for (const auto& batch : all) rows.push_back(batch[part]);
    return at::cat(rows);
  };
  const auto one = batches(1, 6);
  const auto two = batches(2, 3);
  const auto three = batches(3, 1);
  for (const size_t part : {0, 1}) {
    EXPECT_TRUE(rows_of(two, part).equal(rows_of(one, part)));
    EXPECT_TRUE(rows_of(three, part).equal(rows_of(one, part)));
    EXPECT_TRUE(
        rows_of(batches(1, 2, 4), part).narrow(0, 0, 8).equal(rows_of(one, part).narrow(0, 4, 8)))
        << "where a run goes on";
  }
  const auto targets = rows_of(one, 1);
  EXPECT_GT((targets != -100).sum().item<int64_t>(), 0);
  EXPECT_TRUE((rows_of(one, 0) == 4).any().item<bool>()) << "the token [MASK]";
}

TEST_F(EncoderTest, MaskedTokensAreLearntAtEveryStage) {
  options_.data = {folder_ / "tokens"};
  const auto plain = trained(2, 0, 3);
  for (const int stage : {1, 2, 3}) EXPECT_EQ(trained(2, stage, 3), plain) << stage;
  EXPECT_NE(trained(2, 3, 2), plain);

  // A run that is resumed goes on with the same masks.
  options_.save_every = 2;
  trained(2, 2, 2);
  options_.overwrite = false;
  options_.resume = true;
  EXPECT_EQ(trained(2, 3, 3), plain);
}

TEST_F(EncoderTest, ClassesAreLearntAtEveryStageAndNamed) {
  options_.data = {folder_ / "classes"};
  options_.from = folder_ / "classifier";
  options_.eval_tokens = 1 << 20;
  const auto plain = trained(2, 0, 3, 2);
  EXPECT_EQ(trained(2, 1, 3, 2), plain);
  EXPECT_EQ(trained(2, 3, 3, 2), trained(2, 2, 3, 2));
  const auto config = nlohmann::json::parse(test::read_file(folder_ / "run/config.json"));
  EXPECT_EQ(config["architectures"][0], "BertForSequenceClassification");
  EXPECT_EQ(config["id2label"], (nlohmann::json{{"0", "bad"}, {"1", "good"}}));

  trained(1, 0, 60);
  const EvaluateOptions lines{.from = folder_ / "run", .data = {folder_ / "lines.jsonl"}};
  const auto whole = evaluated(lines);
  EXPECT_EQ(whole.task, TrainingTask::classes);
  EXPECT_EQ(whole.predicted, 40);
  EXPECT_EQ(whole.correct, 40);
  EXPECT_LT(whole.loss, 0.2);

  // The log has the accuracy of each validation, as it is measured afterwards.
  std::istringstream log(test::read_file(folder_ / "run/log.jsonl"));
  nlohmann::json last;
  for (std::string line; std::getline(log, line);) {
    auto object = nlohmann::json::parse(line);
    if (object.value("event", "") == "validation") last = std::move(object);
  }
  const auto measured =
      evaluated({.from = folder_ / "run", .data = {folder_ / "classes"}, .stage = 3}, 2);
  EXPECT_EQ(last.at("texts"), measured.predicted);
  EXPECT_EQ(last.at("correct"), measured.correct);
  EXPECT_EQ(last.at("accuracy"), static_cast<double>(measured.correct) / 11);

  // The same at stage 3 on three ranks, with logits.
  auto sharded = lines;
  sharded.stage = 3;
  sharded.logits = folder_ / "logits.safetensors";
  const auto again = evaluated(sharded, 3);
  EXPECT_EQ(again.loss, whole.loss);
  EXPECT_EQ(again.correct, whole.correct);
  const SafetensorsReader file(sharded.logits);
  const auto logits = file.read("logits");
  EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{40, 2}));
  EXPECT_NEAR(at::cross_entropy_loss(logits, file.read("labels")).item<double>(), whole.loss, 1e-6);

  // A model without classes gets those of the data, and a head with random values.
  options_.from = folder_ / "masked";
  options_.task = TrainingTask::classes;
  train::Run run({.program = options_}, comm::single(), {});
  EXPECT_THAT(run.model->config().labels(), ElementsAre("bad", "good"));
  EXPECT_THAT(run.weights_report, AllOf(HasSubstr("classifier.weight"), HasSubstr("random")));
  EvaluateOptions headless{.from = folder_ / "masked", .data = {folder_ / "classes"}};
  headless.task = TrainingTask::classes;
  EXPECT_THAT(message_of<CheckpointError>([&] { evaluate(headless, comm::single()); }),
              HasSubstr("classifier.weight"));
}

TEST_F(EncoderTest, AnAdapterBringsItsClassesAndTheirHead) {
  options_.data = {folder_ / "classes"};
  options_.from = folder_ / "masked";
  options_.task = TrainingTask::classes;
  options_.lora.rank = 2;
  options_.lora.targets = "all-linear";  // of which the head is none
  trained(2, 2, 2, 2);
  const auto config = nlohmann::json::parse(test::read_file(folder_ / "run/adapter_config.json"));
  EXPECT_EQ(config["task_type"], "SEQ_CLS");
  EXPECT_EQ(config["modules_to_save"], (nlohmann::json{"classifier", "pooler"}));
  EvaluateOptions adapted{.from = folder_ / "run", .data = {folder_ / "classes"}};
  const auto seen = evaluated(adapted, 2);
  EXPECT_EQ(seen.task, TrainingTask::classes);
  EXPECT_EQ(seen.predicted, 11);
  // peft writes no names of classes, and names a head that other models have.
  fs::copy_file(fs::path(folder_ / "tokenizer/tokenizer.json"),
                fs::path(folder_ / "masked/tokenizer.json"));
  test::write_file(folder_ / "numbers.jsonl",
                   "{\"text\": \"good b\", \"label\": 1}\n{\"text\": \"bad\", \"label\": 0}\n");
  adapted.data = {folder_ / "numbers.jsonl"};
  const auto named = evaluated(adapted, 2);
  fs::remove(fs::path(folder_ / "run/labels.json"));
  auto of_peft = config;
  of_peft["modules_to_save"] = {"classifier", "pooler", "score"};
  test::write_file(folder_ / "run/adapter_config.json", of_peft.dump());
  const auto unnamed = evaluated(adapted, 2);
  EXPECT_EQ(unnamed.task, TrainingTask::classes);
  EXPECT_EQ(unnamed.loss, named.loss);
  // The random values of a head that is not trained would be lost.
  options_.lora.modules_to_save = "classifier";
  EXPECT_THAT(message_of<ConfigError>([&] { trained(1, 0, 1); }),
              AllOf(HasSubstr("bert.pooler.dense"), HasSubstr("--lora-modules-to-save")));
}

TEST_F(EncoderTest, ANewHeadMayBeTiled) {
  options_.data = {folder_ / "classes"};
  options_.from = folder_ / "masked";
  options_.task = TrainingTask::classes;
  Settings given{.program = options_};
  given.model.tile_elements = 64;
  train::Run run(given, comm::single(), {});
  for (const auto& name : run.engine->parameter_names()) {
    if (!name.starts_with("bert.pooler.dense.tiles.weights")) continue;
    EXPECT_GT(run.engine->parameter(name).abs().sum().item<double>(), 0) << name;
  }
}

TEST_F(EncoderTest, OneTextIsMeasuredWhole) {
  test::write_file(folder_ / "one.jsonl", "{\"text\": \"good b\", \"label\": \"good\"}\n");
  EvaluateOptions one{.from = folder_ / "classifier", .data = {folder_ / "one.jsonl"}};
  fs::copy_file(fs::path(folder_ / "tokenizer/tokenizer.json"),
                fs::path(folder_ / "classifier/tokenizer.json"));
  const auto whole = evaluated(one);
  one.seq = 16;
  EXPECT_EQ(whole.loss, evaluated(one).loss);
  one.data = {folder_ / "text.txt"};
  EXPECT_THAT(message_of<DataError>([&] { evaluate(one, comm::single()); }),
              AllOf(HasSubstr("text.txt"), HasSubstr("without labels")));
  one.from = folder_ / "masked";
  EXPECT_THAT(message_of<DataError>([&] { evaluate(one, comm::single()); }),
              AllOf(HasSubstr("tokenizer.json"), HasSubstr("502")));
}

TEST_F(EncoderTest, ABatchIsAsLongAsItsLongestText) {
  options_.data = {folder_ / "classes"};
  options_.task = TrainingTask::classes;
  options_.micro_batch_size = 4;
  train::Run run({.program = options_}, comm::single(), {});
  bool shorter = false;
  for (int i = 0; i < 6; ++i) {
    const auto batch = run.task->next();
    const auto lengths = batch[2].sum(1);
    EXPECT_EQ(lengths.max().item<int64_t>(), batch[0].size(1));
    EXPECT_TRUE(batch[0].masked_select(batch[2].logical_not()).eq(0).all().item<bool>());
    shorter = shorter || batch[0].size(1) < options_.seq;
    EXPECT_EQ(run.task->weight(batch), 4);
  }
  EXPECT_TRUE(shorter);
}

TEST_F(EncoderTest, AModelThatIsMeasuredGivesItsLossOnAnyRanks) {
  options_.data = {folder_ / "tokens", folder_ / "tokens"};  // a mixture
  options_.data_weights = {1, 3};
  trained(1, 0, 2);
  EvaluateOptions options{.from = folder_ / "run", .data = {folder_ / "tokens"}, .seq = 16};
  options.logits = folder_ / "logits.safetensors";
  const auto one = evaluated(options);
  EXPECT_EQ(one.task, TrainingTask::masked);
  const auto refused = [&] {
    return message_of<Error>([&] { evaluate(options, comm::single()); });
  };
  EXPECT_THAT(refused(), HasSubstr(options.logits + ", which is there"));
  fs::remove(options.logits);
  // Several have sequences of one length.
  test::write_file(folder_ / "short.txt", "good b");
  auto several = options;
  several.seq = 0;
  several.data.emplace_back(folder_ / "short.txt");
  EXPECT_THAT(message_of<DataError>([&] { evaluate(several, comm::single()); }),
              AllOf(HasSubstr("short.txt has "), HasSubstr("--seq")));
  options.stage = 3;
  options.micro_batch = 2;
  const auto two = evaluated(options, 2);
  EXPECT_EQ(two.loss, one.loss);
  EXPECT_EQ(two.predicted, one.predicted);
  const SafetensorsReader file(options.logits);
  const auto targets = file.read("targets");
  double sum = 0;
  for (int64_t i = 0; i < targets.size(0); ++i) {
    const auto logits = file.read("logits." + std::to_string(i));
    const auto of = targets[i];
    if ((of == -100).all().item<bool>()) continue;
    sum += at::cross_entropy_loss(logits, of).item<double>() * (of != -100).sum().item<double>();
  }
  EXPECT_NEAR(sum / static_cast<double>(one.predicted), one.loss, 1e-5 * one.loss);
  EXPECT_EQ((targets != -100).sum().item<int64_t>(), one.predicted);
}

TEST_F(EncoderTest, WhatDoesNotGoTogetherIsRefused) {
  const auto refused = [&](const std::function<void(Options&)>& change) {
    Settings given{.program = options_};
    change(given.program);
    return message_of<Error>([&] { check_run(given, 1); });
  };
  EXPECT_THAT(refused([&](Options& o) { o.task = TrainingTask::language; }),
              HasSubstr("not the next token"));
  EXPECT_THAT(refused([&](Options& o) { o.task = TrainingTask::classes; }),
              AllOf(HasSubstr("labels"), HasSubstr("--classify")));
  EXPECT_THAT(refused([&](Options& o) {
                o.task = TrainingTask::classes;
                o.data = {folder_ / "classes", folder_ / "classes"};
              }),
              AllOf(HasSubstr("takes one data set, and --data names 2"), HasSubstr("--classify")));
  EXPECT_THAT(refused([&](Options&) {}), AllOf(HasSubstr("mlm"), HasSubstr("--mask-token")))
      << "bytes have no mask";
  EXPECT_THAT(refused([&](Options& o) { o.mask_token = 502; }), HasSubstr("502"));
  test::write_file(folder_ / "gpt2.json", R"({"n_embd": 32, "n_layer": 1, "n_head": 2})");
  EXPECT_THAT(refused([&](Options& o) {
                o.from = "";
                o.model = folder_ / "gpt2.json";
                o.task = TrainingTask::masked;
              }),
              HasSubstr("no head for masked tokens"));
  EXPECT_THAT(refused([&](Options& o) {
                o.from = "";
                o.model = folder_ / "gpt2.json";
                o.data = {folder_ / "classes"};
              }),
              AllOf(HasSubstr("texts with labels"), HasSubstr("--task classify")));
}

}  // namespace
}  // namespace zero::train
