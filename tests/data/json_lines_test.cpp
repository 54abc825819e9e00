// Lines of JSON as tokens and marks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/data/dataset.h"
#include "zero/data/document.h"
#include "zero/data/prepare.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A folder with a small tokenizer, an end of a text and a template that writes [role]content.
class JsonLines : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"model", "plain"}) {
      folder_.write(name + std::string("/tokenizer.json"),
                    read_file(std::string(TOKENIZER_FIXTURES) + "/gpt2.json", &fail<DataError>));
    }
    folder_.write("model/tokenizer_config.json",
                  R"({"eos_token": "<|im_end|>", "chat_template":
      "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"})");
  }

  // The last line validates.
  PrepareResult prepared(const std::string& lines, const std::string& tokenizer = "model") const {
    const auto last = lines.size() - lines.rfind('\n', lines.size() - 2) - 1;
    return prepare({.inputs = {folder_.write("lines.jsonl", lines)},
                    .output = folder_ / "out",
                    .tokenizer = folder_ / tokenizer,
                    .validation_fraction =
                        (static_cast<double>(last) + 0.5) / static_cast<double>(lines.size()),
                    .json_lines = true,
                    .overwrite = true});
  }

  // The text of the training file, with supervised tokens in braces and | before each document.
  std::string marked() const {
    const auto tokenizer = Tokenizer::load(folder_ / "out");
    const auto data = open_dataset(folder_ / "out");
    const auto marks = TemporaryFolder::read(folder_ / "out/train.marks.bin");
    std::vector<int64_t> tokens(static_cast<size_t>(data.train.size()));
    data.train.sources.front().tokens->read(0, tokens);
    EXPECT_EQ(tokens.size(), marks.size());
    std::string text;
    bool inside = false;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const bool supervised = (marks[i] & kSupervised) != 0;
      if (supervised != inside) text += inside ? "}" : "{";
      inside = supervised;
      if ((marks[i] & kBeginsDocument) != 0) text += "|";
      text += tokenizer.decode(std::vector{tokens[i]});
    }
    return inside ? text + "}" : text;
  }

  const TemporaryFolder folder_;
};

std::string with_last(const std::string& lines) {
  return lines + "\n{\"text\": \"the last line\"}\n";
}

TEST_F(JsonLines, TheAnswersAloneAreLearned) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"text": "0 one two"})", "|0{ one two<|im_end|>}"},
      {R"({"prompt": "Say:", "completion": " yes"})", "|Say:{ yes<|im_end|>}"},
      {R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}]})",
       "|[user]q<|im_end|>[assistant]{a b<|im_end|>}"},
      {R"({"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}],
           "completion": [{"role": "assistant", "content": "b"}]})",
       "|[user]q<|im_end|>[assistant]a<|im_end|>[user]r<|im_end|>[assistant]{b<|im_end|>}"},
      {R"({"instruction": "do", "input": "x", "output": "done", "system": "S", "history": [["q", "a"]]})",
       "|[system]S<|im_end|>[user]q<|im_end|>[assistant]{a<|im_end|>}[user]do\nx<|im_end|>["
       "assistant]{done<|im_end|>}"},
      {R"({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "S"})",
       "|[system]S<|im_end|>[user]q<|im_end|>[assistant]{a<|im_end|>}"},
  };
  for (const auto& [line, expected] : cases) {
    std::string one = line;
    one.erase(std::remove(one.begin(), one.end(), '\n'), one.end());
    const auto result = prepared(with_last(one));
    EXPECT_EQ(marked(), expected) << line;
    EXPECT_EQ(result.documents, 2);
  }
  prepared(with_last(R"({"instruction": "do", "input": "x", "output": "done"})"), "plain");
  EXPECT_EQ(marked(), "|do\nx\n{done}") << "without a template and an end of a text";
}

// GPT-2's tokenizer_config.json names no end; its config.json does.
TEST_F(JsonLines, TheModelsEndOfATextIsTakenWhereTheTokenizerNamesNone) {
  folder_.write("plain/tokenizer_config.json", R"({"model_max_length": 1024})");
  const auto lines = with_last(R"({"prompt": "Say:", "completion": " yes"})");
  EXPECT_EQ(prepared(lines, "plain").open_documents, 2);
  EXPECT_EQ(marked(), "|Say:{ yes}");
  const auto end = Tokenizer::load(folder_ / "plain").token("<|im_end|>");
  folder_.write("plain/config.json", fmt::format(R"({{"eos_token_id": {}}})", end.value()));
  EXPECT_EQ(prepared(lines, "plain").open_documents, 0);
  EXPECT_EQ(marked(), "|Say:{ yes<|im_end|>}");
  EXPECT_EQ(special_token(folder_ / "out", "eos_token"), "<|im_end|>");
  folder_.write("plain/config.json", R"({"eos_token_id": 1099511627776})");
  EXPECT_EQ(prepared(lines, "plain").open_documents, 2);
}

TEST_F(JsonLines, DocumentsFollowEachOtherAndBlankLinesAreLeftOut) {
  const auto result = prepared(
      with_last("{\"text\": \"a b\"}\n\n  \n{\"text\": \"c\\u0000d\"}\r\n{\"text\": \"e f\"}"));
  EXPECT_EQ(marked().substr(0, 9), "|a{ b<|im");
  EXPECT_THAT(marked(), HasSubstr("<|im_end|>}|c{\0d<|im_end|>}"s));
  EXPECT_EQ(TemporaryFolder::read(folder_ / "out/train.marks.bin").size() +
                TemporaryFolder::read(folder_ / "out/val.marks.bin").size(),
            static_cast<size_t>(result.train_tokens + result.validation_tokens));
  EXPECT_TRUE(fs::exists(folder_ / "out/tokenizer_config.json"));
}

TEST_F(JsonLines, ATokenThatJoinsPromptAndAnswerIsLearned) {
  // "the" is one token of the fixture's vocabulary, so " th" + "e" becomes it.
  const auto whole = Tokenizer::load(folder_ / "model").encode(" the");
  ASSERT_EQ(whole.size(), 1U);
  prepared(with_last(R"({"prompt": "a th", "completion": "e"})"));
  EXPECT_EQ(marked(), "|a{ the<|im_end|>}");
}

TEST_F(JsonLines, BadLinesAreNamedAndNothingIsWritten) {
  const std::pair<const char*, const char*> cases[] = {
      {"{", "line 2: it is not JSON"},
      {"[", "The file is to be JSON lines: a whole object on each line"},
      {"3", "line 2: it is 3, and no object"},
      {R"({"body": "x"})", "line 2: it has none of the fields text, prompt"},
      {R"({"text": 7})", "line 2: it has the 'text' 7; it should be a text"},
      {R"({"text": "a", "text": "b"})", "names 'text' twice"},
      {R"({"prompt": "x"})", "line 2: it has no field 'completion'"},
      {R"({"prompt": "x", "completion": ""})", "line 2: it has an empty answer"},
      {R"({"instruction": "x"})", "line 2: it has no field 'output'"},
      {R"({"messages": []})", "it should be a list of messages"},
      {R"({"messages": [{"content": "x"}]})", "(number 1); it should be an object with a role"},
      {R"({"messages": [{"role": "user", "content": "x"}]})",
       "in which the assistant says nothing"},
      {R"({"conversations": [{"from": "robot", "value": "x"}]})", "has a turn from \"robot\""},
      {R"({"conversations": [{"from": "human"}]})", "has no field 'value'"},
      {R"({"text": "\ud800"})", "line 2: it is not JSON"},
  };
  for (const auto& [line, message] : cases) {
    const auto lines = with_last("{\"text\": \"good\"}\n" + std::string(line));
    EXPECT_THAT([&] { prepared(lines); }, ThrowsMessage<DataError>(HasSubstr(message))) << line;
    EXPECT_THAT([&] { prepared(lines); },
                ThrowsMessage<DataError>(HasSubstr("lines.jsonl, line 2: ")));
    EXPECT_FALSE(fs::exists(folder_ / "out")) << line;
  }
  EXPECT_THAT([&] { prepared(with_last("{\"text\": \"a\0b\"}"s)); },
              ThrowsMessage<DataError>(HasSubstr("is NUL")));
  const auto chat = with_last(R"({"messages": [{"role": "user", "content": "x"}]})");
  EXPECT_THAT([&] { prepared(chat, "plain"); },
              ThrowsMessage<DataError>(HasSubstr("the tokenizer has no chat template")));
  EXPECT_THAT(
      [&] { prepare({.inputs = {folder_ / "x"}, .output = folder_ / "out", .json_lines = true}); },
      ThrowsMessage<ConfigError>(HasSubstr("JSON lines need a tokenizer.json")));
  folder_.write("model/tokenizer_config.json",
                R"({"eos_token": "<|im_end|>", "chat_template": "{{ raise_exception('no') }}"})");
  EXPECT_THAT([&] { prepared(chat); },
              ThrowsMessage<DataError>(HasSubstr("lines.jsonl, line 1: The chat template of ")));
  folder_.write("model/tokenizer_config.json", R"({"eos_token": "<end>"})");
  EXPECT_THAT([&] { prepared(with_last("{\"text\": \"a\"}")); },
              ThrowsMessage<DataError>(HasSubstr("\"<end>\", which its tokenizer.json lacks")));
}

TEST_F(JsonLines, TextFilesTakeATokenizerJson) {
  folder_.write("text.txt", "one two three\nfour five six\nseven eight nine\n");
  const auto result = prepare({.inputs = {folder_ / "text.txt"},
                               .output = folder_ / "out",
                               .tokenizer = folder_ / "plain/tokenizer.json",
                               .validation_fraction = 0.4});
  EXPECT_EQ(result.unknown_tokens, 0);
  const auto data = open_dataset(folder_ / "out");
  EXPECT_EQ(data.train.sources.front().tokens->format(), TokenFormat::llm_c);
  EXPECT_EQ(data.tokenizer, folder_ / "out/tokenizer.json");
  std::vector<int64_t> tokens(static_cast<size_t>(data.train.size()));
  data.train.sources.front().tokens->read(0, tokens);
  EXPECT_EQ(Tokenizer::load(data.tokenizer).decode(tokens), "one two three\nfour five six\n");
}

TEST_F(JsonLines, ALargeVocabularyMakesTokensOf32Bits) {
  auto file = nlohmann::json::parse(TemporaryFolder::read(folder_ / "model/tokenizer.json"));
  for (auto& token : file["added_tokens"]) {
    if (token["content"] == "<|im_end|>") token["id"] = 70000;
  }
  file["model"]["vocab"].erase("<|im_end|>");
  folder_.write("model/tokenizer.json", file.dump());
  const auto result = prepared(with_last("{\"text\": \"a b\"}"));
  EXPECT_EQ(result.vocab_size, 70001);
  const auto data = open_dataset(folder_ / "out");
  EXPECT_EQ(data.train.sources.front().tokens->format(), TokenFormat::llm_c_32);
  EXPECT_EQ(data.vocab_size, 70001);
  EXPECT_EQ(marked(), "|a{ b<|im_end|>}");
}

}  // namespace
}  // namespace zero
