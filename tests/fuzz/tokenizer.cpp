// Both ends of the tokenizer's pipe: what zero-sentencepiece writes and zero reads (a table of
// pieces, a stream of tokens), and the text that zero-sentencepiece reads and cuts into sentences.
// The first byte is the length of the pieces in which the pipe gives the rest.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "apps/sentencepiece/sentences.h"
#include "tests/fuzz/fuzz.h"
#include "zero/base/error.h"
#include "zero/data/token_pipe.h"

namespace zero {
namespace {

void read_pieces(std::string_view bytes) {
  try {
    size_t size = 0;
    for (const auto& piece : parse_pieces(bytes)) size += sizeof(uint32_t) + piece.size();
    ensure(size == bytes.size(), "pieces that make up the table");
  } catch (const DataError&) {
  }
}

void read_tokens(std::string_view bytes, size_t chunk) {
  constexpr uint32_t kVocabulary = 50257;
  std::string given;
  try {
    TokenStream stream(kVocabulary);
    for (auto rest = bytes; !rest.empty(); rest.remove_prefix(std::min(chunk, rest.size()))) {
      stream.feed(rest.substr(0, chunk), [&](std::span<const uint32_t> tokens) {
        ensure(*std::max_element(tokens.begin(), tokens.end()) < kVocabulary, "known tokens");
        given.append(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes());
      });
    }
    stream.finish();
    ensure(given == bytes, "tokens that make up the stream");
  } catch (const DataError&) {
    ensure(bytes.substr(0, given.size()) == given, "tokens of the stream");
  }
}

void read_sentences(std::string_view text, size_t chunk) {
  const auto read = [rest = text](char* data, size_t size) mutable {
    const size_t count = std::min(rest.size(), size);
    std::memcpy(data, rest.data(), count);
    rest.remove_prefix(count);
    return count;
  };
  Sentences sentences(read, chunk);
  std::string together;
  std::string sentence;
  while (sentences.next(sentence)) {
    ensure(!sentence.empty() && sentence.size() <= kMaxSentence, "a sentence");
    ensure(sentence.find('\n') >= sentence.size() - 1, "one line at most");
    together += sentence;
  }
  ensure(together == text, "sentences that make up the text");
}

}  // namespace

std::vector<std::string> seeds() {
  using std::string_literals::operator""s;
  return {
      "\7\1\0\0\0a\0\0\0\0\3\0\0\0\xE2\x96\x81"s,
      "\1\1\0\0\0\x50\xC4\0\0\x51\xC4\0\0"s,
      "\5two lines\n\nof text, the second one long: "s + std::string(300, 'x') + "\n",
      "\xFF"s + std::string(9000, 'x') + " " + std::string(9000, '\x80'),
      "\xFE"s + std::string(8000, 'x') + " " + std::string(9000, 'y') + "\xC3\xA9\n",
      "\4\xFF\xFF\xFF\xFF"s,
  };
}

}  // namespace zero

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t chunk = size_t{1} + data[0] % 64 * 97;
  zero::read_pieces(rest);
  zero::read_tokens(rest, chunk);
  zero::read_sentences(rest, chunk);
  return 0;
}
