// Runs and evaluations in which attention stays inside of each document.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/message_of.h"
#include "tests/train/tiny_run.h"
#include "zero/base/error.h"
#include "zero/data/token_file.h"
#include "zero/train/evaluate.h"
#include "zero/train/run.h"
#include "zero/train/step_passes.h"
#include "zero/train/trainer.h"
#include "zero/train/validator.h"

namespace zero::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kTiny =
    R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64})";
constexpr int64_t kSequence = 16;
constexpr int64_t kSequences = 64;

class DocumentsTest : public ::testing::Test {
 protected:
  DocumentsTest() {
    options_ = tiny_run(folder_, "line ", kTiny);
    options_.overwrite = true;
    options_.document_attention = true;
    options_.seq = kSequence;
    options_.data = {write_documents()};
    begin_with_saved_weights(options_, folder_);
  }

  // Writes documents of 1 to 9 tokens, whose second half is supervised.
  std::string write_documents() {
    std::string tokens;
    std::string marks;
    for (int64_t document = 0; document < 300; ++document) {
      const int64_t length = document * document % 9 + 1;
      for (int64_t i = 0; i < length; ++i) {
        tokens += {static_cast<char>((document + 1) * (i + 3) % 251), '\0'};
        marks += static_cast<char>(i == 0 ? kBeginsDocument : 2 * i >= length ? kSupervised : 0);
      }
    }
    constexpr size_t kSize = kSequences * kSequence + 1;
    test::write_file(folder_ / "answers.bin", tokens.substr(0, 2 * kSize));
    test::write_file(folder_ / "answers.marks.bin", marks.substr(0, kSize));
    return folder_ / "answers.bin";
  }

  // Trains, and returns the file of the weights.
  std::string trained(int ranks, int stage, Settings given) {
    given.program = options_;
    given.engine.stage = stage;
    given.engine.optimizer = AdamW{.lr = 1e-2};
    comm::run_as_threads(ranks, [&](std::shared_ptr<comm::Group> group) {
      Trainer trainer(given, group);
      EXPECT_EQ(trainer.train(), 0);
    });
    return test::read_file(folder_ / "run/model.safetensors");
  }

  test::TemporaryFolder folder_;
  Options options_;
};

// A loss and its weight in tokens, as sums.
struct Sum {
  double loss = 0;
  double tokens = 0;
  double mean() const { return loss / tokens; }
};

// Passes each document of the sequences alone through the model. Sequences are cut as in Note
// [Order of samples]; a document that one cuts goes on as another. `all`: every token is supervised
// that does not begin a document.
Sum alone(LanguageModel& model, const TokenRange& range, bool all) {
  const at::NoGradGuard no_grad;
  const int64_t sequences = (range.size() - 1) / kSequence;
  const auto length = static_cast<size_t>(sequences * kSequence + 1);
  std::vector<int64_t> tokens(length);
  std::vector<uint8_t> marks(length);
  range.tokens->read(range.begin, tokens);
  range.tokens->read_marks(range.begin, marks);
  Sum sum;
  for (size_t begin = 0; begin + 1 < length;) {
    size_t end = begin + 1;
    const auto ends = [&] { return end % kSequence == 0 || (marks[end] & kBeginsDocument) != 0; };
    while (!ends()) ++end;
    std::vector<int64_t> targets;
    for (size_t i = begin + 1; i <= end; ++i) {
      const bool of_another = (marks[i] & kBeginsDocument) != 0;
      const bool supervised = !of_another && (all || (marks[i] & kSupervised) != 0);
      targets.push_back(supervised ? tokens[i] : -100);
      sum.tokens += supervised ? 1 : 0;
    }
    const auto wanted = at::tensor(targets).unsqueeze(0);
    const auto count = (wanted != -100).sum().item<double>();
    const auto text = at::tensor(std::vector<int64_t>(tokens.begin() + static_cast<int64_t>(begin),
                                                      tokens.begin() + static_cast<int64_t>(end)));
    if (count > 0) sum.loss += model.loss(text.unsqueeze(0), wanted).item<double>() * count;
    begin = end;
  }
  return sum;
}

TEST_F(DocumentsTest, ALossIsTheMeanOverTheTokensOfDocumentsAlone) {
  for (const auto task : {TrainingTask::any, TrainingTask::language}) {
    options_.task = task;
    options_.eval_tokens = 0;
    const bool all = task == TrainingTask::language;
    Settings given{.program = options_};
    given.engine.gradient_accumulation_steps = 4;
    given.program.micro_batch_size = kSequences / 4;
    for (const bool layer_major : {false, true}) {
      given.engine.layer_major_accumulation = layer_major;
      train::Run run(given, comm::single(), {});
      const auto expected = alone(*run.model, run.data.train.sources.front(), all);
      EXPECT_GT(expected.tokens, all ? 700 : 400);
      StepPasses passes(run);
      passes.begin(1);
      passes.pass(nullptr);
      double mean = 0;
      for (const float loss : passes.losses()) mean += loss / 4;
      EXPECT_NEAR(mean, expected.mean(), 1e-6 * mean) << all << layer_major;
      EXPECT_TRUE(run.engine->step().updated);
    }

    options_.eval_tokens = 1 << 20;
    train::Run run({.program = options_}, comm::single(), {});
    const auto expected = alone(*run.model, run.data.validation.sources.front(), all);
    const auto report = validate(run, 0, [] { return false; });
    ASSERT_TRUE(report);
    EXPECT_NEAR(report->loss, expected.mean(), 1e-6 * report->loss) << all;
  }
}

TEST_F(DocumentsTest, StagesRecomputationAndResumingGiveTheSameBits) {
  const auto plain = trained(2, 0, {});
  EXPECT_TRUE(trained(2, 1, {}) == plain);
  Settings recomputed;
  recomputed.model.activation_checkpointing.every = 1;
  EXPECT_TRUE(trained(2, 3, recomputed) == plain);
  options_.document_attention = false;
  EXPECT_FALSE(trained(2, 0, {}) == plain);
  options_.document_attention = true;

  // A run that is resumed goes on alike, also in bf16 with an adapter.
  options_.lora.rank = 2;
  options_.save_every = 2;
  options_.schedule = optim::Decay::constant;
  Settings narrow;
  narrow.engine.bf16 = true;
  const auto adapter = [&] { return test::read_file(folder_ / "run/adapter_model.safetensors"); };
  const auto train_adapter = [&](int stage) {
    narrow.program = options_;
    narrow.engine.stage = stage;
    comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      Trainer trainer(narrow, group);
      EXPECT_EQ(trainer.train(), 0);
    });
    return adapter();
  };
  const auto whole = train_adapter(0);
  options_.steps = 2;
  train_adapter(2);
  options_.steps = 4;
  options_.overwrite = false;
  options_.resume = true;
  EXPECT_TRUE(train_adapter(3) == whole);
}

TEST_F(DocumentsTest, AreMeasuredAsTheyAreTrained) {
  const EvaluateOptions options{
      .from = options_.from, .data = options_.data, .document_attention = true, .seq = kSequence};
  train::Run run({.program = options_}, comm::single(), {});
  for (const auto task : {TrainingTask::any, TrainingTask::language}) {
    const auto expected =
        alone(*run.model, run.data.train.sources.front(), task == TrainingTask::language);
    auto asked = options;
    asked.task = task;
    asked.stage = 3;
    comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      const auto result = evaluate(asked, group);
      EXPECT_EQ(result.predicted, expected.tokens);
      EXPECT_NEAR(result.loss, expected.mean(), 1e-6 * result.loss);
    });
  }
  auto twice = options;
  twice.data = {options.data.front(), options.data.front()};
  const auto once = evaluate(options, comm::single());
  const auto result = evaluate(twice, comm::single());
  EXPECT_EQ(result.predicted, 2 * once.predicted);
  EXPECT_NEAR(result.loss, once.loss, 1e-6 * once.loss);
  auto text = options;
  text.data = {folder_ / "text.txt"};
  EXPECT_THAT(message_of<DataError>([&] { evaluate(text, comm::single()); }),
              AllOf(HasSubstr("text.txt"), HasSubstr("--document-attention")));
}

TEST_F(DocumentsTest, DataWithoutMarksAndEncodersAreRefused) {
  const auto refused = [&](const std::function<void(Options&)>& change) {
    Settings given{.program = options_};
    change(given.program);
    return message_of<Error>([&] { check_run(given, 1); });
  };
  const auto remedy =
      AllOf(HasSubstr("--document-attention"), HasSubstr("zero data prepare --jsonl"));
  EXPECT_THAT(refused([&](Options& o) { o.data = {folder_ / "text.txt"}; }),
              AllOf(HasSubstr("text.txt has no marks"), remedy));
  test::write_file(folder_ / "plain.bin", test::read_file(options_.data.front()));
  EXPECT_THAT(refused([&](Options& o) {
                o.val_data = folder_ / "plain.bin";
                o.eval_tokens = 64;
              }),
              AllOf(HasSubstr("plain.bin has no marks"), remedy));
  test::write_file(folder_ / "plain.marks.bin", std::string(kSequences * kSequence + 1, '\1'));
  EXPECT_THAT(refused([&](Options& o) { o.data = {folder_ / "plain.bin"}; }),
              AllOf(HasSubstr("none of which"), remedy));
  test::write_file(folder_ / "bert.json",
                   R"({"model_type": "bert", "vocab_size": 256, "hidden_size": 16,
                       "intermediate_size": 24, "num_hidden_layers": 1,
                       "num_attention_heads": 2})");
  EXPECT_THAT(refused([&](Options& o) {
                o.from = "";
                o.model = folder_ / "bert.json";
                o.mask_token = 3;
              }),
              AllOf(HasSubstr("document_attention"), HasSubstr("bert for masked tokens")));
}

}  // namespace
}  // namespace zero::train
