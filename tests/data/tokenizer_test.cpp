// Tokenizers of a tokenizer.json against what Hugging Face's `tokenizers` gives (fixtures/make.py).
#include "zero/data/tokenizer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"

namespace zero {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::string kFixtures = TOKENIZER_FIXTURES;

json fixture(const std::string& name) {
  return json::parse(read_file(kFixtures + "/" + name, &fail<DataError>));
}

std::vector<std::string> texts() { return fixture("texts.json"); }

class TokenizerKinds : public ::testing::TestWithParam<const char*> {
 protected:
  std::string file() const { return kFixtures + "/" + GetParam() + ".json"; }
};

TEST_P(TokenizerKinds, EncodesAndDecodesAsTheReference) {
  const auto tokenizer = Tokenizer::load(file());
  const auto expected = fixture(GetParam() + std::string(".expected.json"));
  const auto all = texts();
  for (size_t i = 0; i < all.size(); ++i) {
    const auto tokens = expected["tokens"][i].get<std::vector<int64_t>>();
    EXPECT_EQ(tokenizer.encode(all[i]), tokens) << "text " << i << ": " << json(all[i]);
    const auto text = expected["decoded"].value(std::to_string(i), all[i]);
    EXPECT_EQ(tokenizer.decode(tokens), text) << "text " << i;
  }
  const auto special = expected["special"].get<std::vector<int64_t>>();
  EXPECT_EQ(tokenizer.encode(all[1], SpecialTokens::with), special);
  EXPECT_EQ(tokenizer.decode(special, SpecialTokens::without),
            tokenizer.decode(tokenizer.encode(all[1])));
}

// A text of several blocks of the encoder, with every kind of line end.
TEST_P(TokenizerKinds, EncodesALongTextInBlocksAsTheWhole) {
  const auto tokenizer = Tokenizer::load(file());
  std::mt19937 random(1);
  std::string text;
  const auto all = texts();
  while (text.size() < 700'000) {
    text += all[random() % all.size()];
    text += std::vector<std::string>{"\n", "\n\n", " \n", "\r\n", ".\n  ", " "}[random() % 6];
  }
  const auto whole = tokenizer.encode(text);
  for (const size_t piece : {size_t{1000}, text.size()}) {
    std::vector<int64_t> tokens;
    tokenizer.encode(
        [&, rest = std::string_view(text)]() mutable {
          const auto part = rest.substr(0, piece);
          rest.remove_prefix(part.size());
          return part;
        },
        [&](std::span<const uint32_t> some) {
          tokens.insert(tokens.end(), some.begin(), some.end());
        });
    EXPECT_TRUE(tokens == whole) << piece;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerKinds,
                         ::testing::Values("gpt2", "smollm", "llama3", "qwen", "llama2", "mistral",
                                           "bert"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST(TokenizerJson, SeveralThreadsEncodeAtOnce) {
  const auto tokenizer = Tokenizer::load(kFixtures + "/qwen.json");
  const auto all = texts();
  std::vector<std::vector<int64_t>> expected;
  for (const auto& text : all) expected.push_back(tokenizer.encode(text));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < all.size(); ++i)
        if (tokenizer.encode(all[i]) != expected[i]) ++wrong;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(TokenizerJson, IsFoundInAFolderAndKnowsItsTokens) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", read_file(kFixtures + "/gpt2.json", &fail<DataError>));
  const auto tokenizer = Tokenizer::load(folder.path());
  EXPECT_EQ(tokenizer.file(), folder.path() / "tokenizer.json");
  EXPECT_EQ(tokenizer.token("<|endoftext|>"), 0);
  EXPECT_FALSE(tokenizer.token("no such piece").has_value());
  EXPECT_FALSE(tokenizer.by_bytes());
  const TemporaryFolder empty;
  EXPECT_THAT([&] { Tokenizer::load(empty.path()); },
              ThrowsMessage<DataError>(HasSubstr("neither a tokenizer.json nor")));
  EXPECT_THAT([&] { Tokenizer::load(empty.path() / "none"); },
              ThrowsMessage<DataError>(HasSubstr("/none does not exist. Give a tokenizer.json")));
  EXPECT_THAT([&] { tokenizer.encode("a\xFF"); },
              ThrowsMessage<DataError>(HasSubstr("not UTF-8 at its byte 1")));
  EXPECT_THROW(tokenizer.decode(std::vector<int64_t>{100000}), DataError);
}

// Files of tokenizers before 0.9 do not name the type of their model.
TEST(TokenizerJson, IsReadWithoutTheTypeOfItsModel) {
  const TemporaryFolder folder;
  for (const auto* name : {"bert", "gpt2"}) {
    auto file = fixture(std::string(name) + ".json");
    ASSERT_EQ(file["model"].erase("type"), 1U);
    const auto path = folder.write("old.json", file.dump());
    EXPECT_EQ(Tokenizer::load(path).encode("Unaffable, 3 words"),
              Tokenizer::load(kFixtures + "/" + name + ".json").encode("Unaffable, 3 words"));
  }
}

TEST(TokenizerJson, BadFilesAreNamed) {
  const TemporaryFolder folder;
  const auto good = fixture("llama3.json");
  const auto expect = [&](const json& file, const std::string& message) {
    const auto path =
        folder.write("bad.json", file.is_string() ? file.get<std::string>() : file.dump());
    EXPECT_THAT([&] { Tokenizer::load(path); }, ThrowsMessage<DataError>(HasSubstr(message)));
    EXPECT_THAT([&] { Tokenizer::load(path); }, ThrowsMessage<DataError>(HasSubstr("bad.json")));
  };
  const auto with = [&](const char* pointer, const json& value) {
    auto changed = good;
    changed[json::json_pointer(pointer)] = value;
    return changed;
  };
  expect("{", "is not JSON");
  expect("[1]", "is no object");
  expect("{}", "its 'model' has the model ''");
  expect(with("/model/type", "Unigram"), "the model 'Unigram', which libzero does not compute");
  expect(with("/normalizer", {{"type", "Precompiled"}}),
         "its 'normalizer' has the normalizer 'Pre");
  expect(with("/normalizer", {{"type", 7}}), "has the 'type' 7");
  expect(with("/pre_tokenizer", {{"type", "Whitespace"}}), "the pre_tokenizer 'Whitespace'");
  expect(with("/pre_tokenizer/pretokenizers/0/behavior", "Odd"), "the behavior 'Odd'");
  for (const auto& [pattern, message] : std::vector<std::pair<std::string, std::string>>{
           {"(a", "which cannot be read: missing closing parenthesis"},
           {"\\w+", "does not compute \\w"},
           {"\\bx", "does not compute \\b"},
           {"[a[b]]", "brackets within brackets"},
           {"[a&&b]", "brackets within brackets"},
           {"x{1,3}+", "does not compute }+"},
           {"\\pL", "a class that is not in braces"}}) {
    expect(with("/pre_tokenizer/pretokenizers/0/pattern", {{"Regex", pattern}}), message);
  }
  expect(with("/decoder", {{"type", "CTC"}}), "the decoder 'CTC'");
  expect(with("/post_processor", {{"type", "Other"}}), "the post_processor 'Other'");
  expect(with("/model/dropout", 0.1), "the dropout '0.1'");
  expect(with("/model/end_of_word_suffix", "</w>"), "the end_of_word_suffix '</w>'");
  expect(with("/model/vocab", {1}), "has no object 'vocab'");
  expect(with("/model/vocab/a", -1), "has the token -1 for the piece \"a\"");
  expect(with("/model/vocab/a", 4000000000), "has the token 4000000000");
  expect(with("/model/merges/0", "abc"), "has the merge \"abc\" (number 0)");
  expect(with("/model/merges/3", {"q", "\u0416\u0416"}), "which its vocabulary lacks");
  expect(with("/model/unk_token", "<none>"),
         "the unk_token \"<none>\", which its vocabulary lacks");
  expect(with("/added_tokens/0/id", -3), "its 'added_tokens' has the 'id' -3");
  expect(with("/added_tokens/0/id", 99999999), "has the token 99999999");
  expect(with("/added_tokens", 3), "is no array");
  expect(good.dump() + '\0' + "more", "is not JSON (line 1, column ");
  // Added tokens that contradict the vocabulary, or each other. A gap of ids is none.
  const auto adding = [&](const json& tokens) {
    auto changed = good;
    for (const auto& [content, id] : tokens.items()) {
      auto token = good["added_tokens"][0];
      token["content"] = content;
      token["id"] = id;
      changed["added_tokens"].push_back(token);
    }
    return changed;
  };
  const uint64_t a = good["model"]["vocab"]["a"];
  expect(adding({{"a", 900'000}}), fmt::format("\"a\" the id 900000, and elsewhere {}", a));
  expect(adding({{"<new>", a}}), fmt::format("\"<new>\" the id {}, which \"a\" has", a));
  expect(adding({{"<new>", 900'000}, {"<other>", 900'000}}), "the id 900000, which \"<new>\" has");
  auto twice = adding({{"<new>", 900'000}});
  twice["added_tokens"].push_back(twice["added_tokens"].back());
  folder.write("good.json", twice.dump());
  EXPECT_EQ(Tokenizer::load(folder / "good.json").token("<new>"), 900'000);
  twice["added_tokens"].back()["id"] = 900'001;
  expect(twice, "\"<new>\" the id 900001, and elsewhere 900000");
}

TEST(TokenizerJson, HardPatternsEndAndLongRunsAreEncoded) {
  const TemporaryFolder folder;
  auto file = fixture("llama3.json");
  file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "(x+x+)+(?=y)"}};
  const auto slow = Tokenizer::load(folder.write("slow.json", file.dump()));
  EXPECT_THROW(slow.encode(std::string(2000, 'x')), DataError);
  const auto tokenizer = Tokenizer::load(kFixtures + "/llama3.json");
  for (const char* run : {"a", " ", "!", "\n", " \r"}) {
    std::string text;
    while (text.size() < 100'000) text += run;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

}  // namespace
}  // namespace zero
