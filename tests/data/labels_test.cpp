// Texts with labels, and tokens that are masked.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/data/dataset.h"
#include "zero/data/labelled_text.h"
#include "zero/data/labelled_texts.h"
#include "zero/data/masking.h"
#include "zero/data/prepare.h"
#include "zero/data/tokenizer.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A folder with BERT's tokenizer, whose pairs are those of BERT.
class Labels : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = nlohmann::ordered_json::parse(
        read_file(std::string(TOKENIZER_FIXTURES) + "/bert.json", &fail<DataError>));
    folder_.write("other/tokenizer.json", tokenizer.dump());
    auto& pair = tokenizer["post_processor"]["pair"];
    pair = tokenizer["post_processor"]["single"];
    pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
    pair.push_back({{"SpecialToken", {{"id", "[SEP]"}, {"type_id", 1}}}});
    folder_.write("model/tokenizer.json", tokenizer.dump());
  }
  // The last line validates.
  PrepareResult prepared(const std::string& lines, const std::string& tokenizer = "model") const {
    const auto last = lines.size() - lines.rfind('\n', lines.size() - 2) - 1;
    return prepare({.inputs = {folder_.write("lines.jsonl", lines)},
                    .output = folder_ / "out",
                    .tokenizer = folder_ / tokenizer,
                    .validation_fraction =
                        (static_cast<double>(last) + 0.5) / static_cast<double>(lines.size()),
                    .classify = true,
                    .overwrite = true});
  }

  const TemporaryFolder folder_;
};

TEST_F(Labels, TextsAndPairsAreReadAsTheyWereEncoded) {
  const auto result = prepared(
      "{\"text\": \"one two\", \"label\": \"good\"}\n\n"
      "{\"text\": \"three\", \"text_pair\": \"four five\", \"label\": \"bad\"}\n"
      "{\"text\": \"six\", \"label\": \"fair\"}\n");
  EXPECT_THAT(result.classes, ElementsAre("bad", "fair", "good"));
  EXPECT_EQ(result.documents, 3);
  const auto data = open_dataset(folder_ / "out");
  EXPECT_EQ(data.labels, result.classes);
  const auto tokenizer = Tokenizer::load(data.tokenizer);
  const auto one = tokenizer.encode("one two", SpecialTokens::with);
  const auto three = tokenizer.encode("three", SpecialTokens::with);
  const auto four = tokenizer.encode("four five", SpecialTokens::with);
  auto pair = three;
  pair.insert(pair.end(), four.begin() + 1, four.end());

  const LabelledTexts texts(data.train.sources.front(), 502, 3);
  ASSERT_EQ(texts.size(), 2);
  EXPECT_EQ(texts.read(0, 99).tokens, one);
  EXPECT_EQ(texts.read(0, 99).label, 2);
  EXPECT_EQ(texts.read(0, 99).second, static_cast<int64_t>(one.size()));
  EXPECT_EQ(texts.read(1, 99).tokens, pair);
  EXPECT_EQ(texts.read(1, 99).label, 0);
  EXPECT_EQ(texts.read(1, 99).second, static_cast<int64_t>(three.size()));
  const LabelledTexts validation(data.validation.sources.front(), 502, 3);
  EXPECT_EQ(validation.read(0, 99).label, 1);

  // The longer part loses tokens first, before its end.
  for (int64_t most = 4; most <= static_cast<int64_t>(pair.size()); ++most) {
    const auto text = texts.read(1, most);
    ASSERT_EQ(static_cast<int64_t>(text.tokens.size()), most);
    EXPECT_EQ(texts.tokens(1, most), most);
    EXPECT_EQ(text.tokens[static_cast<size_t>(text.second) - 1], 3);  // [SEP]
    EXPECT_EQ(text.tokens.back(), 3);
    const auto of_second = most - text.second;
    const auto lost_first = static_cast<int64_t>(three.size()) - text.second;
    const auto lost_second = static_cast<int64_t>(four.size()) - 1 - of_second;
    if (lost_first > 0 && lost_second > 0) {
      EXPECT_LE(std::abs(text.second - of_second), 1);
    }
    EXPECT_TRUE(
        std::equal(text.tokens.begin(), text.tokens.begin() + text.second - 1, pair.begin()));
  }
  EXPECT_THAT(
      message_of<DataError>([&] { LabelledTexts(data.train.sources.front(), 3, 3).read(0, 99); }),
      HasSubstr("vocabulary has 3"));
  EXPECT_THAT(message_of<DataError>([&] { LabelledTexts(data.train.sources.front(), 502, 2); }),
              HasSubstr("the label 2"));
  fs::remove(folder_ / "out/train.labels.bin");
  EXPECT_THAT(message_of<DataError>([&] { LabelledTexts(data.train.sources.front(), 502, 3); }),
              AllOf(HasSubstr("train.labels.bin"), HasSubstr("--classify")));
}

TEST_F(Labels, NumbersAreClassesUpToTheLargest) {
  const auto result = prepared(
      "{\"text\": \"a\", \"label\": 3}\n{\"text\": \"b\", \"label\": 0}\n"
      "{\"text\": \"c\", \"label\": 1}\n");
  EXPECT_THAT(result.classes, ElementsAre("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"));
  EXPECT_THAT(classes_in({"a", "b", "c", "d"}, result.classes), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(classes_in({"x", "y", "z"}, {"z", "x"}), ElementsAre(2, 0));
  EXPECT_THAT(message_of<DataError>([] {
                classes_in({"x", "y"}, {"x", "w"});
              }),
              AllOf(HasSubstr("'w'"), HasSubstr("x, y"), HasSubstr("id2label")));
}

TEST_F(Labels, BadLinesAreNamedAndNothingIsWritten) {
  const std::string good = "{\"text\": \"a\", \"label\": \"x\"}\n";
  const std::pair<const char*, const char*> cases[] = {
      {R"({"text": "a"})", "line 2: it has no field 'label'"},
      {R"({"label": "a"})", "line 2: it has no field 'text'"},
      {R"({"text": "a", "label": -1})", "line 2: it has the 'label' -1"},
      {R"({"text": "a", "label": 18446744069414584321})",
       "line 2: it has the 'label' 18446744069414584321"},
      {R"({"text": "a", "label": ""})", "line 2: it has the 'label' \"\""},
      {R"({"text": "a", "label": 1.5})", "line 2: it has the 'label' 1.5"},
      {R"({"text": "a", "label": 1})", "line 2: it has a label that is a name, and others"},
      {R"({"text": "a", "text_pair": 3, "label": "x"})", "line 2: it has the 'text_pair' 3"},
  };
  for (const auto& [line, message] : cases) {
    EXPECT_THAT(message_of<DataError>([&] { prepared(fmt::format("{}{}\n{}", good, line, good)); }),
                HasSubstr(message))
        << line;
    EXPECT_FALSE(fs::exists(folder_ / "out")) << line;
  }
  const std::string pair = R"({"text": "a", "text_pair": "b", "label": "x"})";
  EXPECT_THAT(
      message_of<DataError>([&] { prepared(fmt::format("{}{}\n{}", good, pair, good), "other"); }),
      AllOf(HasSubstr("line 2"), HasSubstr("one behind the other")));
}

TEST(Masking, HidesTheSharesOfBert) {
  constexpr int64_t kVocabulary = 1000;
  constexpr int64_t kMask = 4;
  const Masking masking(kMask, {0, 2, 3}, kVocabulary, 7);
  std::vector<int64_t> text(512);
  std::iota(text.begin(), text.end(), 2);  // from special tokens on
  int64_t targets_in_all = 0;
  int64_t hidden = 0;
  int64_t kept = 0;
  std::vector<int64_t> targets(text.size());
  constexpr int64_t kSamples = 400;
  for (int64_t sample = 0; sample < kSamples; ++sample) {
    auto tokens = text;
    masking.apply(sample, tokens, targets);
    EXPECT_THAT(std::vector(targets.begin(), targets.begin() + 3), Each(-100)) << "special tokens";
    for (size_t i = 0; i < text.size(); ++i) {
      if (targets[i] == -100) {
        EXPECT_EQ(tokens[i], text[i]);
        continue;
      }
      EXPECT_EQ(targets[i], text[i]);
      ++targets_in_all;
      hidden += static_cast<int64_t>(tokens[i] == kMask);
      kept += static_cast<int64_t>(tokens[i] == text[i]);
      EXPECT_LT(tokens[i], kVocabulary);
    }
  }
  // Within five standard deviations of what is wanted.
  const auto near = [](int64_t count, double of, double share) {
    EXPECT_NEAR(static_cast<double>(count), of * share, 5 * std::sqrt(of * share * (1 - share)));
  };
  const double all = static_cast<double>(kSamples) * 509;
  near(targets_in_all, all, 0.15);
  near(hidden, static_cast<double>(targets_in_all), 0.8);
  near(kept, static_cast<double>(targets_in_all), 0.1);

  // The sample and the seed decide; nothing else.
  auto one = text;
  auto again = text;
  auto other = text;
  masking.apply(11, one, targets);
  masking.apply(12, other, targets);
  Masking(kMask, {3, 2, 0}, kVocabulary, 7).apply(11, again, targets);
  EXPECT_EQ(one, again);
  EXPECT_NE(one, other);
  Masking(kMask, {}, kVocabulary, 8).apply(11, other = text, targets);
  EXPECT_NE(one, other);
  EXPECT_THAT(message_of<ConfigError>([] { Masking(50, {}, 50, 1); }), HasSubstr("--mask-token"));
}

}  // namespace
}  // namespace zero
