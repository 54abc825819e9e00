// Tests how tasks and the passes of a step work together.
#include <gtest/gtest.h>

#include <ATen/core/grad_mode.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/train/tiny_run.h"
#include "zero/train/run.h"
#include "zero/train/step_passes.h"
#include "zero/train/validator.h"

namespace zero::train {
namespace {

constexpr const char* kTiny =
    R"({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})";

/// Language modelling in which batch i supervises i + 1 tokens of each sequence.
class UnevenTask final : public Task {
 public:
  explicit UnevenTask(std::unique_ptr<Task> inner) : inner_(std::move(inner)) {}

  Batch next() override {
    auto batch = inner_->next();
    batch[1] = batch[1].clone();
    ++batches_;
    batch[1].narrow(1, batches_, batch[1].size(1) - batches_).fill_(-100);
    return batch;
  }
  LoaderState position() const override { return inner_->position(); }
  void restore(const LoaderState& position) override {
    inner_->restore(position);
    batches_ = 0;
  }
  int64_t validation_batches() const override { return inner_->validation_batches(); }
  int64_t validation_tokens() const override { return inner_->validation_tokens(); }
  Batch validation_batch(int64_t index) override {
    auto batch = inner_->validation_batch(index);
    const int64_t kept = index % 3 + 1;
    batch[1] = batch[1].clone();
    batch[1].narrow(1, kept, batch[1].size(1) - kept).fill_(-100);
    return batch;
  }
  double weight(const Batch& batch) const override {
    return static_cast<double>((batch[1] >= 0).sum().item<int64_t>());
  }
  std::optional<double> step_weight() const override { return std::nullopt; }
  at::Tensor loss(const Batch& batch) override { return inner_->loss(batch); }
  at::Tensor logits(const Batch& batch) override { return inner_->logits(batch); }
  LayerSequence layers(std::vector<Batch> batches) override {
    return inner_->layers(std::move(batches));
  }

 private:
  std::unique_ptr<Task> inner_;
  int64_t batches_ = 0;
};

class TaskTest : public ::testing::Test {
 protected:
  TaskTest() { options_ = tiny_run(folder_, "line ", kTiny); }
  std::unique_ptr<train::Run> make_run(bool layer_major) {
    options_.overwrite = true;
    Settings settings{.program = options_};
    settings.engine.gradient_accumulation_steps = 3;
    settings.engine.layer_major_accumulation = layer_major;
    return std::make_unique<train::Run>(settings, comm::single(),
                                        std::vector<std::unique_ptr<Monitor>>());
  }

  test::TemporaryFolder folder_;
  Options options_;
};

/// Returns the sum of the losses of all supervised tokens over their number.
double mean_over_tokens(Task& task, int64_t batches) {
  const at::NoGradGuard no_gradients;
  double sum = 0;
  double weight = 0;
  for (int64_t i = 0; i < batches; ++i) {
    const auto batch = task.next();
    sum += task.loss(batch).item<double>() * task.weight(batch);
    weight += task.weight(batch);
  }
  return sum / weight;
}

TEST_F(TaskTest, FactorsMakeTheMeanOverAllThatIsSupervised) {
  EXPECT_EQ(loss_factor(8, 48, 6), 1) << "equal weights change nothing";
  EXPECT_DOUBLE_EQ(loss_factor(1, 4, 2) * 5 + loss_factor(3, 4, 2) * 9, 2 * (1 * 5 + 3 * 9) / 4.0);
}

TEST_F(TaskTest, TokensCountAlikeWhateverTheirMicroBatch) {
  for (const bool layer_major : {false, true}) {
    const auto made = make_run(layer_major);
    made->task = std::make_unique<UnevenTask>(std::move(made->task));
    const auto begin = made->task->position();
    const double expected = mean_over_tokens(*made->task, 3);
    made->task->restore(begin);
    StepPasses passes(*made);
    passes.begin(1);
    passes.pass(nullptr);
    double sum = 0;
    for (const float loss : passes.losses()) sum += loss;
    EXPECT_NEAR(sum / 3, expected, 1e-5 * expected) << layer_major;
    EXPECT_EQ(passes.losses().size(), 3u);
    EXPECT_NE(passes.losses()[0], passes.losses()[2]);
    EXPECT_TRUE(made->engine->step().updated);
  }
}

TEST_F(TaskTest, AValidationIsTheMeanOverItsTokens) {
  options_.eval_tokens = 7 * options_.seq;
  const auto made = make_run(false);
  made->task = std::make_unique<UnevenTask>(std::move(made->task));
  double sum = 0;
  double weight = 0;
  {
    const at::NoGradGuard no_gradients;
    for (int64_t i = 0; i < made->task->validation_batches(); ++i) {
      const auto batch = made->task->validation_batch(i);
      sum += made->task->loss(batch).item<double>() * made->task->weight(batch);
      weight += made->task->weight(batch);
    }
  }
  const auto report = validate(*made, 0, [] { return false; });
  ASSERT_TRUE(report);
  EXPECT_EQ(report->tokens, 7 * options_.seq);
  EXPECT_NEAR(report->loss, sum / weight, 1e-5 * report->loss);
  EXPECT_FALSE(validate(*made, 0, [] { return true; }));
}

}  // namespace
}  // namespace zero::train
