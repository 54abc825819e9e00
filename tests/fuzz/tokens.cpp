// Token files, folders of them, and what lies beside them. The first byte chooses what the rest is.
#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "tests/fuzz/fuzz.h"
#include "tests/support/megatron_bytes.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/data/dataset.h"
#include "zero/data/token_file.h"
#include "zero/data/token_loader.h"

namespace zero {
namespace {

constexpr std::array<uint16_t, 4> kTokens{7, 50256, 0, 65535};

// Reads the file whole, and in pieces.
void read(const TokenFile& file) {
  std::vector<int64_t> whole(static_cast<size_t>(file.size()));
  const auto largest = file.read(0, whole);
  ensure(largest == *std::max_element(whole.begin(), whole.end()) && largest < file.vocab_limit(),
         "the largest token");
  std::array<int64_t, 7> piece{};
  for (int64_t at = 0; at < file.size(); at += 7) {
    const auto count = static_cast<size_t>(std::min<int64_t>(7, file.size() - at));
    file.will_need(at, static_cast<int64_t>(count));
    file.read(at, std::span(piece).first(count));
    ensure(std::equal(piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(count),
                      whole.begin() + at),
           "the same tokens in pieces");
  }
}

void attempt(const TemporaryFolder& folder, unsigned choice, const std::string& bytes) {
  switch (choice % 8) {
    case 0:
      return read(TokenFile(folder.write("file/a.bin", bytes)));
    case 1:
      return read(TokenFile(folder.write("file/a.txt", bytes)));
    case 2:
      return read(TokenFile(folder.write("file/a", bytes), TokenFormat::llm_c));
    case 3: {
      folder.write("meta/train.bin", u16_bytes(kTokens));
      folder.write("meta/val.bin", u16_bytes(kTokens));
      folder.write("meta/meta.json", bytes);
      const auto data = open_dataset(folder.path() / "meta");
      ensure(data.vocab_size > 0, "a vocabulary");
      return;
    }
    case 4: {
      const auto data = open_dataset(folder.write("split/a.bin", bytes));
      ensure(data.train.size() > 0 && data.validation.size() > 0, "a split");
      return;
    }
    case 5: {  // cut in three
      const size_t third = bytes.size() / 3;
      folder.write("shards/x_train_000001.bin", bytes.substr(0, third));
      folder.write("shards/x_train_000002.bin", bytes.substr(third, third));
      folder.write("shards/x_val_000000.bin", bytes.substr(2 * third));
      const auto data = open_dataset(folder.path() / "shards");
      ensure(data.train.sources.front().tokens->files() == 2, "two shards");
      std::vector<int64_t> tokens(static_cast<size_t>(data.train.size()));
      data.train.sources.front().tokens->read(0, tokens);
      return;
    }
    case 6: {  // an index of Megatron's
      folder.write("index/a.bin", u16_bytes(kTokens));
      folder.write("index/a.idx", bytes);
      const TokenFile file(folder.path() / "index/a.bin");
      read(file);
      std::vector<uint8_t> marks(static_cast<size_t>(file.size()));
      return file.read_marks(0, marks);
    }
    default: {
      const auto state = LoaderState::from_json(bytes);
      ensure(LoaderState::from_json(state.to_json()) == state, "a state that is read back equal");
    }
  }
}

}  // namespace

std::vector<std::string> seeds() {
  const auto tokens = u16_bytes(kTokens);
  return {
      std::string(1, '\0') + tokens,
      std::string(1, '\0') + llm_c_bytes(kLlmCMagic, kLlmCVersion, 4, tokens),
      "\1a line of text\n",
      "\2" + llm_c_bytes(kLlmCMagic, kLlmCVersion, 4, tokens),
      "\2" + llm_c_bytes(kLlmCMagic, kLlmCVersion, -1, tokens),
      "\2" + llm_c_bytes(20240801, 7, 4, tokens),
      "\3{\"vocab_size\": 700, \"tokenizer\": \"tokenizer.model\"}",
      "\3{\"vocab_size\": -1, \"tokenizer\": " + std::string(200, '[') + std::string(200, ']') +
          "}",
      "\4" + tokens + tokens + tokens,
      "\5" + tokens + tokens + tokens,
      "\6" + megatron_bytes<uint16_t>(8, {{{7, 50256}}, {{0, 65535}}}).index,
      "\7{\"sample\": 3, \"sequence\": 8, \"sequences\": 100, \"seed\": 1337}",
      "\7{\"sample\": 3, \"sequence\": 8, \"sequences\": 100, \"seed\": 1337, \"sources\": [90, "
      "10], "
      "\"shares\": [4000, 96]}",
  };
}

}  // namespace zero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static const zero::TemporaryFolder folder;
  try {
    zero::attempt(folder, data[0], {reinterpret_cast<const char*>(data) + 1, size - 1});
  } catch (const zero::DataError& error) {
    zero::ensure(std::string_view(error.what()).size() < 1000, "a message that can be read");
  }
  return 0;
}
