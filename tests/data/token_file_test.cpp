#include "zero/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <vector>

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
  };
  for (const auto& [path, format, tokens] : cases) {
    const TokenFile file(path);
    EXPECT_EQ(file.format(), format) << path;
    ASSERT_EQ(file.size(), static_cast<int64_t>(tokens.size()));
    std::vector<int64_t> all(tokens.size());
    EXPECT_EQ(file.read(0, all), *std::max_element(tokens.begin(), tokens.end()));
    EXPECT_EQ(all, tokens);
    std::vector<int64_t> some(2);
    file.will_need(1, 2);
    file.read(1, some);
    EXPECT_EQ(some, std::vector<int64_t>(tokens.begin() + 1, tokens.begin() + 3));
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
  expect_error(folder.write("llama.bin", llm_c_bytes(20240801, 7, 4, payload)), "32-bit tokens");
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

TEST(Dataset, TakesTheEndOfASingleFileForValidation) {
  const TemporaryFolder folder;
  const auto path = folder.write("text.txt", std::string(1000, 'x'));
  auto data = open_dataset(path);
  EXPECT_EQ(data.train.begin, 0);
  EXPECT_EQ(data.train.end, 900);
  EXPECT_EQ(data.validation.begin, 900);
  EXPECT_EQ(data.validation.end, 1000);
  EXPECT_EQ(data.vocab_size, 256);
  EXPECT_TRUE(data.by_bytes);
  EXPECT_EQ(open_dataset(path, {.max_validation_tokens = 30}).validation.size(), 30);
  EXPECT_EQ(open_dataset(path, {.validation_fraction = 0}).validation.size(), 0);
}

TEST(Dataset, FindsPairs) {
  const TemporaryFolder folder;
  const auto train = folder.write("x/shakespeare_train.bin", u16_bytes(kTokens));
  folder.write("x/shakespeare_val.bin", u16_bytes(std::array<uint16_t, 2>{1, 2}));
  for (const auto& path : {train, folder.path() / "x"}) {
    const auto data = open_dataset(path);
    EXPECT_EQ(data.train.size(), 4);
    EXPECT_EQ(data.validation.size(), 2);
    EXPECT_EQ(data.vocab_size, 0) << "the file does not say";
    EXPECT_FALSE(data.by_bytes);
  }
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
              ThrowsMessage<DataError>(HasSubstr("2 training files, a_train.bin and b_train.bin")));
  folder.write("a_val.bin", "");
  EXPECT_THAT([&] { open_dataset(folder.path() / "a_train.bin"); },
              ThrowsMessage<DataError>(HasSubstr("a_val.bin is empty")));
}

}  // namespace
}  // namespace zero
