// The training loop from C++, without the program.
#include "zero/train/trainer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/support/run_program.h"
#include "tests/train/tiny_run.h"
#include "zero/base/error.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/data/prepare.h"
#include "zero/device/deterministic.h"
#include "zero/models/architectures.h"
#include "zero/train/monitors.h"
#include "zero/train/resume.h"
#include "zero/train/same_run.h"

namespace zero::train {
namespace {

TEST(KeepGlobalBatch, SharesTheMicroBatchesAmongOtherRanksOrAsksForOtherBatches) {
  const SavedSettings saved{R"({"gradient_accumulation_steps": 2, "train_batch_size": 8})", 2};
  EXPECT_EQ(keep_global_batch(saved, 2), saved.configuration);
  EXPECT_EQ(keep_global_batch(saved, 4), R"({"gradient_accumulation_steps":1})");
  EXPECT_EQ(keep_global_batch(saved, 1), R"({"gradient_accumulation_steps":4})");
  try {
    (void)keep_global_batch(saved, 3);
    ADD_FAILURE() << "3 ranks took 4 micro-batches";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("3 ranks cannot share these 4"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("Give --nproc 2"));
  }
}

TEST(OverrideSettings, KeepsWhatASectionOfTheSameKindOfOptimizerLeavesOut) {
  const auto over = [](std::string_view saved, std::string_view given) {
    const auto all = override_settings(fmt::format(R"({{"optimizer": {}}})", saved),
                                       fmt::format(R"({{"optimizer": {}}})", given), "here");
    return nlohmann::json::parse(all).at("optimizer").at("params");
  };
  using nlohmann::json;
  const auto* adam = R"({"type": "Adam", "params": {"eps": 0.5, "adam_w_mode": false}})";
  EXPECT_EQ(over(adam, R"({"type": "adam", "params": {"lr": 2}})"),
            json({{"eps", 0.5}, {"adam_w_mode", false}, {"lr", 2}}));
  EXPECT_EQ(over(adam, R"({"type": "Lion", "params": {"lr": 2}})"), json({{"lr", 2}}));
  // A name that stands for values says them.
  const auto apollo =
      over(R"({"type": "Apollo", "params": {"rank": 8, "lr": 0.5, "update_proj_gap": 9}})",
           R"({"type": "apollo_mini", "params": {"lr": 2}})");
  EXPECT_EQ(apollo.at("rank"), 1);
  EXPECT_EQ(apollo.at("scale_type"), "tensor");
  EXPECT_EQ(apollo.at("update_proj_gap"), 9);
  EXPECT_EQ(apollo.at("lr"), 2);
}

struct Heard {
  std::vector<StepReport> steps;
  std::vector<ValidationReport> validations;
  RunInfo run;
  std::string text;
};

class Listener final : public Monitor {
 public:
  explicit Listener(Heard& heard) : heard_(heard) {}
  void begin(const RunInfo& run) override { heard_.run = run; }
  void step(const StepReport& report) override { heard_.steps.push_back(report); }
  void validation(const ValidationReport& report) override { heard_.validations.push_back(report); }
  void sample(const std::string&, const std::string& text) override { heard_.text = text; }

 private:
  Heard& heard_;
};

class FailingMonitor final : public Monitor {
 public:
  void step(const StepReport& report) override {
    if (report.step == 2) throw Error("The disk of this monitor is full.");
  }
};

template <class... MonitorTypes>
std::vector<std::unique_ptr<Monitor>> monitors(std::unique_ptr<MonitorTypes>... each) {
  std::vector<std::unique_ptr<Monitor>> all;
  (all.push_back(std::move(each)), ...);
  return all;
}

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() {
    options_ = tiny_run(
        folder_, "a line to learn, number ",
        R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32,
        "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})");
    options_.eval_every = 2;
    options_.eval_tokens = 64;
    options_.sample_tokens = 5;
    config_.gradient_accumulation_steps = 2;
  }

  Settings settings() const { return {.engine = config_, .program = options_}; }
  Config with(const OffloadOptimizer& offload) const {
    auto config = config_;
    config.offload_optimizer = offload;
    return config;
  }

  test::TemporaryFolder folder_;
  Options options_;
  Config config_;
};

TEST_F(TrainerTest, AnOptimizerThatWarmsUpTellsTheRateInForce) {
  const auto rates = [&](std::optional<int64_t> own, std::optional<int64_t> of_the_run) {
    config_.optimizer = ScheduleFreeAdamW{.lr = 0.01, .warmup_steps = own};
    options_.warmup = of_the_run;
    options_.steps = 20;
    options_.overwrite = true;
    Heard heard;
    Trainer(settings(), comm::single(), monitors(std::make_unique<Listener>(heard))).train();
    std::vector<double> first;
    for (size_t i = 0; i < 4; ++i) first.push_back(heard.steps.at(i).lr);
    return first;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(rates({}, {}), ElementsAre(0.005, 0.01, 0.01, 0.01)) << "a tenth of the steps";
  EXPECT_THAT(rates(0, {}), ElementsAre(0.01, 0.01, 0.01, 0.01));
  EXPECT_THAT(rates(4, {}), ElementsAre(0.0025, 0.005, 0.0075, 0.01));
  EXPECT_THAT(rates(4, 0), ElementsAre(0.01, 0.01, 0.01, 0.01));
}

// Sees in each step whether operators are asked to be deterministic, and calls one that is not.
class DeterministicWatch final : public Monitor {
 public:
  explicit DeterministicWatch(std::vector<bool>& seen) : seen_(seen) {}
  void step(const StepReport& report) override {
    seen_.push_back(DeterministicOperators::active());
    if (report.step != 2) return;
    auto to = at::zeros({4});
    EXPECT_EQ(throws([&] { to.put_(at::zeros({2}, at::kLong), at::ones({2})); }), seen_.back());
  }

 private:
  static bool throws(const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("put_"));
      return true;
    }
    return false;
  }

  std::vector<bool>& seen_;
};

TEST_F(TrainerTest, AsksForDeterministicOperatorsWhileItTrains) {
  for (const bool asked : {false, true}) {
    options_.deterministic = asked;
    options_.overwrite = true;
    std::vector<bool> seen;
    Trainer trainer(settings(), comm::single(),
                    monitors(std::make_unique<DeterministicWatch>(seen)));
    EXPECT_EQ(trainer.train(), 0);
    EXPECT_EQ(seen, std::vector<bool>(4, asked));
    EXPECT_FALSE(DeterministicOperators::active());
  }
}

TEST_F(TrainerTest, ReportsToTheMonitorsOfItsCaller) {
  Heard heard;
  Trainer trainer(settings(), comm::single(), monitors(std::make_unique<Listener>(heard)));
  EXPECT_EQ(trainer.train(), 0);
  EXPECT_EQ(trainer.step(), 4);
  EXPECT_EQ(heard.run.tokens_per_step(), 2 * 2 * 16);
  ASSERT_EQ(heard.steps.size(), 4u);
  ASSERT_EQ(heard.validations.size(), 2u) << "after step 2, and at the end";
  EXPECT_EQ(heard.validations[1].step, 4);
  EXPECT_EQ(heard.text.size(), 5u);
  EXPECT_DOUBLE_EQ(heard.steps[3].lr, 3e-5) << "a tenth of the peak at the last step";

  std::istringstream log(test::read_file(folder_ / "run/log.jsonl"));
  size_t found = 0;
  for (std::string line; std::getline(log, line);) {
    const auto object = nlohmann::json::parse(line);
    if (object.contains("event")) continue;
    EXPECT_EQ(object["loss"].get<float>(), heard.steps.at(found++).loss);
  }
  EXPECT_EQ(found, 4u);
}

TEST_F(TrainerTest, AFlippedBitOfOneRanksWeightsIsAnErrorThatNamesIt) {
  config_.gradient_accumulation_steps = 1;
  options_.check_replicas = 2;
  std::vector<std::string> errors(2);
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    const auto rank = static_cast<size_t>(group->rank());
    Trainer trainer(settings(), group);
    for (int step = 0; step < 2; ++step) (void)trainer.train_step();
    if (rank == 1) {
      const auto weight = trainer.model().module().named_parameters()["h.0.mlp.c_fc.weight"];
      static_cast<uint8_t*>(weight.mutable_data_ptr())[5] ^= 1;
    }
    (void)trainer.train_step();
    try {
      (void)trainer.train_step();
    } catch (const Error& error) {
      errors[rank] = error.what();
    }
  });
  EXPECT_THAT(errors[0], testing::AllOf(testing::HasSubstr("h.0.mlp.c_fc.weight on rank 1"),
                                        testing::HasSubstr("update of step 4"),
                                        testing::HasSubstr("update of step 2 they were the same")));
  EXPECT_NE(errors[1], "");
}

TEST_F(TrainerTest, RanksThatWereNotStartedAlikeAreRefused) {
  const auto refusals = [&](const std::function<void(Settings&)>& change) {
    std::vector<std::string> errors(3);
    comm::run_as_threads(3, [&](std::shared_ptr<comm::Group> group) {
      auto mine = settings();
      if (group->rank() == 1) change(mine);
      try {
        Trainer trainer(mine, group);
      } catch (const ConfigError& error) {
        errors[static_cast<size_t>(group->rank())] = error.what();
      }
    });
    EXPECT_EQ(errors[0], errors[1]) << "whose hosts' users look at their own";
    return errors[1];
  };
  using testing::HasSubstr;
  EXPECT_THAT(refusals([](Settings& s) { s.program.steps = 7; }),
              testing::AllOf(HasSubstr("what rank 1 has"),
                             HasSubstr(fmt::format("train.steps {} -> 7", options_.steps))));
  EXPECT_THAT(refusals([](Settings& s) { s.program.seed = 9; }), HasSubstr("train.seed"));
  EXPECT_THAT(refusals([](Settings& s) { s.engine.gradient_clipping = 3; }),
              HasSubstr("gradient_clipping"));
  const auto other = (folder_ / "other.txt").string();
  test::write_file(other, test::read_file(options_.data.front()) + "one line more\n");
  EXPECT_THAT(refusals([&](Settings& s) { s.program.data = {other}; }), HasSubstr("data.training"));
  EXPECT_THAT(refusals([](Settings& s) {
                s.engine.offload_optimizer.device = OffloadDevice::nvme;
                s.engine.offload_optimizer.nvme_path = "/scratch";
              }),
              HasSubstr("zero_optimization.offload_optimizer (default) -> "));
  // A copy of the text elsewhere, and another number of threads, will do.
  const auto copy = (folder_ / "copy.txt").string();
  test::write_file(copy, test::read_file(options_.data.front()));
  EXPECT_EQ(refusals([&](Settings& s) {
              s.program.data = {copy};
              s.program.threads = 1;
            }),
            "");
  options_.data.push_back(other);  // of a mixture every source counts
  EXPECT_THAT(refusals([&](Settings& s) { s.program.data.back() = copy; }),
              HasSubstr("data.training"));
}

TEST_F(TrainerTest, AFolderThatSomeRankDoesNotShareIsRefused) {
  for (const bool shared : {true, false}) {
    std::vector<std::string> errors(3);
    comm::run_as_threads(3, [&](std::shared_ptr<comm::Group> group) {
      const auto rank = static_cast<size_t>(group->rank());
      const RunFolder folder(folder_ / (shared || rank < 2 ? "run" : "its-own"));
      folder.make();
      group->barrier("the folders are there");
      try {
        check_shared(*group, folder);
      } catch (const ConfigError& error) {
        errors[rank] = error.what();
      }
      group->barrier("looked");
      EXPECT_TRUE(std::filesystem::is_empty(folder.log().parent_path()));
    });
    if (shared) {
      EXPECT_THAT(errors, testing::Each(""));
    } else {
      EXPECT_THAT(errors[2], testing::HasSubstr("its-own"));
      EXPECT_THAT(errors[0], testing::AllOf(testing::HasSubstr("Rank 2 does not see"),
                                            testing::HasSubstr("--save-every")));
    }
  }
}

TEST_F(TrainerTest, ASlowRankIsNamed) {
  config_.gradient_accumulation_steps = 1;
  options_.steps = 40;
  options_.eval_tokens = 0;
  options_.sample_tokens = 0;
  Heard heard;
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    std::vector<std::unique_ptr<Monitor>> listeners;
    if (group->rank() == 0) listeners.push_back(std::make_unique<Listener>(heard));
    Trainer trainer(settings(), group, std::move(listeners));
    // Both take at least 30 ms a step, rank 1 half as much again.
    const auto pause = std::chrono::milliseconds(group->rank() == 1 ? 45 : 30);
    const auto weight = trainer.model().module().named_parameters()["h.0.mlp.c_fc.weight"];
    weight.register_hook([pause](const at::Tensor&) { std::this_thread::sleep_for(pause); });
    trainer.train();
  });
  std::string notices;
  for (const auto& step : heard.steps) {
    for (const auto& notice : step.notices) notices += notice;
  }
  EXPECT_THAT(notices, testing::AllOf(testing::HasSubstr("Rank 1 is slow"),
                                      testing::Not(testing::HasSubstr("Rank 0"))));
}

// A batch whose loss is far above the others': the model's weights are spoilt for one step.
TEST_F(TrainerTest, ALossThatIsASpikeIsToldAndLeftOutWhereThatIsAskedFor) {
  options_.eval_tokens = 0;
  for (const bool skips : {false, true}) {
    options_.skip_spikes = skips;
    options_.out = folder_ / (skips ? "skips" : "tells");
    Trainer trainer(settings(), comm::single());
    for (size_t step = 0; step < LossSpikes::kWindow; ++step)
      EXPECT_TRUE(trainer.train_step().notices.empty());
    const c10::NoGradGuard no_grad;
    const auto bias = trainer.model().module().named_parameters()["ln_f.bias"];
    const auto before = bias.clone();
    bias.add_(30);
    const at::AutoGradMode grad(true);
    const auto steps = trainer.engine().steps();
    const auto report = trainer.train_step();
    ASSERT_EQ(report.notices.size(), 1);
    EXPECT_THAT(report.notices[0], testing::HasSubstr("is a spike"));
    EXPECT_EQ(report.skipped, skips);
    EXPECT_EQ(report.left_out, skips);
    EXPECT_EQ(report.anomaly, "") << "its gradients are finite";
    EXPECT_EQ(trainer.engine().steps(), steps + (skips ? 0 : 1));
    if (skips) {
      EXPECT_TRUE(at::equal(bias, before + 30));
    }
  }
  config_.update_in_backward = true;
  EXPECT_THROW(settings().validate(), ConfigError);
}

// Spoils the weights after a step, as a bad batch would.
class Spoiler final : public Monitor {
 public:
  Spoiler(std::unique_ptr<Trainer>& trainer, std::vector<int64_t> after)
      : trainer_(trainer), after_(std::move(after)) {}
  void step(const StepReport& report) override {
    const auto found = std::find(after_.begin(), after_.end(), report.step);
    if (found == after_.end()) return;
    after_.erase(found);
    const c10::NoGradGuard no_grad;
    trainer_->model().module().named_parameters()["ln_f.bias"].add_(30);
  }
  void rewound(const RewindReport& report) override { rewinds.push_back(report); }
  std::vector<RewindReport> rewinds;

 private:
  std::unique_ptr<Trainer>& trainer_;
  std::vector<int64_t> after_;
};

TEST_F(TrainerTest, AfterASpikeTrainingGoesBackToACheckpointAndOnWithOtherData) {
  options_.steps = 45;
  options_.save_every = 10;
  options_.rewind_spikes = 5;
  options_.eval_every.reset();
  options_.sample_tokens = 0;
  options_.csv_monitor = {.enabled = true, .output_path = folder_ / "csv", .job_name = ""};
  options_.tensorboard = {.enabled = true, .output_path = folder_ / "events", .job_name = ""};
  std::unique_ptr<Trainer> trainer;
  auto owned = std::make_unique<Spoiler>(trainer, std::vector<int64_t>{33});
  const auto& heard = *owned;
  trainer = std::make_unique<Trainer>(settings(), comm::single(), monitors(std::move(owned)));
  EXPECT_EQ(trainer->train(), 0);
  ASSERT_EQ(heard.rewinds.size(), 1u);
  EXPECT_EQ(heard.rewinds[0].from, 34);
  EXPECT_EQ(heard.rewinds[0].to, 20) << "that of step 30 is 4 steps old";
  EXPECT_EQ(heard.rewinds[0].sample, 34 * 4);
  EXPECT_EQ(trainer->step(), 45);
  EXPECT_EQ(trainer->engine().steps(), 45);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/checkpoint-20"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/checkpoint-45"));

  std::istringstream log(test::read_file(folder_ / "run/log.jsonl"));
  int64_t next = 1;
  bool told = false;
  for (std::string line; std::getline(log, line);) {
    const auto object = nlohmann::json::parse(line);
    if (object.contains("event")) {
      if (object["event"] != "rewind") continue;
      told = true;
      EXPECT_EQ(next, 21);
      EXPECT_THAT(object["reason"].get<std::string>(),
                  testing::HasSubstr("goes back to the checkpoint of step 20"));
      continue;
    }
    EXPECT_EQ(object["step"].get<int64_t>(), next++) << "each step once";
    EXPECT_LT(object["loss"].get<double>(), 7);
  }
  EXPECT_TRUE(told);
  EXPECT_EQ(next, 46);
  std::istringstream steps(test::read_file(folder_ / "csv/Train_Steps_loss.csv"));
  std::istringstream samples(test::read_file(folder_ / "csv/Train_Samples_train_loss.csv"));
  std::string line;
  std::getline(steps, line);
  for (next = 1; std::getline(steps, line); ++next)
    EXPECT_EQ(line.substr(0, line.find(',')), std::to_string(next));
  EXPECT_EQ(next, 46);
  std::getline(samples, line);
  for (next = 1; std::getline(samples, line); ++next)
    EXPECT_EQ(line.substr(0, line.find(',')), std::to_string(4 * (next <= 20 ? next : next + 14)));
}

TEST_F(TrainerTest, AllRanksGoBackTogether) {
  config_.stage = 3;
  options_.steps = 60;
  options_.eval_tokens = 0;
  options_.save_every = 1000;
  for (const int64_t distance : {5, 100}) {
    options_.rewind_spikes = distance;
    options_.out = folder_ / ("run" + std::to_string(distance));
    comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      Trainer trainer(settings(), group);
      for (int step = 0; step < 34; ++step) {
        if (step == 20) trainer.save_checkpoint();
        EXPECT_FALSE(trainer.train_step().rewound.has_value());
      }
      {
        const c10::NoGradGuard no_grad;
        trainer.model().module().named_parameters()["ln_f.bias"].add_(30);
      }
      const auto report = trainer.train_step();
      EXPECT_TRUE(report.left_out);
      const bool goes_back = distance == 5;
      EXPECT_EQ(report.rewound.has_value(), goes_back);
      EXPECT_EQ(trainer.step(), goes_back ? 20 : 35);
      EXPECT_EQ(trainer.engine().steps(), goes_back ? 20 : 34);
      if (group->rank() == 0) {
        EXPECT_THAT(report.notices.at(0),
                    testing::HasSubstr(goes_back ? "back to the checkpoint of step 20"
                                                 : "No checkpoint is at least 100 steps old"));
      }
      if (goes_back) {
        EXPECT_TRUE(trainer.train_step().notices.empty()) << "what follows is no spike";
      }
    });
  }
}

TEST_F(TrainerTest, GoesBackSeveralTimesButNotForEver) {
  options_.steps = 60;
  options_.save_every = 40;
  options_.rewind_spikes = 1;
  options_.eval_tokens = 0;
  options_.sample_tokens = 0;
  std::unique_ptr<Trainer> trainer;
  auto owned = std::make_unique<Spoiler>(trainer, std::vector<int64_t>{41, 41, 41, 41});
  const auto& heard = *owned;
  trainer = std::make_unique<Trainer>(settings(), comm::single(), monitors(std::move(owned)));
  try {
    trainer->train();
    ADD_FAILURE() << "it went on for ever";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::AllOf(testing::HasSubstr("4 times"), testing::HasSubstr("up to step 42"),
                               testing::HasSubstr("for --resume, is of step 40")));
  }
  EXPECT_EQ(heard.rewinds.size(), 3u);
  options_.save_every.reset();
  EXPECT_THROW(settings().validate(), ConfigError);
}

TEST_F(TrainerTest, AStepThatOverflowsIsToldAndIsNoneOfTheSchedule) {
  config_.fp16 = true;
  config_.loss_scaling = {.initial_power = 40, .window = 1000, .hysteresis = 1};
  options_.steps = 60;
  options_.warmup = 4;
  options_.eval_tokens = 0;
  for (const bool layer_major : {false, true}) {
    config_.layer_major_accumulation = layer_major;
    config_.stage = layer_major ? 3 : 0;
    options_.out = folder_ / (layer_major ? "layers" : "usual");
    Heard heard;
    Trainer trainer(settings(), comm::single(), monitors(std::make_unique<Listener>(heard)));
    trainer.train();
    EXPECT_EQ(heard.run.dtype, "fp16");
    ASSERT_EQ(heard.steps.size(), 60u);
    EXPECT_TRUE(heard.steps.front().skipped);
    EXPECT_FALSE(heard.steps.back().skipped);
    for (size_t i = 0; i + 1 < heard.steps.size(); ++i) {
      const auto& step = heard.steps[i];
      EXPECT_EQ(step.next_loss_scale, step.loss_scale / (step.skipped ? 2 : 1));
      EXPECT_EQ(heard.steps[i + 1].loss_scale, step.next_loss_scale);
      EXPECT_EQ(heard.steps[i + 1].lr == step.lr, step.skipped);
    }
    EXPECT_LT(heard.steps.back().loss, heard.steps.front().loss - 0.2);
  }
}

TEST_F(TrainerTest, SavesTheWeightsThatItTrained) {
  Trainer trainer(settings(), comm::single());
  trainer.train();
  const SafetensorsReader file(folder_ / "run/model.safetensors");
  const auto parameters = trainer.model().module().named_parameters();
  EXPECT_EQ(file.tensors().size(), parameters.size());
  for (const auto& parameter : parameters) {
    EXPECT_TRUE(file.read(parameter.key()).equal(parameter.value().detach())) << parameter.key();
  }
  EXPECT_EQ(language_model_config((folder_ / "run/config.json").string())->to_json(),
            trainer.model().config().to_json());
}

TEST_F(TrainerTest, BeginsWithTheWeightsOfAFolder) {
  Trainer(settings(), comm::single()).train();
  const SafetensorsReader first(folder_ / "run/model.safetensors");
  options_.from = folder_ / "run";
  test::write_file(folder_ / "run/tokenizer.json", "{}");
  options_.out = folder_ / "tuned";
  options_.model = "no such model";  // the folder's is taken
  options_.save_every = 2;
  config_.stage = 3;
  config_.optimizer = AdamW{.lr = 0};
  comm::run_as_threads(2, [&](auto group) {
    Trainer trainer(settings(), group);
    trainer.train();
  });
  const auto same = [&] {
    const SafetensorsReader second(folder_ / "tuned/model.safetensors");
    ASSERT_EQ(second.tensors().size(), first.tensors().size());
    for (const auto& info : first.tensors())
      EXPECT_TRUE(second.read(info.name).equal(first.read(info.name))) << info.name;
  };
  same();
  EXPECT_THAT(test::read_file(folder_ / "tuned/log.jsonl"),
              ::testing::HasSubstr("weights of " + options_.from));
  EXPECT_EQ(test::read_file(folder_ / "tuned/tokenizer.json"), "{}");
  // A resumed run takes the checkpoint's.
  std::filesystem::remove(folder_ / "run/model.safetensors");
  options_.resume = true;
  options_.steps = 6;
  comm::run_as_threads(2, [&](auto group) { Trainer(settings(), group).train(); });
  same();
  options_.resume = false;
  options_.out = folder_ / "another";
  EXPECT_THROW(check_run(settings(), 1), CheckpointError);
}

TEST_F(TrainerTest, ValidatesOnTheSameTokensEveryTime) {
  Trainer trainer(settings(), comm::single());
  const auto first = trainer.validate().value();
  EXPECT_EQ(trainer.validate().value().loss, first.loss);
  trainer.train_step();
  EXPECT_LT(trainer.validate().value().loss, first.loss);
}

TEST_F(TrainerTest, ValidatesTheWeightsThatItSavesWhereUpdatesAreDelayed) {
  Heard heard;
  config_.offload_optimizer.device = OffloadDevice::nvme;
  config_.offload_optimizer.nvme_path = folder_.path();
  config_.offload_optimizer.delayed_update_after = 1;
  Trainer trainer(settings(), comm::single(), monitors(std::make_unique<Listener>(heard)));
  trainer.train();
  EXPECT_EQ(heard.validations.back().loss, trainer.validate().value().loss);
}

TEST_F(TrainerTest, SavesAndValidationsChangeNothingWhereUpdatesAreDelayed) {
  config_.stage = 3;
  config_.bf16 = true;
  config_.offload_optimizer.delayed_update_after = 1;
  options_.sample_tokens = 0;
  options_.steps = 6;
  const auto run = [&](const std::string& out) {
    options_.out = folder_ / out;
    Heard heard;
    comm::run_as_threads(2, [&](auto group) {
      std::vector<std::unique_ptr<Monitor>> listeners;
      if (group->rank() == 0) listeners.push_back(std::make_unique<Listener>(heard));
      Trainer(settings(), group, std::move(listeners)).train();
    });
    std::vector<float> losses;
    for (const auto& step : heard.steps) losses.push_back(static_cast<float>(step.loss));
    return std::pair(losses, test::read_file(folder_ / out / "model.safetensors"));
  };
  options_.eval_every.reset();
  const auto [losses, weights] = run("straight");
  options_.eval_every = 2;
  options_.save_every = 2;
  options_.keep_best = true;
  options_.keep_last = 3;
  EXPECT_TRUE(run("saving") == std::pair(losses, weights));
  // The same run is cut off after step 4.
  std::filesystem::remove_all(folder_ / "saving/checkpoint-6");
  std::filesystem::remove(folder_ / "saving/model.safetensors");
  options_.resume = true;
  EXPECT_TRUE(run("saving") ==
              std::pair(std::vector<float>(losses.end() - 2, losses.end()), weights));
}

TEST_F(TrainerTest, ValidationSpreadsItsTokensOverTheWholeText) {
  const auto text = test::read_file(options_.data.front());
  const auto loss_with = [&](size_t changed) {
    auto other = text;
    if (changed < other.size()) other.replace(changed, 400, 400, 'z');
    test::write_file(folder_ / "validation.txt", other);
    options_.val_data = folder_ / "validation.txt";
    options_.overwrite = true;
    Trainer trainer(settings(), comm::single());
    const auto report = trainer.validate().value();
    EXPECT_EQ(report.tokens, 320);
    return report.loss;
  };
  options_.eval_tokens = 320;  // 20 of some 470 sequences
  const double loss = loss_with(text.size());
  for (const double part : {0.1, 0.5, 0.9}) {
    EXPECT_NE(loss_with(static_cast<size_t>(part * static_cast<double>(text.size()))), loss)
        << part;
  }
}

TEST_F(TrainerTest, ValidatesOnTheWholeTextWhereThatIsShorter) {
  options_.eval_tokens = int64_t{1} << 62;
  options_.val_data = options_.data.front();
  Trainer trainer(settings(), comm::single());
  const auto size = static_cast<int64_t>(std::filesystem::file_size(options_.data.front()));
  EXPECT_EQ(trainer.validate().value().tokens, (size - 1) / options_.seq * options_.seq);
}

TEST_F(TrainerTest, StopsWithTheErrorOfAMonitorThatFails) {
  Trainer trainer(settings(), comm::single(), monitors(std::make_unique<FailingMonitor>()));
  try {
    trainer.train();
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "The disk of this monitor is full.");
  }
  EXPECT_LE(trainer.step(), 3);
}

/// Fails in the step after `last`, as a machine does.
class Failing final : public Monitor {
 public:
  explicit Failing(int64_t last) : last_(last) {}
  void step(const StepReport& report) override {
    if (report.step > last_) throw Error("This machine fails.");
  }

 private:
  int64_t last_;
};

TEST_F(TrainerTest, FilesOfMonitorsGoOnInAResumedRunAsInOneThatWasNotInterrupted) {
  options_.steps = 7;
  options_.tensorboard.enabled = true;
  options_.csv_monitor = {.enabled = true, .output_path = folder_ / "whole", .job_name = "job"};
  Trainer(settings(), comm::single()).train();
  EXPECT_EQ(event_files(folder_ / "run/DeepSpeedJobName").size(), 1u);

  options_.out = folder_ / "parts";
  options_.csv_monitor.output_path = folder_ / "parts";
  options_.save_every = 4;
  {
    // The caller's monitors come first, so that the files end with step 5.
    Trainer trainer(settings(), comm::single(), monitors(std::make_unique<Failing>(5)));
    EXPECT_THROW(trainer.train(), Error);
  }
  EXPECT_THAT(test::read_file(folder_ / "parts/job/Train_Steps_loss.csv"),
              ::testing::HasSubstr("\n5,"));
  EXPECT_THROW(check_run(settings(), 1), ConfigError);
  options_.resume = true;
  check_run(settings(), 1);
  Trainer(settings(), comm::single()).train();
  for (const char* name : {"Train_Samples_train_loss", "Train_Samples_lr", "Train_Steps_loss",
                           "Train_Steps_grad_norm", "Validation_Steps_loss"}) {
    const auto file = std::string("job/") + name + ".csv";
    EXPECT_NE(test::read_file(folder_ / "whole" / file), "") << name;
    EXPECT_EQ(test::read_file(folder_ / "parts" / file), test::read_file(folder_ / "whole" / file));
  }
  EXPECT_EQ(test::read_file(folder_ / "parts/job/Train_Samples_lr.csv").substr(0, 10),
            "step,lr\n4,")
      << "2 micro-batches of 2";
  EXPECT_EQ(event_files(folder_ / "parts/DeepSpeedJobName").size(), 2u);
}

TEST_F(TrainerTest, RefusesAMonitorsFolderBeforeItTrains) {
  options_.tensorboard = {.enabled = true, .output_path = folder_ / "text.txt", .job_name = ""};
  EXPECT_THAT(
      [&] { check_run(settings(), 1); },
      ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("text.txt is not a folder")));
  EXPECT_THROW(Trainer(settings(), comm::single()), ConfigError);
  EXPECT_FALSE(std::filesystem::exists(options_.out));
}

TEST_F(TrainerTest, SamplesOnlyTokensThatHaveText) {
  Heard heard;
  options_.vocab_size =
      5000;  // the untrained model would draw one of the 4744 others nearly always
  options_.steps = 1;
  Trainer trainer(settings(), comm::single(), monitors(std::make_unique<Listener>(heard)));
  trainer.train();
  EXPECT_EQ(heard.text.size(), 5u);
}

TEST_F(TrainerTest, ValidatesOnAFolderSplitAndOnAWholeFile) {
  const auto prepared = prepare({.inputs = {folder_ / "text.txt"},
                                 .output = folder_ / "prepared",
                                 .tokenizer = "bytes",
                                 .validation_fraction = 0.3});
  const auto validated_on = [&](const std::filesystem::path& data) {
    Heard heard;
    options_.val_data = data;
    options_.overwrite = true;
    Trainer trainer(settings(), comm::single(), monitors(std::make_unique<Listener>(heard)));
    trainer.train();
    return heard.run.validation_tokens;
  };
  EXPECT_EQ(validated_on(folder_ / "prepared"), prepared.validation_tokens);
  EXPECT_EQ(validated_on(folder_ / "text.txt"),
            static_cast<int64_t>(std::filesystem::file_size(folder_ / "text.txt")));
}

TEST_F(TrainerTest, RefusesValidationDataOfOtherTokens) {
  const auto prepared = [&](const std::string& name, int vocabulary, const std::string& model) {
    prepare({.inputs = {folder_ / "text.txt"}, .output = folder_ / name, .tokenizer = "bytes"});
    test::write_file(
        folder_ / (name + "/meta.json"),
        R"({"tokenizer": "tokenizer.model", "vocab_size": )" + std::to_string(vocabulary) + "}");
    test::write_file(folder_ / (name + "/tokenizer.model"), model);
  };
  prepared("data", 256, "one");
  prepared("same", 256, "one");
  prepared("another", 256, "two");
  prepared("smaller", 255, "one");
  options_.data = {folder_ / "data"};
  options_.val_data = folder_ / "same";
  EXPECT_NO_THROW(check_run(settings(), 1));
  for (const char* name : {"another", "smaller", "text.txt"}) {
    options_.val_data = folder_ / name;
    EXPECT_THROW(check_run(settings(), 1), DataError) << name;
  }
}

TEST_F(TrainerTest, RefusesAModelThatTheDataDoesNotFit) {
  options_.vocab_size = 100;
  EXPECT_THROW(check_run(settings(), 1), ConfigError);
  options_.vocab_size.reset();
  options_.seq = 33;
  EXPECT_THROW(Trainer(settings(), comm::single()), ConfigError);
}

TEST_F(TrainerTest, ARunThatIsRefusedLeavesTheFolderAsItWas) {
  const OffloadOptimizer nowhere{.device = OffloadDevice::nvme, .nvme_path = "/no/such/folder"};
  EXPECT_THROW(Trainer({.engine = with(nowhere), .program = options_}, comm::single()), Error);
  options_.save_every = 2;
  Trainer(settings(), comm::single()).train();  // there is no run to overwrite

  const auto log = test::read_file(folder_ / "run/log.jsonl");
  test::write_file(folder_ / "run/model.safetensors.1.tmp", "half of it");
  options_.overwrite = true;
  EXPECT_THROW(Trainer({.engine = with(nowhere), .program = options_}, comm::single()), Error);
  EXPECT_EQ(test::read_file(folder_ / "run/log.jsonl"), log);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/checkpoint-4/manifest.json"));
  { const Trainer has_not_begun(settings(), comm::single()); }
  EXPECT_EQ(test::read_file(folder_ / "run/log.jsonl"), log);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/checkpoint-4/manifest.json"));
  options_.save_every.reset();
  Trainer(settings(), comm::single()).train();
  EXPECT_NE(test::read_file(folder_ / "run/log.jsonl"), log);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/checkpoint-4"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/model.safetensors.1.tmp"));
}

TEST_F(TrainerTest, RefusesWhatExceedsTheBudgetBeforeTheModelIsBuilt) {
  using ::testing::HasSubstr;
  options_.vocab_size = (int64_t{1} << 31) - 1;
  config_.memory_budget = int64_t{1} << 30;
  EXPECT_THAT([&] { check_run(settings(), 1); },
              ::testing::ThrowsMessage<OutOfMemory>(HasSubstr("The memory budget is 1.00 GiB")));
  EXPECT_THAT([&] { Trainer(settings(), comm::single()); },
              ::testing::ThrowsMessage<OutOfMemory>(HasSubstr("The memory budget is 1.00 GiB")));
}

}  // namespace
}  // namespace zero::train
