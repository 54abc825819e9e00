#include "zero/train/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/base/error.h"

namespace zero::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string complaint(const std::function<void()>& body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no complaint";
}

std::string complaint_about_file(const std::string& json) {
  return complaint([&] {
    Options options;
    read_options(options, json, "file.json");
  });
}

TEST(Options, ReadBackWhatTheyDump) {
  Options options{
      .model = "gpt2-nano", .data = "a \"quoted\" name", .seq = 17, .min_lr = 1e-7, .resume = true};
  Options read;
  read_options(read, "{\"train\": " + dump(options) + "}", "file");
  EXPECT_EQ(read, options);
}

TEST(Options, KeepWhatAFileDoesNotName) {
  Options options{.seq = 17};
  read_options(options,
               "{\"train\": {\"steps\": 3} /* a comment */, \"zero_optimization\": {\"stage\": 1}}",
               "file");
  EXPECT_EQ(options.seq, 17);
  EXPECT_EQ(options.steps, 3);
  read_options(options, "{}", "file");
  EXPECT_EQ(options.steps, 3);
}

TEST(Options, NameTheKeyTheValueAndTheNearestKnownKey) {
  EXPECT_THAT(
      complaint_about_file("{\"train\": {\"step\": 3}}"),
      AllOf(HasSubstr("file.json"), HasSubstr("'step'"), HasSubstr("Did you mean 'steps'?")));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"steps\": \"3\"}}"),
              AllOf(HasSubstr("train.steps"), HasSubstr("\"3\""), HasSubstr("whole number")));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"steps\": 1.5}}"), HasSubstr("whole number"));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"resume\": 1}}"), HasSubstr("true or false"));
  EXPECT_THAT(complaint_about_file("{\"train\": {\"eval_batches\": 1}}"),
              HasSubstr("'eval_tokens'"));
  EXPECT_THAT(complaint_about_file("{\"train\": 1}"), HasSubstr("should be an object"));
  EXPECT_THAT(complaint_about_file("{train}"), HasSubstr("is not JSON"));
}

TEST(Options, RefuseValuesOutOfRange) {
  const Options good{.data = "text"};
  EXPECT_EQ(complaint([&] { good.validate(); }), "no complaint");
  const auto with = [&](auto Options::*member, auto value) {
    Options options = good;
    options.*member = value;
    return complaint([&] { options.validate(); });
  };
  EXPECT_THAT(with(&Options::data, ""), HasSubstr("'data'"));
  EXPECT_THAT(with(&Options::out, ""), HasSubstr("'out'"));
  EXPECT_THAT(with(&Options::seq, 0), HasSubstr("'seq' is 0"));
  EXPECT_THAT(with(&Options::steps, -1), HasSubstr("'steps' is -1"));
  EXPECT_THAT(with(&Options::warmup, 1001), HasSubstr("'warmup' is 1001"));
  EXPECT_THAT(with(&Options::schedule, "cosin"), HasSubstr("Did you mean 'cosine'?"));
  EXPECT_THAT(with(&Options::dropout, 1.0), HasSubstr("'dropout' is 1"));
  EXPECT_THAT(with(&Options::threads, -1), HasSubstr("'threads' is -1"));
  EXPECT_THAT(with(&Options::log_every, 0), HasSubstr("'log_every' is 0"));
  EXPECT_THAT(with(&Options::temperature, -1.0), HasSubstr("'temperature' is -1"));
  EXPECT_THAT(with(&Options::prompt, ""), HasSubstr("'prompt' is empty"));
  const Options no_sample{.data = "text", .sample_tokens = 0, .prompt = ""};
  EXPECT_EQ(complaint([&] { no_sample.validate(); }), "no complaint");
  Options both = good;
  both.overwrite = both.resume = true;
  EXPECT_THAT(complaint([&] { both.validate(); }), HasSubstr("overwrite"));
}

}  // namespace
}  // namespace zero::train
