// Many texts that a model continues on several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/engine/pretrained.h"
#include "zero/models/architectures.h"
#include "zero/train/generate_texts.h"
#include "zero/train/loaded_model.h"

namespace zero::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Texts = std::vector<std::vector<int64_t>>;
using Ranks = std::function<void(const std::function<void(std::shared_ptr<comm::Group>)>&)>;

constexpr const char* kGpt2 =
    R"({"model_type": "gpt2", "vocab_size": 40, "n_embd": 32, "n_layer": 3, "n_head": 2,
        "n_positions": 24, "initializer_range": 0.3, "tie_word_embeddings": false})";
constexpr const char* kMistral =
    R"({"model_type": "mistral", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 24, "sliding_window": 5, "initializer_range": 0.3})";

Ranks threads(int ranks) {
  return [=](const auto& body) { comm::run_as_threads(ranks, body); };
}

// They share no memory, and so gather in collectives.
Ranks hosts(int ranks) {
  return [=](const auto& body) { comm::run_as_hosts(ranks, 1, body); };
}

class GenerateTexts : public ::testing::Test {
 protected:
  GenerateTexts() {
    options_.each = {.tokens = 12, .context = 24, .temperature = 1, .top_p = 0.95};
    options_.each.stop_tokens = {7, 11};
    options_.each.seed = 3;
    options_.batch = 2;
    // They have 1 to 21 tokens, so that some texts slide at the context.
    for (int64_t i = 0; i < 7; ++i) {
      auto& prompt = prompts_.emplace_back();
      for (int64_t j = 0; j <= i * 10 % 21; ++j) prompt.push_back((i + 3 * j) % 39);
    }
    write_model(kGpt2);
  }

  void write_model(const char* json, bool broken = false) {
    at::manual_seed(1);
    const auto model = language_model_config_from_json(json, "here")->build();
    if (broken) {
      const at::NoGradGuard no_grad;
      model->module().named_parameters()["wte.weight"][39].fill_(
          std::numeric_limits<float>::quiet_NaN());
    }
    Engine engine(model->module(), Sgd{});
    save_pretrained(engine, folder_.path(), {.config_json = model->config().to_json()});
  }

  // Each text by itself, on one rank.
  Texts alone() const {
    LoadedModel loaded(folder_.path());
    loaded.model().module().eval();
    Texts all;
    for (size_t i = 0; i < prompts_.size(); ++i) {
      auto each = options_.each;
      each.seed += i;
      all.push_back(generate(prompts_[i], cached_logits(loaded.model()), each));
    }
    return all;
  }

  static Config stage(int number) {
    Config config{.stage = number};
    config.unit_bytes = 8 << 10;
    return config;
  }

  // The texts of rank 0; the others must have the same.
  Texts generated(const Ranks& ranks, const Config& config) const {
    std::mutex mutex;
    std::vector<Texts> all;
    ranks([&](std::shared_ptr<comm::Group> group) {
      LoadedModel loaded(folder_.path(), config, group);
      auto options = options_;
      Texts told(prompts_.size());
      Texts ended;
      options.on_token = [&](size_t text, int64_t token) { told.at(text).push_back(token); };
      options.on_text = [&](size_t text, const auto& tokens) {
        EXPECT_EQ(text, ended.size()) << "the order of the prompts";
        ended.push_back(tokens);
      };
      auto texts = generate_texts(loaded.engine(), loaded.model(), prompts_, options);
      EXPECT_EQ(told, texts);
      EXPECT_EQ(ended, texts);
      const std::lock_guard lock(mutex);
      all.push_back(std::move(texts));
    });
    for (const auto& texts : all) EXPECT_EQ(texts, all.front());
    return all.front();
  }

  TemporaryFolder folder_;
  Texts prompts_;
  GenerateTextsOptions options_;
};

TEST_F(GenerateTexts, EachTextIsAsIfItWereAloneAtAnyStageAndRanks) {
  for (const char* model : {kGpt2, kMistral}) {
    write_model(model);
    const auto expected = alone();
    std::vector<size_t> lengths;
    for (const auto& text : expected) lengths.push_back(text.size());
    EXPECT_EQ(std::ranges::max(lengths), 12u) << "a text that ends with the tokens";
    EXPECT_LT(std::ranges::min(lengths), 12u) << "a text that ends with a stop token";
    for (const int ranks : {1, 2, 3}) {
      for (const int number : {0, 3})
        EXPECT_EQ(generated(threads(ranks), stage(number)), expected) << ranks << " " << number;
      EXPECT_EQ(generated(hosts(ranks), stage(3)), expected) << ranks;
    }
  }
}

TEST_F(GenerateTexts, TheBatchChangesNothing) {
  const auto expected = alone();
  for (const int64_t batch : {1, 3, 100}) {
    options_.batch = batch;
    EXPECT_EQ(generated(hosts(2), stage(3)), expected) << batch;
  }
}

// A product of many rows may be another library's than that of one, and take its arguments in
// another order. Here a weight and its bias are of two units, and none stays gathered.
TEST_F(GenerateTexts, RanksWithOtherLengthsGatherInTheSameOrder) {
  write_model(R"({"model_type": "gpt2", "vocab_size": 40, "n_embd": 256, "n_layer": 1,
                  "n_head": 2, "n_positions": 24, "initializer_range": 0.3})");
  prompts_ = {Texts::value_type(20, 5), {6}};
  options_.each.tokens = 2;
  auto config = stage(3);
  config.unit_bytes = 1024;
  config.max_live_parameters = 0;
  EXPECT_EQ(generated(hosts(2), config), alone());
}

TEST_F(GenerateTexts, RanksMayHaveNoPrompt) {
  prompts_.resize(1);
  const auto expected = alone();
  EXPECT_EQ(generated(threads(3), stage(0)), expected);
  EXPECT_EQ(generated(hosts(3), stage(3)), expected);
  options_.each.tokens = 0;
  EXPECT_EQ(generated(hosts(2), stage(3)), Texts(1));
  prompts_.clear();
  EXPECT_EQ(generated(hosts(2), stage(3)), Texts());
}

TEST_F(GenerateTexts, NoRankHoldsTheWholeModel) {
  auto config = stage(3);
  config.max_live_parameters = 4096;
  std::mutex mutex;
  for (const auto& [ranks, gathers] : {std::pair{threads(3), false}, {hosts(3), true}}) {
    ranks([&, gathers = gathers](std::shared_ptr<comm::Group> group) {
      LoadedModel loaded(folder_.path(), config, group);
      auto& engine = loaded.engine();
      generate_texts(engine, loaded.model(), prompts_, options_);
      const auto peak = [&](Category category) { return group->ledger()->usage(category).peak; };
      const std::lock_guard lock(mutex);
      EXPECT_EQ(peak(Category::parameters), engine.memory_formula().parameters);
      // Two units may be there at once: the budget's, and one more that an operator uses.
      EXPECT_EQ(peak(Category::gathered_units) > 0, gathers);
      EXPECT_LE(peak(Category::gathered_units), 4 * 4096 + (16 << 10));
      const int64_t whole = 4 * engine.parameter_count();
      EXPECT_LT(peak(Category::parameters) + peak(Category::gathered_units), whole * 3 / 5);
    });
  }
}

TEST_F(GenerateTexts, OneRankMayStopAll) {
  const auto expected = alone();
  comm::run_as_hosts(2, 1, [&](std::shared_ptr<comm::Group> group) {
    LoadedModel loaded(folder_.path(), stage(3), group);
    auto options = options_;
    int asked = 0;
    options.each.stop = [&] { return group->rank() == 1 && ++asked > 2; };
    const auto texts = generate_texts(loaded.engine(), loaded.model(), prompts_, options);
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_LE(texts[i].size(), 2u);
      EXPECT_TRUE(std::equal(texts[i].begin(), texts[i].end(), expected[i].begin()));
    }
    EXPECT_EQ(texts.front().size(), std::min<size_t>(2, expected.front().size()));
  });
}

TEST_F(GenerateTexts, ABrokenTextIsAnErrorOnEveryRank) {
  write_model(kGpt2, /*broken=*/true);
  prompts_[1] = {5, 39};
  options_.each.vocabulary = 39;  // the others do not meet the broken token
  std::mutex mutex;
  int failures = 0;
  comm::run_as_hosts(3, 1, [&](std::shared_ptr<comm::Group> group) {
    LoadedModel loaded(folder_.path(), stage(3), group);
    const auto message = message_of<Error>(
        [&] { generate_texts(loaded.engine(), loaded.model(), prompts_, options_); });
    const std::lock_guard lock(mutex);
    EXPECT_THAT(message, HasSubstr("not finite"));
    EXPECT_EQ(message.find("rank 1") != std::string::npos, group->rank() != 1) << message;
    ++failures;
  });
  EXPECT_EQ(failures, 3);
}

TEST_F(GenerateTexts, WhatCannotBeUsedIsNamed) {
  std::mutex mutex;
  const auto refused = [&](const std::function<void(int, Texts&, GenerateTextsOptions&)>& change) {
    std::string message;
    comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      LoadedModel loaded(folder_.path(), stage(3), group);
      auto prompts = prompts_;
      auto options = options_;
      change(group->rank(), prompts, options);
      const auto of_rank = message_of<ConfigError>(
          [&] { generate_texts(loaded.engine(), loaded.model(), prompts, options); });
      const std::lock_guard lock(mutex);
      EXPECT_FALSE(of_rank.empty());
      if (group->rank() == 0) message = of_rank;
    });
    return message;
  };
  EXPECT_THAT(refused([](int, auto& prompts, auto&) { prompts[2].clear(); }),
              HasSubstr("Prompt 3 of 7 is empty"));
  EXPECT_THAT(refused([](int, auto& prompts, auto&) { prompts[4][1] = 40; }),
              AllOf(HasSubstr("Prompt 5"), HasSubstr("token 40")));
  EXPECT_THAT(refused([](int, auto&, auto& options) { options.batch = 0; }),
              HasSubstr("batch is 0"));
  EXPECT_THAT(refused([](int, auto&, auto& options) { options.each.top_p = 2; }),
              HasSubstr("top_p is 2"));
  EXPECT_THAT(refused([](int rank, auto& prompts, auto&) { prompts[0][0] += rank; }),
              HasSubstr("Rank 1 was given other prompts"));
  EXPECT_THAT(refused([](int rank, auto& prompts, auto&) {
                if (rank == 1) prompts[0].clear();
              }),
              AllOf(HasSubstr("rank 1"), HasSubstr("is empty")));
}

}  // namespace
}  // namespace zero::train
