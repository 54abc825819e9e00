// Tests `zero generate` as a user runs it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "zero/engine/pretrained.h"
#include "zero/models/architectures.h"
#include "zero/models/lora/lora.h"
#include "zero/train/adapter_files.h"

namespace zero::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class GenerateProgram : public ::testing::Test {
 protected:
  GenerateProgram() {
    at::manual_seed(1);
    const auto model = language_model_config_from_json(
                           R"({"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2,
                               "n_head": 2, "n_positions": 32, "initializer_range": 0.3})",
                           "here")
                           ->build();
    Engine engine(model->module(), Sgd{});
    std::filesystem::create_directory(folder_ / "model");
    save_pretrained(engine, folder_ / "model", {.config_json = model->config().to_json()});
    // A byte ends a text.
    write_file(folder_ / "model/generation_config.json", R"({"eos_token_id": [17, 96, 201]})");
  }

  Outcome generate(std::vector<std::string> options) const {
    std::vector<std::string> command{ZERO_PROGRAM,  "generate", "--from",   folder_ / "model",
                                     "--tokenizer", "bytes",    "--tokens", "10"};
    command.insert(command.end(), options.begin(), options.end());
    return run(command, {{"OMP_NUM_THREADS", "1"}});
  }

  std::string prompts(const std::string& name, const std::string& text) const {
    write_file(folder_ / name, text);
    return folder_ / name;
  }

  TemporaryFolder folder_;
};

TEST_F(GenerateProgram, PromptsOfAFileGiveTheSameLinesOnAnyRanks) {
  const auto file = prompts("prompts.txt", "one\ntwo \"three\"\r\nfour\na fifth line, longer\nsix");
  const std::vector<std::string> draws{"--prompts", file, "--temperature", "1", "--seed", "4"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), draws.begin(), draws.end());
    return generate(more);
  };
  const auto one = with({});
  ASSERT_EQ(one.status, 0) << one.err;
  std::istringstream lines(one.out);
  std::vector<std::string> given;
  bool added = false;
  for (std::string line; std::getline(lines, line);) {
    const auto object = nlohmann::json::parse(line);
    given.push_back(object.at("prompt"));
    added = added || !object.at("text").get<std::string>().empty();
  }
  EXPECT_EQ(given, (std::vector<std::string>{"one", "two \"three\"", "four", "a fifth line, longer",
                                             "six"}));
  EXPECT_TRUE(added);
  for (const auto& more :
       {std::vector<std::string>{"-n", "2", "--stage", "3"}, {"-n", "3", "--batch", "1"}}) {
    const auto several = with(more);
    EXPECT_EQ(several.status, 0) << several.err;
    EXPECT_EQ(several.out, one.out);
  }
  const auto json = prompts("prompts.jsonl", "\xEF\xBB\xBF{\"prompt\": \"one\"}");
  EXPECT_EQ(generate({"--prompts", json, "--temperature", "1", "--seed", "4"}).out,
            one.out.substr(0, one.out.find('\n') + 1));
}

TEST_F(GenerateProgram, OnePromptIsPrintedWithWhatFollows) {
  const auto one = generate({"--prompt", "once"});
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_TRUE(one.out.starts_with("once"));
  EXPECT_EQ(generate({"--prompt", "once", "-n", "2", "--stage", "3"}).out, one.out);
}

TEST_F(GenerateProgram, TakesAnAdapterAsARunLeavesIt) {
  const std::string base = folder_ / "model";
  const std::string adapter = folder_ / "adapter";
  {
    at::manual_seed(2);
    const auto model = language_model_config(base)->build();
    const auto lora = add_lora(model->module(), {.rank = 4, .alpha = 40, .prefix = "transformer."});
    for (const auto& layer : lora.layers) {
      const at::NoGradGuard none;
      model->module().named_parameters()[layer.b()].normal_();
    }
    Engine engine(model->module(), Sgd{});
    load_pretrained(engine, base, {.added = added_parameters(lora)});
    std::filesystem::create_directory(adapter);
    save_adapter(engine, lora, adapter, {.base_model = base});
  }
  const auto from = [&](const std::vector<std::string>& places) {
    std::vector<std::string> command{ZERO_PROGRAM, "generate", "--tokenizer", "bytes",
                                     "--tokens",   "10",       "--prompt",    "once"};
    command.insert(command.end(), places.begin(), places.end());
    const auto outcome = run(command, {{"OMP_NUM_THREADS", "1"}});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return outcome.out;
  };
  const auto merged = run(
      {ZERO_PROGRAM, "merge", "--from", base, "--adapter", adapter, "--out", folder_ / "whole"});
  ASSERT_EQ(merged.status, 0) << merged.err;
  const auto expected = from({"--from", folder_ / "whole"});
  EXPECT_NE(expected, from({"--from", base}));
  EXPECT_EQ(from({"--from", adapter}), expected);
  EXPECT_EQ(from({"--from", base, "--adapter", adapter, "-n", "2", "--stage", "3"}), expected);
}

TEST_F(GenerateProgram, WhatCannotBeUsedIsNamed) {
  const auto error = [&](const std::vector<std::string>& options) {
    const auto outcome = generate(options);
    EXPECT_NE(outcome.status, 0);
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  EXPECT_THAT(error({}), AllOf(HasSubstr("--prompt"), HasSubstr("--prompts")));
  EXPECT_THAT(error({"--prompt", "a", "--prompts", "b"}), HasSubstr("one of the two"));
  EXPECT_THAT(error({"--prompt", "a", "-n", "0"}), HasSubstr("--nproc is 0"));
  EXPECT_THAT(error({"--prompts", folder_ / "absent.txt", "-n", "2"}),
              HasSubstr("Cannot read the prompts"));
  EXPECT_THAT(error({"--prompts", prompts("empty.txt", "")}), HasSubstr("has no prompts"));
  EXPECT_THAT(error({"--prompts", prompts("gap.txt", "a\n\nb\n")}),
              AllOf(HasSubstr("Line 2"), HasSubstr("is empty")));
  EXPECT_THAT(
      error({"--prompts", prompts("other.jsonl", "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n")}),
      AllOf(HasSubstr("Line 2"), HasSubstr("\"prompt\"")));
  EXPECT_THAT(error({"--prompts", prompts("broken.jsonl", "{\"prompt\"\n")}), HasSubstr("Line 1"));
  EXPECT_THAT(error({"--prompts", prompts("latin.txt", "a\n\xE4\n")}),
              AllOf(HasSubstr("Line 2 of " + (folder_ / "latin.txt").string()), HasSubstr("0xe4")));
  EXPECT_THAT(error({"--prompt", "a", "--top-p", "2"}), HasSubstr("top_p is 2"));
  write_file(folder_ / "model/config.json", R"({"model_type": "bert", "vocab_size": 256})");
  EXPECT_THAT(error({"--prompt", "a"}), HasSubstr("does not predict the next token"));
}

}  // namespace
}  // namespace zero::test
