#include "zero/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <vector>

#include "tests/support/megatron_bytes.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/data/dataset.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::array<uint16_t, 4> kTokens{7, 50256, 0, 65535};

void expect_error(const std::filesystem::path& path, const char* message,
                  std::optional<TokenFormat> format = {}) {
  EXPECT_THAT(
      [&] { TokenFile file(path, format); },
      ThrowsMessage<DataError>(::testing::AllOf(HasSubstr(path.string()), HasSubstr(message))));
}

TEST(TokenFile, ReadsEachFormatAndTellsThemApart) {
  const TemporaryFolder folder;
  struct Case {
    std::filesystem::path path;
    TokenFormat format;
    std::vector<int64_t> tokens;
  };
  const std::vector<int64_t> wide{7, 50256, 0, 65535};
  const std::vector<Case> cases{
      {folder.write("a.txt", "a\xFF\n"), TokenFormat::bytes, {'a', 255, '\n'}},
      {folder.write("b.bin", u16_bytes(kTokens)), TokenFormat::nano_gpt, wide},
      {folder.write("c.bin", llm_c_bytes(kLlmCMagic, 1, 4, u16_bytes(kTokens))), TokenFormat::llm_c,
       wide},
      {folder.write("named_otherwise", llm_c_bytes(kLlmCMagic, 1, 4, u16_bytes(kTokens))),
       TokenFormat::llm_c, wide},
      {folder.write("wide.bin", llm_c_bytes(kLlmC32Magic, 7, 2, u16_bytes(kTokens))),
       TokenFormat::llm_c_32,
       {7 + (int64_t{50256} << 16), int64_t{65535} << 16}},
  };
  for (const auto& [path, format, tokens] : cases) {
    const TokenFile file(path);
    EXPECT_EQ(file.format(), format) << path;
    ASSERT_EQ(file.size(), static_cast<int64_t>(tokens.size()));
    std::vector<int64_t> all(tokens.size());
    EXPECT_EQ(file.read(0, all), *std::max_element(tokens.begin(), tokens.end()));
    EXPECT_EQ(all, tokens);
    std::vector<int64_t> rest(tokens.size() - 1);
    file.will_need(1, static_cast<int64_t>(rest.size()));
    file.read(1, rest);
    EXPECT_EQ(rest, std::vector<int64_t>(tokens.begin() + 1, tokens.end()));
  }
}

TEST(TokenFile, SaysHowAFileLies) {
  const TemporaryFolder folder;
  const auto payload = u16_bytes(kTokens);
  expect_error(folder.path() / "absent.bin", "No such file");
  expect_error(folder.path(), "it is a folder");
  expect_error("/dev/null", "not a regular file");
  expect_error(folder.write("empty.txt", ""), "is empty");
  expect_error(folder.write("odd.bin", "abc"), "3 bytes hold them");
  expect_error(folder.write("odd_llm.bin", llm_c_bytes(kLlmCMagic, 1, 4, payload + "x")),
               "9 bytes hold them");
  expect_error(folder.write("short.bin", llm_c_bytes(kLlmCMagic, 1, 5, payload)),
               "is truncated: its header promises 5 tokens, and it holds 4");
  expect_error(folder.write("long.bin", llm_c_bytes(kLlmCMagic, 1, 3, payload)),
               "is damaged: its header promises 3 tokens, and it holds 4");
  expect_error(folder.write("negative.bin", llm_c_bytes(kLlmCMagic, 1, -4, payload)),
               "promises -4");
  expect_error(folder.write("header.bin", llm_c_bytes(kLlmCMagic, 1, 4, "").substr(0, 100)),
               "is truncated: it has 100 bytes");
  expect_error(folder.write("none.bin", llm_c_bytes(kLlmCMagic, 1, 0, "")), "holds no tokens");
  expect_error(folder.write("version.bin", llm_c_bytes(kLlmCMagic, 2, 4, payload)), "version 2");
  expect_error(folder.write("llama.bin", llm_c_bytes(kLlmC32Magic, 1, 2, payload)),
               "llm.c tokens of 32 bits of version 1; only version 7");
  expect_error(folder.write("short.bin", llm_c_bytes(kLlmC32Magic, 7, 4, payload)),
               "promises 4 tokens, and it holds 2");
  expect_error(folder.write("model.bin", llm_c_bytes(20240326, 3, 4, payload)), "a model of llm.c");
  expect_error(folder.write("magic.bin", llm_c_bytes(1234, 1, 4, payload)),
               "its first word is 1234", TokenFormat::llm_c);
}

// A mapped file would end the process by SIGBUS.
TEST(TokenFile, AFileThatIsTruncatedWhileItIsReadIsAnError) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", std::string(100'000, 'x'));
  const TokenFile file(path);
  std::filesystem::resize_file(path, 10);
  std::vector<int64_t> tokens(4);
  EXPECT_EQ(file.read(0, tokens), 'x');
  EXPECT_THAT([&] { file.read(80'000, tokens); },
              ThrowsMessage<DataError>(HasSubstr("a.txt ends at byte 80000")));
}

std::string with_padding(std::string begin) {
  begin.resize(600, 'x');
  return begin;
}

// These files would train as bytes, or as tokens under the name .bin.
TEST(TokenFile, NamesTheFormatOfAForeignFileAndTheRemedy) {
  using std::string_literals::operator""s;
  const TemporaryFolder folder;
  const std::string header = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const auto tar = std::string(257, 'x') + "ustar";
  const auto safetensors = std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') +
                           header + std::string(4, 'x');
  const auto model = "\x0A\x0E\x0A\x05<unk>\x15\0\0\0\0\x18\x02"s;
  struct Case {
    std::string begin;
    const char* name;
    const char* remedy;
    bool binary;  // refused as .bin too
  };
  for (const auto& [begin, name, remedy, binary] : std::vector<Case>{
           {"\x1F\x8B\x08", "a gzip file", "Decompress", false},
           {"\x28\xB5\x2F\xFD", "a zstd file", "Decompress", true},
           {"\xFD\x37zXZ\0"s, "an xz file", "Decompress", true},
           {"BZh91AY&SY", "a bzip2 file", "Decompress", true},
           {"PK\x03\x04", "a zip archive", "Extract", true},
           {tar, "a tar archive", "Extract", true},
           {"PAR1\x15", "a parquet table", "column of text", true},
           {"%PDF-1.7", "a PDF document", "plain text", true},
           {"\x89PNG\r\n\x1A\n", "a PNG picture", "Give text", true},
           {"\x7F\x45LF", "a program", "Give text", true},
           {"\x93NUMPY\x01", "a numpy array", "named .bin", true},
           {"\x80\x04\x95", "a Python pickle", "named .bin", false},
           {"GGUF\x03\0\0\0"s, "a GGUF model", "Weights", true},
           {safetensors, "a safetensors file", "Weights", true},
           {model, "a sentencepiece model", "--tokenizer", true},
           {"\xFF\xFEh\0i\0"s, "text in UTF-16", "iconv", false},
           {"\xFE\xFF\0h\0i"s, "text in UTF-16", "iconv", false},
           {"\xC6\xD7\x34\x01", "a model of llm.c", "Weights", true},
       }) {
    const auto contents = with_padding(begin);
    for (const char* file : {"a.txt", "a", "a.bin"}) {
      const auto path = folder.write(file, contents);
      if (!binary && path.extension() == ".bin") {
        EXPECT_EQ(TokenFile(path).format(), TokenFormat::nano_gpt) << "any tokens are possible";
        continue;
      }
      EXPECT_THAT([&] { open_dataset(path); },
                  ThrowsMessage<DataError>(::testing::AllOf(HasSubstr(path.string() + " is "),
                                                            HasSubstr(name), HasSubstr(remedy))))
          << file;
    }
  }
  for (const char* text : {"PKZIP was a program", "GGUF is a format", "ustar", "\n\n\n\n\n\n"})
    EXPECT_NO_THROW(TokenFile(folder.write("a.txt", with_padding(text)))) << text;
}

TEST(TokenFile, TextHasNoNul) {
  const TemporaryFolder folder;
  std::string text(3'000'000, 'x');
  text[900'000] = '\0';
  EXPECT_THAT([&] { TokenFile(folder.write("a.txt", text)); },
              ThrowsMessage<DataError>(HasSubstr("its byte 900000 is NUL")));
  text[900'000] = 'x';
  text[2'000'007] = '\0';
  const TokenFile file(folder.write("a.txt", text));
  std::vector<int64_t> tokens(100);
  EXPECT_EQ(file.read(0, tokens), 'x');
  EXPECT_THAT([&] { file.read(2'000'000, tokens); },
              ThrowsMessage<DataError>(HasSubstr("its byte 2000007 is NUL")))
      << "beyond what is looked at when it is opened";
}

std::vector<int64_t> all_tokens(const Split& split) {
  const auto& range = split.sources.front();
  std::vector<int64_t> tokens(static_cast<size_t>(range.size()));
  range.tokens->will_need(range.begin, range.size());
  range.tokens->read(range.begin, tokens);
  return tokens;
}

std::string llm_c_tokens(const std::vector<uint16_t>& tokens) {
  return llm_c_bytes(kLlmCMagic, kLlmCVersion, static_cast<int32_t>(tokens.size()),
                     u16_bytes(tokens));
}

template <typename Token>
void expect_documents(uint8_t code, int64_t vocab_limit) {
  const TemporaryFolder folder;
  // The second document is empty, and so is one sequence of the third.
  const MegatronDocuments<Token> documents{{{1, 2, 3}, {4}}, {}, {{}, {5, 6}}, {{7}}};
  const TokenFile file(megatron_bytes(code, documents).write(folder, "a"));
  EXPECT_EQ(file.format(), TokenFormat::megatron);
  EXPECT_EQ(file.vocab_limit(), vocab_limit);
  EXPECT_FALSE(file.marked()) << "all of it is supervised";
  EXPECT_TRUE(file.tells_documents());
  ASSERT_EQ(file.size(), 7);
  std::vector<int64_t> tokens(7);
  EXPECT_EQ(file.read(0, tokens), 7);
  EXPECT_EQ(tokens, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}));
  const uint8_t begins = kSupervised | kBeginsDocument;
  const std::vector<uint8_t> expected{begins, 1, 1, 1, begins, 1, begins};
  for (size_t first = 0; first < 7; ++first) {
    for (size_t count = 0; count <= 7 - first; ++count) {
      std::vector<uint8_t> marks(count);
      file.read_marks(static_cast<int64_t>(first), marks);
      EXPECT_TRUE(std::ranges::equal(marks, std::span(expected).subspan(first, count)))
          << first << " " << count;
    }
  }
  if constexpr (std::is_signed_v<Token>) {
    const TokenFile negative(megatron_bytes<Token>(code, {{{1, 2, -3}}}).write(folder, "b"));
    EXPECT_THAT([&] { negative.read(1, std::span(tokens).first(2)); },
                ThrowsMessage<DataError>(HasSubstr("b.bin holds the number -3 at token 2")));
  }
}

TEST(TokenFile, ReadsMegatronsTokensAndWhereDocumentsBegin) {
  expect_documents<uint8_t>(1, 256);
  expect_documents<int16_t>(3, 32768);
  expect_documents<int32_t>(4, int64_t{1} << 31);
  expect_documents<int64_t>(5, INT64_MAX);
  expect_documents<uint16_t>(8, 65536);
}

TEST(TokenFile, SaysHowMegatronsFilesLie) {
  const TemporaryFolder folder;
  const auto good = megatron_bytes<int32_t>(4, {{{1, 2, 3}, {4}}, {{5, 6}}});
  const auto expect = [&](const MegatronBytes& bytes, const char* message) {
    const auto path = bytes.write(folder, "a");
    EXPECT_THAT([&] { TokenFile file(path); },
                ThrowsMessage<DataError>(::testing::AllOf(HasSubstr("a.idx"), HasSubstr(message))));
  };
  const auto with = [&](size_t offset, auto number) {
    auto bytes = good;
    bytes.index.replace(offset, sizeof number, bytes_of<decltype(number)>({number}));
    return bytes;
  };
  expect({good.tokens, good.index.substr(0, 20)}, "is truncated: it has 20 bytes");
  expect({good.tokens, good.index.substr(0, good.index.size() - 8)},
         "is truncated: its header promises 3 sequences and 3 ends of documents");
  expect({good.tokens, good.index + "x"}, "is damaged: its header promises 3 sequences");
  expect({good.tokens, good.index + std::string(3, '\0')}, "of data of several modes");
  expect({good.tokens.substr(4), good.index}, "a.bin is truncated");
  expect({good.tokens + "1234", good.index}, "a.bin is damaged");
  expect({good.tokens, std::string("TNTIDX\0\0", 8) + good.index.substr(9)}, "formerly");
  expect({good.tokens, "other"}, "does not begin as Megatron's index does");
  expect(with(9, uint64_t{2}), "an index of version 2");
  expect(with(17, uint8_t{2}), "the type 2 (8 bits, signed)");
  expect(with(17, uint8_t{7}), "the type 7 (floating point)");
  expect(with(17, uint8_t{9}), "the type 9;");
  expect(with(18, uint64_t{1} << 62), "is truncated: its header promises 4611686018427387904");
  const size_t pointers = 34 + 3 * 4;
  expect(with(pointers + 16, int64_t{2}), "its last sequence has 2 tokens from byte 2");
  expect(with(pointers + 24, int64_t{1}), "its documents begin with sequence 1");
  const auto expect_later = [&](const MegatronBytes& bytes, const char* message) {
    const TokenFile file(bytes.write(folder, "a"));
    std::vector<uint8_t> marks(6);
    EXPECT_THAT([&] { file.read_marks(0, marks); }, ThrowsMessage<DataError>(HasSubstr(message)));
  };
  expect_later(with(pointers + 32, int64_t{4}), "document 1 begins with sequence 4");
  expect_later(with(pointers, int64_t{400}), "document 0 begins with byte 400");
  EXPECT_THAT([&] { TokenFile file(folder.path() / "a.idx"); },
              ThrowsMessage<DataError>(HasSubstr("Give the .bin beside it")));
}

// These are llm.c's names for FineWeb.
TEST(Dataset, AFolderOfManyShardsIsOneDataSetInTheirOrder) {
  const TemporaryFolder folder;
  folder.write("x/fineweb_train_000010.bin", llm_c_tokens({7, 8}));
  folder.write("x/fineweb_train_000009.bin", llm_c_tokens({3, 4, 5, 6}));
  folder.write("x/fineweb_train_000008.bin", llm_c_tokens({1, 2}));
  folder.write("x/fineweb_val_000000.bin", llm_c_tokens({11, 12}));
  folder.write("x/fineweb_val_000001.bin", llm_c_tokens({13}));
  folder.write("x/meta.json", R"({"vocab_size": 700, "tokenizer": "t.model"})");
  folder.write("x/README.md", "not data");
  const auto data = open_dataset(folder.path() / "x");
  EXPECT_EQ(data.train.sources.front().tokens->files(), 3U);
  EXPECT_EQ(all_tokens(data.train), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(all_tokens(data.validation), (std::vector<int64_t>{11, 12, 13}));
  EXPECT_EQ(data.vocab_size, 700);
  std::vector<int64_t> across(4);
  EXPECT_EQ(data.train.sources.front().tokens->read(1, across), 5)
      << "the largest of a range over a border";
  EXPECT_EQ(across, (std::vector<int64_t>{2, 3, 4, 5}));

  const auto one = open_dataset(folder.path() / "x/fineweb_train_000009.bin");
  EXPECT_EQ(all_tokens(one.train), (std::vector<int64_t>{3, 4, 5, 6}));
  EXPECT_EQ(all_tokens(one.validation), (std::vector<int64_t>{11, 12, 13}));
}

TEST(Dataset, SaysWhatIsWrongWithShards) {
  const TemporaryFolder folder;
  const auto expect = [&](const char* message) {
    EXPECT_THAT([&] { open_dataset(folder.path()); }, ThrowsMessage<DataError>(HasSubstr(message)));
  };
  folder.write("a_train_000001.bin", llm_c_tokens({1}));
  folder.write("a_train_000002.bin", llm_c_tokens({2}));
  expect("holds 2 shards a_train_#.bin, but none to validate with, a_val_#.bin");
  EXPECT_EQ(open_dataset(folder.path(), {.validation_fraction = 0}).train.size(), 2);
  folder.write("a_val_000000.bin", llm_c_tokens({1}));
  EXPECT_NO_THROW(open_dataset(folder.path()));
  const auto later = folder.write("a_train_000004.bin", llm_c_tokens({4}));
  expect("a_train_000002.bin and a_train_000004.bin a shard is missing, number 3");
  std::filesystem::remove(later);
  const auto twin = folder.write("a_train_02.bin", llm_c_tokens({2}));
  expect("have the same number");
  std::filesystem::remove(twin);
  folder.write("a_train_000002.bin", u16_bytes(kTokens));
  expect("the shards of one data set have one format");
  folder.write("a_train_000002.bin", llm_c_tokens({2}).substr(0, 1025));
  expect("a_train_000002.bin is damaged");
  folder.write("a_train_000002.bin", llm_c_tokens({2}));
  folder.write("b_train_000001.bin", llm_c_tokens({1}));
  folder.write("b_val_000001.bin", llm_c_tokens({1}));
  expect("holds 2 data sets");
}

TEST(Dataset, TakesTheEndOfASingleFileForValidation) {
  const TemporaryFolder folder;
  const auto path = folder.write("text.txt", std::string(1000, 'x'));
  auto data = open_dataset(path);
  EXPECT_EQ(data.train.sources.front().begin, 0);
  EXPECT_EQ(data.train.sources.front().end, 900);
  EXPECT_EQ(data.validation.sources.front().begin, 900);
  EXPECT_EQ(data.validation.sources.front().end, 1000);
  EXPECT_EQ(data.vocab_size, 256);
  EXPECT_TRUE(data.by_bytes);
  EXPECT_EQ(open_dataset(path, {.max_validation_tokens = 30}).validation.size(), 30);
  EXPECT_EQ(open_dataset(path, {.validation_fraction = 0}).validation.size(), 0);
}

TEST(Dataset, FindsPairs) {
  const TemporaryFolder folder;
  const auto train = folder.write("x/shakespeare_train.bin", u16_bytes(kTokens));
  folder.write("x/shakespeare_val.bin", u16_bytes(std::array<uint16_t, 2>{1, 2}));
  folder.write("x/shakespeare_train.marks.bin", std::string(4, '\1'));
  folder.write("x/shakespeare_val.marks.bin", std::string(2, '\1'));
  for (const auto& path : {train, folder.path() / "x"}) {
    const auto data = open_dataset(path);
    EXPECT_TRUE(data.train.sources.front().tokens->marked() &&
                data.validation.sources.front().tokens->marked());
    EXPECT_EQ(data.train.size(), 4);
    EXPECT_EQ(data.validation.size(), 2);
    EXPECT_EQ(data.vocab_size, 0) << "the file does not say";
    EXPECT_FALSE(data.by_bytes);
  }
  const auto megatron = megatron_bytes<uint16_t>(8, {{{1, 2, 3}}, {{4}}});
  megatron.write(folder, "m/a_train_text_document");
  megatron.write(folder, "m/a_val_text_document");
  const auto data = open_dataset(folder.path() / "m");
  EXPECT_EQ(data.train.size(), 4);
  EXPECT_EQ(data.validation.size(), 4);
  EXPECT_EQ(data.train.sources.front().tokens->format(), TokenFormat::megatron);
  megatron.write(folder, "m/b_train_text_document");
  megatron.write(folder, "m/b_val_text_document");
  EXPECT_THAT([&] { open_dataset(folder.path() / "m"); },
              ThrowsMessage<DataError>(HasSubstr("holds 2 data sets, with a_train_text_doc")));
  folder.write("x/train.bin", u16_bytes(std::array<uint16_t, 3>{1, 2, 3}));
  folder.write("x/val.bin", u16_bytes(std::array<uint16_t, 1>{1}));
  EXPECT_EQ(open_dataset(folder.path() / "x").train.size(), 3) << "the plain names go first";
}

TEST(Dataset, WhatCannotBeLookedAtIsADataError) {
  const TemporaryFolder folder;
  const auto train = folder.write("train.bin", u16_bytes(kTokens));
  std::filesystem::create_symlink("val.bin", folder.path() / "val.bin");  // to itself
  for (const auto& path : {train, folder.path()}) {
    EXPECT_THAT([&] { open_dataset(path); },
                ::testing::ThrowsMessage<DataError>(::testing::HasSubstr("val.bin: ")));
  }
}

TEST(Dataset, ReadsWhatPrepareSays) {
  const TemporaryFolder folder;
  folder.write("train.bin", u16_bytes(kTokens));
  folder.write("val.bin", u16_bytes(kTokens));
  folder.write("meta.json", R"({"vocab_size": 700, "tokenizer": "t.model"})");
  const auto data = open_dataset(folder.path());
  EXPECT_EQ(data.vocab_size, 700);
  EXPECT_EQ(data.tokenizer, folder.path() / "t.model");
  folder.write("meta.json", "{}");
  EXPECT_THROW(open_dataset(folder.path()), DataError);
  folder.write("meta.json", "{");
  EXPECT_THROW(open_dataset(folder.path()), DataError);
}

TEST(Dataset, JoinsDataOfOneVocabulary) {
  const TemporaryFolder folder;
  const auto prepared = [&](const std::string& name, const char* tokenizer) {
    folder.write(name + "/train.bin", u16_bytes(kTokens));
    folder.write(name + "/val.bin", u16_bytes(std::array<uint16_t, 2>{1, 2}));
    folder.write(name + "/t.json", tokenizer);
    folder.write(name + "/meta.json", R"({"vocab_size": 70000, "tokenizer": "t.json"})");
    return folder.path() / name;
  };
  const auto a = prepared("a", "one");
  const auto b = prepared("b", "one");
  const auto c = prepared("c", "another");
  const auto untold = folder.write("d_train.bin", u16_bytes(kTokens));
  folder.write("d_val.bin", u16_bytes(kTokens));
  const auto text = folder.write("text.txt", std::string(100, 'x'));
  const auto data = open_mixture({untold, a, b}, {3, 2, 1});
  EXPECT_EQ(data.train.sources.size(), 3U);
  EXPECT_EQ(data.train.size(), 12);
  EXPECT_EQ(data.train.weights, (std::vector<double>{3, 2, 1}));
  EXPECT_EQ(data.validation.size(), 8);
  EXPECT_TRUE(data.validation.weights.empty());
  EXPECT_EQ(data.vocab_size, 70000);
  EXPECT_EQ(data.tokenizer, a / "t.json");
  EXPECT_TRUE(open_mixture({a}).train.weights.empty());
  const auto refused = [&](const std::vector<std::filesystem::path>& paths, const char* message) {
    EXPECT_THAT([&] { open_mixture(paths); },
                ThrowsMessage<DataError>(
                    ::testing::AllOf(HasSubstr(message), HasSubstr("the same --tokenizer"))));
  };
  refused({untold, a, c}, "the 70000 tokens of");
  refused({a, text}, "text.txt holds bytes");
  refused({untold, text}, "a vocabulary that it does not tell");
  EXPECT_THAT(
      [&] {
        open_mixture({a, b}, {1});
      },
      ThrowsMessage<ConfigError>(HasSubstr("1 weights of the data (1), and 2 data sets")));
  EXPECT_THAT(
      [&] {
        open_mixture({a, b}, {1, 0});
      },
      ThrowsMessage<ConfigError>(HasSubstr("A weight of the data is 0 (of 1, 0)")));
}

TEST(Dataset, RefusesSplitsThatCannotBe) {
  const TemporaryFolder folder;
  EXPECT_THAT([&] { open_dataset(folder.write("small.txt", "12345")); },
              ThrowsMessage<DataError>(HasSubstr("validation split")));
  EXPECT_THROW(open_dataset(folder.path() / "small.txt", {.validation_fraction = 1}), ConfigError);
  EXPECT_THROW(open_dataset(folder.path() / "small.txt", {.validation_fraction = -0.1}),
               ConfigError);
  EXPECT_THROW(open_dataset(folder.path() / "absent.txt"), DataError);
  EXPECT_THAT([&] { open_dataset(folder.path()); },
              ThrowsMessage<DataError>(HasSubstr("holds no pair")));
  for (const char* name : {"a_train.bin", "a_val.bin", "b_train.bin", "b_val.bin"})
    folder.write(name, "ab");
  EXPECT_THAT([&] { open_dataset(folder.path()); },
              ThrowsMessage<DataError>(HasSubstr("2 data sets, with a_train.bin and b_train.bin")));
  folder.write("a_val.bin", "");
  EXPECT_THAT([&] { open_dataset(folder.path() / "a_train.bin"); },
              ThrowsMessage<DataError>(HasSubstr("a_val.bin is empty")));
}

}  // namespace
}  // namespace zero
