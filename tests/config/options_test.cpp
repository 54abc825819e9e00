// Tests the options of `zero train` alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/config/settings.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Options = ProgramSettings;

std::string complaint_about_file(const std::string& json) {
  return message_of<ConfigError>([&] { (void)Settings::parse(json, 1, "file.json"); });
}

TEST(Options, ReadBackWhatTheyDump) {
  const Settings settings{.program = {.model = "gpt2-nano",
                                      .data = {"a \"quoted\" name"},
                                      .seq = 17,
                                      .min_lr = 1e-7,
                                      .schedule = optim::Decay::linear,
                                      .resume = true}};
  EXPECT_EQ(Settings::parse(settings.dump(), 1, "file"), settings);
  auto mixed = settings;
  mixed.program.data = {"one", "other"};
  mixed.program.data_weights = {0.7, 3};
  EXPECT_EQ(Settings::parse(mixed.dump(), 1, "file"), mixed);
}

TEST(Options, StandBesideTheEnginesKeys) {
  const auto settings = Settings::parse(
      "{\"train\": {\"steps\": 3} /* a comment */, \"zero_optimization\": {\"stage\": 1}}", 1);
  EXPECT_EQ(settings.program.steps, 3);
  EXPECT_EQ(settings.program.seq, Options().seq);
  EXPECT_EQ(settings.engine.stage, 1);
}

TEST(Options, NameTheKeyTheValueAndTheNearestKnownKey) {
  EXPECT_THAT(
      complaint_about_file("{\"train\": {\"step\": 3}}"),
      AllOf(HasSubstr("file.json"), HasSubstr("'train.step'"), HasSubstr("Did you mean 'steps'?")));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"steps\": \"3\"}}"),
              AllOf(HasSubstr("train.steps"), HasSubstr("\"3\""), HasSubstr("whole number")));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"steps\": 1.5}}"), HasSubstr("whole number"));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"resume\": 1}}"), HasSubstr("true or false"));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"schedule\": \"cosin\"}}"),
              HasSubstr("Did you mean 'cosine'?"));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"eval_batches\": 1}}"),
              AllOf(HasSubstr("train.eval_batches is replaced"), HasSubstr("'train.eval_tokens'")));
  EXPECT_THAT(complaint_about_file("{\"train\": 1}"), HasSubstr("must be an object"));
  EXPECT_THAT(complaint_about_file("{train}"), HasSubstr("is not JSON"));
}

TEST(Options, RefuseValuesOutOfRange) {
  const Options good{.data = {"text"}};
  EXPECT_EQ(message_of<ConfigError>([&] { good.validate(); }), "nothing was thrown");
  const auto with = [&](auto Options::*member, auto value) {
    Options options = good;
    options.*member = value;
    return message_of<ConfigError>([&] { options.validate(); });
  };
  EXPECT_THAT(with(&Options::data, std::vector<std::string>{}), HasSubstr("'data'"));
  const auto weights = [&](std::vector<double> given) {
    return with(&Options::data_weights, std::move(given));
  };
  EXPECT_EQ(weights({0.5}), "nothing was thrown");
  EXPECT_THAT(weights({1, 2}), HasSubstr("'data_weights' is 1, 2; it should be a number for each"));
  for (const double bad : {0.0, -2.0}) EXPECT_THAT(weights({bad}), HasSubstr("numbers above 0"));
  EXPECT_THAT(weights({std::nan("")}), HasSubstr("data_weights"));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"data\": [1]}}"),
              AllOf(HasSubstr("train.data is [1]"), HasSubstr("an array of strings")));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"data_weights\": \"0.7,0.3\"}}"),
              HasSubstr("must be an array of numbers"));
  EXPECT_THAT(with(&Options::out, ""), HasSubstr("train.out"));
  EXPECT_THAT(with(&Options::seq, 0), HasSubstr("train.seq is 0"));
  EXPECT_THAT(with(&Options::steps, -1), HasSubstr("train.steps is -1"));
  EXPECT_THAT(with(&Options::min_lr, -1.0), HasSubstr("train.min_lr is -1"));
  EXPECT_THAT(with(&Options::warmup, -1), HasSubstr("train.warmup is -1"));
  EXPECT_THAT(with(&Options::warmup, 1001), HasSubstr("'warmup' is 1001"));
  EXPECT_THAT(with(&Options::dropout, 1.0), HasSubstr("train.dropout is 1"));
  EXPECT_THAT(with(&Options::threads, -1), HasSubstr("train.threads is -1"));
  EXPECT_THAT(with(&Options::log_every, 0), HasSubstr("train.log_every is 0"));
  EXPECT_THAT(with(&Options::temperature, -1.0), HasSubstr("train.temperature is -1"));
  EXPECT_THAT(with(&Options::prompt, ""), HasSubstr("'prompt' is empty"));
  const Options no_sample{.data = {"text"}, .sample_tokens = 0, .prompt = ""};
  EXPECT_EQ(message_of<ConfigError>([&] { no_sample.validate(); }), "nothing was thrown");
  Options both = good;
  both.overwrite = both.resume = true;
  EXPECT_THAT(message_of<ConfigError>([&] { both.validate(); }), HasSubstr("overwrite"));
}

}  // namespace
}  // namespace zero
