#include "zero/data/prepare.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <random>

#include "tests/support/run_program.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/data/dataset.h"
#include "zero/data/filter.h"
#include "zero/data/tokenizer.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Lines of words that repeat, with what is hard to encode among them.
std::string sample_text(int lines) {
  std::mt19937 random(1);
  std::string text =
      "First line \xE2\x82\xAC \xF0\x9F\x98\x80 caf\xC3\xA9\n\n  indented\ttab  two blanks \n";
  for (int line = 0; line < lines; ++line) {
    for (int word = 0; word < 9; ++word) {
      const auto stem = random() % 600;
      for (auto rest = stem + 30; rest > 0; rest /= 6)
        text += "aeioun"[rest % 6], text += "bdlmrt"[(rest + stem) % 6];
      text += word < 8 ? " " : ".\n";
    }
  }
  return text;
}

std::vector<int64_t> all_tokens(const Split& split) {
  const auto& range = split.sources.front();
  std::vector<int64_t> tokens(static_cast<size_t>(range.size()));
  range.tokens->read(range.begin, tokens);
  return tokens;
}

TEST(Encode, LeavesLinesOfWhiteSpaceOutAndCountsThem) {
  const TemporaryFolder folder;
  const std::string good = "\n{\"text\": \"a\"}\n \t\r\n{\"text\": \"b\"}\n\n";
  const auto encoded = [&](const std::string& lines) {
    return test::run({ZERO_PROGRAM, "data", "encode", folder.write("lines.jsonl", lines).string(),
                      "--tokenizer", "bytes"});
  };
  const auto outcome = encoded(good);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 2) << outcome.out;
  const auto refused = encoded(good + "x\n");
  EXPECT_NE(refused.status, 0);
  EXPECT_THAT(refused.err, HasSubstr("line 6"));
}

TEST(Prepare, TokensOfATrainedBpeDecodeToTheText) {
  const TemporaryFolder folder;
  const auto text = sample_text(2000);
  const auto output = folder.path() / "out";
  const auto result = prepare({.inputs = {folder.write("text.txt", text)},
                               .output = output,
                               .vocab_size = 700,
                               .validation_fraction = 0.2});
  const auto data = open_dataset(output);
  EXPECT_EQ(data.train.sources.front().tokens->format(), TokenFormat::llm_c);
  EXPECT_EQ(data.vocab_size, 700);
  EXPECT_EQ(data.train.size(), result.train_tokens);
  EXPECT_EQ(data.validation.size(), result.validation_tokens);
  EXPECT_LT(result.train_tokens, result.train_bytes / 2) << "it compresses";
  EXPECT_EQ(result.train_bytes + result.validation_bytes, static_cast<int64_t>(text.size()));
  EXPECT_NEAR(static_cast<double>(result.validation_bytes), 0.2 * static_cast<double>(text.size()),
              100);

  const auto tokenizer = Tokenizer::load(data.tokenizer);
  EXPECT_EQ(tokenizer.vocab_size(), 700);
  const auto training = tokenizer.decode(all_tokens(data.train));
  EXPECT_EQ(training + tokenizer.decode(all_tokens(data.validation)), text);
  EXPECT_EQ(training.back(), '\n') << "the split is between lines";
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2)
      << "nothing temporary is left";
}

TEST(Prepare, GivesTheSameFilesAgain) {
  const TemporaryFolder folder;
  const auto text = folder.write("text.txt", sample_text(800));
  for (const char* name : {"a", "b"})
    prepare({.inputs = {text}, .output = folder.path() / name, .vocab_size = 600});
  for (const char* file : {"train.bin", "val.bin", "tokenizer.model", "meta.json"}) {
    EXPECT_EQ(TemporaryFolder::read(folder.path() / "a" / file),
              TemporaryFolder::read(folder.path() / "b" / file))
        << file;
  }
}

TEST(Prepare, TakesAnExistingModel) {
  const TemporaryFolder folder;
  const auto text = folder.write("text.txt", sample_text(800));
  prepare({.inputs = {text}, .output = folder.path() / "a", .vocab_size = 600});
  prepare({.inputs = {text},
           .output = folder.path() / "b",
           .tokenizer = (folder.path() / "a" / "tokenizer.model").string()});
  EXPECT_EQ(TemporaryFolder::read(folder.path() / "a" / "train.bin"),
            TemporaryFolder::read(folder.path() / "b" / "train.bin"));
}

// A model as others train it: sentencepiece's defaults, which normalise, and `options`.
std::filesystem::path foreign_model(const TemporaryFolder& folder,
                                    const std::filesystem::path& text,
                                    const std::vector<std::string>& options) {
  const char* const program = std::getenv("TRAIN_MODEL");
  std::vector<std::string> command{program != nullptr ? program : "", text.string(),
                                   (folder.path() / "foreign").string()};
  command.insert(command.end(), options.begin(), options.end());
  run_filter(
      command, [] { return std::string_view(); }, [](std::string_view) {});
  return folder.path() / "foreign.model";
}

std::string decoded(const std::filesystem::path& output) {
  const auto data = open_dataset(output);
  const auto tokenizer = Tokenizer::load(data.tokenizer);
  return tokenizer.decode(all_tokens(data.train)) + tokenizer.decode(all_tokens(data.validation));
}

TEST(Prepare, AForeignModelThatCanSayTheTextKeepsLineEndsAndBlanks) {
  const TemporaryFolder folder;
  const auto hard = folder.write("hard.txt", sample_text(500) + "\xEF\xBC\xA1 \xC2\xA0 \n x\n");
  const auto plain = folder.write("plain.txt", sample_text(500).substr(sample_text(0).size()));
  struct Case {
    std::filesystem::path text;
    std::vector<std::string> options;
  };
  const std::string newline = "user_defined_symbols=\n";
  for (const auto& [text, options] : std::vector<Case>{
           {hard, {"model_type=bpe", "byte_fallback=true", "vocab_size=500"}},
           {hard, {"model_type=unigram", "byte_fallback=true", "vocab_size=500"}},
           {plain, {"model_type=bpe", "vocab_size=200", newline}},
       }) {
    const auto model = foreign_model(folder, text, options);
    const auto result = prepare({.inputs = {text},
                                 .output = folder.path() / "out",
                                 .tokenizer = model.string(),
                                 .overwrite = true});
    EXPECT_TRUE(result.tokenizer_changed);
    EXPECT_EQ(decoded(folder.path() / "out"), TemporaryFolder::read(text)) << options[0];
  }
  const auto again = prepare(
      {.inputs = {hard},
       .output = folder.path() / "again",
       .tokenizer = foreign_model(
                        folder, hard,
                        {"byte_fallback=true", "vocab_size=500", "normalization_rule_name=identity",
                         "add_dummy_prefix=false", "remove_extra_whitespaces=false"})
                        .string()});
  EXPECT_FALSE(again.tokenizer_changed) << "a model that keeps every text stays as it is";
  EXPECT_EQ(TemporaryFolder::read(folder.path() / "again/tokenizer.model"),
            TemporaryFolder::read(folder.path() / "foreign.model"));
}

TEST(Prepare, AForeignModelThatWouldLoseTextIsRefusedWithWhatWouldBeLost) {
  const TemporaryFolder folder;
  const auto text = folder.write("text.txt", sample_text(500).substr(sample_text(0).size()));
  const auto model = foreign_model(folder, text, {"model_type=bpe", "vocab_size=200"});
  const PrepareOptions options{
      .inputs = {text}, .output = folder.path() / "out", .tokenizer = model.string()};
  EXPECT_THAT([&] { prepare(options); },
              ThrowsMessage<DataError>(::testing::AllOf(
                  HasSubstr("does not keep the text"), HasSubstr(".\\n"),
                  HasSubstr(" would become "), HasSubstr("\xEF\xBF\xBD"), HasSubstr("(byte "))));
  EXPECT_FALSE(std::filesystem::exists(options.output));

  // A character far into the text of which the model knows nothing.
  const auto newline =
      foreign_model(folder, text, {"model_type=bpe", "vocab_size=200", "user_defined_symbols=\n"});
  auto late = TemporaryFolder::read(text);
  const auto at = late.size() / 2;
  late.insert(at, "\xF0\x9F\x98\x80");
  EXPECT_THAT(
      [&] {
        prepare({.inputs = {folder.write("late.txt", late)},
                 .output = options.output,
                 .tokenizer = newline.string()});
      },
      ThrowsMessage<DataError>(::testing::AllOf(HasSubstr("\xF0\x9F\x98\x80"),
                                                HasSubstr(fmt::format("(byte {} ", at)))));
}

TEST(Prepare, ByBytesKeepsAnyBytesOfSeveralFiles) {
  const TemporaryFolder folder;
  const auto first = folder.write("1", "ab\xFF\ncd");
  const auto second = folder.write("2", "ef\ngh\n");
  const auto result = prepare({.inputs = {first, second},
                               .output = folder.path() / "out/",
                               .tokenizer = "bytes",
                               .validation_fraction = 0.4});
  const auto data = open_dataset(folder.path() / "out");
  EXPECT_TRUE(data.by_bytes);
  EXPECT_EQ(data.vocab_size, 256);
  EXPECT_EQ(result.vocab_size, 256);
  const auto tokenizer = Tokenizer::bytes();
  EXPECT_EQ(tokenizer.decode(all_tokens(data.train)), "ab\xFF\ncd\nef\n")
      << "a file's last line is ended";
  EXPECT_EQ(tokenizer.decode(all_tokens(data.validation)), "gh\n");
}

TEST(Prepare, RefusesWhatCannotBePrepared) {
  const TemporaryFolder folder;
  const auto text = folder.write("text.txt", sample_text(100));
  const auto out = folder.path() / "out";
  const auto expect = [&](PrepareOptions options, const char* message) {
    EXPECT_THAT([&] { prepare(options); }, ThrowsMessage<DataError>(HasSubstr(message)));
    EXPECT_FALSE(std::filesystem::exists(out)) << message;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
    }
  };
  expect({.inputs = {folder.path() / "absent.txt"}, .output = out}, "absent.txt: No such file");
  expect({.inputs = {folder.write("empty.txt", "")}, .output = out}, "empty.txt is empty");
  expect({.inputs = {folder.write("latin.txt", "caf\xE9 au lait\nx\n")}, .output = out},
         "not UTF-8 text at byte 3");
  // Longer than need be, a surrogate, beyond the last character.
  for (const char* bytes :
       {"\xC1\x81", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80"}) {
    const auto wrong = folder.write("wrong.txt", std::string("ab") + bytes + "\nx\n");
    expect({.inputs = {wrong}, .output = out}, "not UTF-8 text at byte 2");
  }
  const std::string nul("a\nb\0c\n", 6);
  const auto gzip = folder.write("a.gz", "\x1F\x8B\x08 and more\nlines\n");
  for (const char* tokenizer : {"bpe", "bytes"}) {
    expect({.inputs = {gzip}, .output = out, .tokenizer = tokenizer}, "a.gz is a gzip file");
    const auto late = folder.write("late.txt", std::string(3'000'000, '\n') + nul);
    expect({.inputs = {late}, .output = out, .tokenizer = tokenizer}, "its byte 3000003 is NUL");
    const auto tokens = folder.write("t.bin", llm_c_bytes(kLlmCMagic, kLlmCVersion, 1, "ab"));
    expect({.inputs = {tokens}, .output = out, .tokenizer = tokenizer},
           "It is prepared already: `zero train --data` takes it.");
  }
  expect({.inputs = {folder.write("one.txt", "only one line\n")}, .output = out},
         "split would be empty");
  const auto words = folder.write("words.txt", sample_text(800));
  expect({.inputs = {words}, .output = out, .vocab_size = 60000},
         "The text has too few different words for a byte-pair encoding of 60000 tokens: ");
  expect({.inputs = {words}, .output = out, .vocab_size = 60000}, ", or the tokenizer \"bytes\".");
  std::string same;
  for (int line = 0; line < 200; ++line) same += "aa bb\n";
  expect({.inputs = {folder.write("few.txt", same)}, .output = out, .vocab_size = 512},
         "are the most. Give the tokenizer \"bytes\".");
  for (const auto& wrong : {(folder.path() / "no.model").string(), std::string("bpf")}) {
    expect({.inputs = {text}, .output = out, .tokenizer = wrong},
           (wrong + "; it should be bpe, bytes, the file of a sentencepiece model").c_str());
  }
  expect({.inputs = {text}, .output = out, .tokenizer = text.string()},
         "zero-sentencepiece pieces failed");
  EXPECT_THROW(prepare({.inputs = {}, .output = out}), ConfigError);
  EXPECT_THROW(prepare({.inputs = {text}, .output = out, .vocab_size = 70000}), ConfigError);
  EXPECT_THROW(prepare({.inputs = {text}, .output = out, .vocab_size = 100}), ConfigError);
  EXPECT_THROW(prepare({.inputs = {text}, .output = out, .validation_fraction = 0}), ConfigError);
}

TEST(Prepare, ReplacesOnlyAnEarlierPreparation) {
  const TemporaryFolder folder;
  const auto text = folder.write("text.txt", sample_text(10));
  PrepareOptions options{.inputs = {text}, .output = folder.path() / "out", .tokenizer = "bytes"};
  const auto first = prepare(options);
  EXPECT_THAT([&] { prepare(options); }, ThrowsMessage<DataError>(HasSubstr("not empty")));
  options.overwrite = true;
  options.validation_fraction = 0.4;
  prepare(options);
  EXPECT_GT(open_dataset(options.output).validation.size(), first.validation_tokens);
  const auto corpus = folder.write("out/corpus.txt", "x");
  EXPECT_THAT([&] { prepare(options); },
              ThrowsMessage<DataError>(HasSubstr("holds corpus.txt, which no preparation writes")));
  EXPECT_TRUE(std::filesystem::exists(corpus));
  folder.write("precious/thesis.txt", "x");
  options.output = folder.path() / "precious";
  EXPECT_THAT([&] { prepare(options); }, ThrowsMessage<DataError>(HasSubstr("holds no meta.json")));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "precious" / "thesis.txt"));
  options.output = text;
  EXPECT_THAT([&] { prepare(options); }, ThrowsMessage<DataError>(HasSubstr("is not a folder")));
}

TEST(Tokenizer, BytesRoundTrip) {
  const auto tokenizer = Tokenizer::bytes();
  const std::string text("a\0\xFF\n", 4);
  EXPECT_EQ(tokenizer.encode(text), (std::vector<int64_t>{97, 0, 255, 10}));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_THROW(tokenizer.decode(std::vector<int64_t>{256}), DataError);
  EXPECT_THROW(tokenizer.decode(std::vector<int64_t>{-1}), DataError);
}

TEST(Tokenizer, AModelEncodesTextThatItNeverSaw) {
  const TemporaryFolder folder;
  prepare({.inputs = {folder.write("text.txt", sample_text(800))},
           .output = folder.path() / "out",
           .vocab_size = 600});
  const auto tokenizer = Tokenizer::load(folder.path() / "out" / "tokenizer.model");
  const std::string unbroken(30000, 'q');
  std::string accents;
  for (int i = 0; i < 9000; ++i) accents += "\xC3\xA9";
  for (const auto& text : {std::string(), std::string(" "), std::string("\n\n"),
                           std::string("zz \xE4\xBD\xA0\xE5\xA5\xBD <s> \t  x"), unbroken, accents,
                           unbroken.substr(0, 5000) + " " + unbroken}) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

TEST(Tokenizer, SaysWhatIsMissing) {
  EXPECT_THAT([] { Tokenizer::load("/nowhere/t.model"); },
              ThrowsMessage<DataError>(HasSubstr("/nowhere/t.model")));
  const char* const set = std::getenv("ZERO_SENTENCEPIECE");
  ASSERT_NE(set, nullptr);
  const std::string before = set;
  ::setenv("ZERO_SENTENCEPIECE", "/nowhere/zero-sentencepiece", 1);
  const TemporaryFolder folder;
  const auto model = folder.write("t.model", "a model");
  EXPECT_THAT(
      [&] { Tokenizer::load(model); },
      ThrowsMessage<DataError>(HasSubstr("Cannot run /nowhere/zero-sentencepiece: No such file")));
  ::setenv("ZERO_SENTENCEPIECE", before.c_str(), 1);
}

// A program in the place of zero-sentencepiece, and the file that it writes.
class OtherProgram {
 public:
  explicit OtherProgram(const std::string& script) : before_(std::getenv("ZERO_SENTENCEPIECE")) {
    const auto path = folder_.write("program", "#!/bin/sh\n" + script);
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    ::setenv("ZERO_SENTENCEPIECE", path.c_str(), 1);
  }
  OtherProgram(const OtherProgram&) = delete;
  OtherProgram& operator=(const OtherProgram&) = delete;
  ~OtherProgram() { ::setenv("ZERO_SENTENCEPIECE", before_.c_str(), 1); }

 private:
  TemporaryFolder folder_;
  std::string before_;
};

TEST(Tokenizer, TrustsNothingThatItsProgramSays) {
  const TemporaryFolder folder;
  const auto model = folder.write("t.model", "a model");
  const auto expect = [&](const char* script, const char* message) {
    const OtherProgram program(script);
    EXPECT_THAT([&] { Tokenizer::load(model).encode("text"); },
                ThrowsMessage<DataError>(HasSubstr(message)))
        << script;
  };
  // Two pieces, "a" and "b".
  const std::string pieces =
      "[ $1 = pieces ] && printf '\\001\\000\\000\\000a\\001\\000\\000\\000b' && exit; ";
  expect("", "table of pieces is empty");
  expect("printf '\\001\\000\\000\\000a\\001'", "ends within piece 1");
  expect("printf '\\377\\377\\377\\377a'", "ends within piece 0");
  expect((pieces + "printf '\\001\\000\\000\\000\\001'").c_str(), "ends within a token");
  expect((pieces + "printf '\\001\\000\\000\\000\\002\\000\\000\\000'").c_str(),
         "gave the token 2, and its vocabulary has 2");
  const OtherProgram program(pieces + "printf '\\001\\000\\000\\000\\000\\000\\000\\000'");
  EXPECT_EQ(Tokenizer::load(model).encode("text"), (std::vector<int64_t>{1, 0}));
}

// The system then keeps no exit status, and a failure would look like success.
TEST(Filter, AnExitStatusThatIsLostIsAnError) {
  const auto before = std::signal(SIGCHLD, SIG_IGN);
  EXPECT_THAT(
      [] {
        run_filter(
            {"/bin/false"}, [] { return std::string_view(); }, [](std::string_view) {});
      },
      ThrowsMessage<DataError>(HasSubstr("SIGCHLD")));
  std::signal(SIGCHLD, before);
}

TEST(Filter, PassesMoreThanAPipeHoldsBothWays) {
  const std::string block(100000, 'x');
  int sent = 0;
  size_t received = 0;
  run_filter(
      {"/bin/cat"}, [&] { return sent++ < 50 ? std::string_view(block) : std::string_view(); },
      [&](std::string_view piece) { received += piece.size(); });
  EXPECT_EQ(received, 50 * block.size());
}

TEST(Filter, AProgramThatEndsEarlyOrFailsIsReported) {
  const std::string block(1000000, 'x');
  const auto endless = [&] { return std::string_view(block); };
  EXPECT_NO_THROW(run_filter({"/bin/true"}, endless, [](std::string_view) {}));
  EXPECT_THAT(
      [&] {
        run_filter({"/bin/sh", "-c", "echo its reason >&2; exit 3"}, endless,
                   [](std::string_view) {});
      },
      ThrowsMessage<DataError>(HasSubstr("its reason")));
  EXPECT_THAT(
      [&] {
        run_filter({"/bin/sh", "-c", "kill -9 $$"}, endless, [](std::string_view) {});
      },
      ThrowsMessage<DataError>(HasSubstr("signal 9")));
}

TEST(Filter, ExceptionsOfInputAndOutputPassThrough) {
  const std::string block(1000, 'x');
  EXPECT_THROW(run_filter(
                   {"/bin/cat"}, []() -> std::string_view { throw ConfigError("in"); },
                   [](std::string_view) {}),
               ConfigError);
  EXPECT_THROW(run_filter(
                   {"/bin/cat"}, [&] { return std::string_view(block); },
                   [](std::string_view) { throw ConfigError("out"); }),
               ConfigError);
}

}  // namespace
}  // namespace zero
