// A tokenizer.json as a kind of tokenizer.
//
// Note [Long texts in blocks]
// A long text is encoded in blocks, on several threads, and has the tokens that it would have as a
// whole. A block ends with the one line end between a character that is not white and a letter or a
// number: there the patterns of the known tokenizers cut a text anyway. Tokenizers that put a sign
// before a text (Llama's and Mistral's) get each later block with a line end before it, whose
// tokens are dropped again. Which of the two holds is tried once on a short text; if neither does,
// the text is one block.
#include <fmt/format.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/checkpoint/file.h"
#include "zero/data/tokenizers/characters.h"
#include "zero/data/tokenizers/codec.h"
#include "zero/data/tokenizers/tokenizer_json.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 18;
constexpr size_t kBlocksAtOnce = 32;

// Returns the last place at which `text` may be cut, or 0. The text may end within a character.
size_t last_cut(std::string_view text) {
  for (size_t at = text.rfind('\n'); at != std::string_view::npos && at > 0;
       at = text.rfind('\n', at - 1)) {
    size_t before = at;
    if (is_white(previous_character(text, before))) continue;
    const auto behind = text.substr(at + 1, 4);
    if (behind.empty() || valid_utf8(behind) == 0) continue;
    size_t next = 0;
    if (is_letter_or_number(next_character(behind.substr(0, valid_utf8(behind)), next)))
      return at + 1;
  }
  return 0;
}

class JsonCodec final : public Codec {
 public:
  explicit JsonCodec(const std::filesystem::path& file)
      : Codec(file), tokenizer_(read_file(file, &fail<DataError>), file.string()) {
    const auto line = encoded("\n");
    const auto first = encoded("text a.\n");
    const auto both = encoded("text a.\nText b.");
    const auto joins = [&](const Ids& second) {
      auto joined = first;
      joined.insert(joined.end(), second.begin(), second.end());
      return joined == both;
    };
    const auto lead = encoded("\nText b.");
    if (joins(encoded("Text b."))) {
      cuts_ = Cuts::plain;
    } else if (begins_with(lead, line) &&
               joins({lead.begin() + static_cast<std::ptrdiff_t>(line.size()), lead.end()})) {
      cuts_ = Cuts::behind_line_end;
      line_ = line;
    }
  }

  int64_t vocab_size() const override { return tokenizer_.vocab_size(); }
  bool pieces_are_text() const override { return false; }
  const std::string& piece(uint32_t token) const override { return tokenizer_.piece(token); }
  void encode(std::string_view text, SpecialTokens special, Ids& tokens) const override {
    tokenizer_.encode(text, special == SpecialTokens::with, tokens);
  }
  void encode(const TextInput& text, const TokenOutput& tokens) const override;
  std::string decode(const Ids& tokens, SpecialTokens special) const override {
    return tokenizer_.decode(tokens, special == SpecialTokens::without);
  }
  std::optional<int64_t> token(std::string_view piece) const override {
    return tokenizer_.id(piece);
  }
  std::optional<int64_t> unknown_token() const override { return tokenizer_.unknown_token(); }
  std::vector<int64_t> special_tokens() const override {
    std::vector<int64_t> all;
    for (int64_t token = 0; token < vocab_size(); ++token) {
      if (tokenizer_.special(static_cast<uint32_t>(token))) all.push_back(token);
    }
    return all;
  }
  std::optional<size_t> tokens_before_a_second_text() const override {
    return tokenizer_.tokens_before_a_second_text();
  }

 private:
  enum class Cuts : uint8_t { none, plain, behind_line_end };

  static bool begins_with(const Ids& tokens, const Ids& beginning) {
    return tokens.size() >= beginning.size() &&
           std::equal(beginning.begin(), beginning.end(), tokens.begin());
  }
  Ids encoded(std::string_view text) const {
    Ids tokens;
    tokenizer_.encode(text, false, tokens);
    return tokens;
  }
  Ids encoded_block(const std::string& text, bool first) const;

  TokenizerJson tokenizer_;
  Cuts cuts_ = Cuts::none;
  Ids line_{};  // the tokens of a line end alone
};

Ids JsonCodec::encoded_block(const std::string& text, bool first) const {
  if (first || cuts_ == Cuts::plain) return encoded(text);
  auto tokens = encoded("\n" + text);
  if (!begins_with(tokens, line_)) {
    throw DataError(
        fmt::format("The tokenizer {} cannot encode a long text in parts. Give shorter files.",
                    file().string()));
  }
  tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(line_.size()));
  return tokens;
}

void JsonCodec::encode(const TextInput& text, const TokenOutput& tokens) const {
  std::vector<std::string> blocks;
  std::string pending;
  bool first = true;
  const auto encode_blocks = [&] {
    std::vector<Ids> made(blocks.size());
    parallel_for(0, static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
        made[i] = encoded_block(blocks[i], first && i == 0);
    });
    first = first && blocks.empty();
    for (const auto& each : made) tokens(each);
    blocks.clear();
  };
  for (auto piece = text(); !piece.empty(); piece = text()) {
    while (!piece.empty()) {
      const auto part = piece.substr(0, kBlockBytes);
      piece.remove_prefix(part.size());
      pending += part;
      const size_t cut =
          pending.size() < kBlockBytes || cuts_ == Cuts::none ? 0 : last_cut(pending);
      if (cut == 0) continue;
      blocks.push_back(pending.substr(0, cut));
      pending.erase(0, cut);
      if (blocks.size() == kBlocksAtOnce) encode_blocks();
    }
  }
  if (!pending.empty()) blocks.push_back(std::move(pending));
  encode_blocks();
}

}  // namespace

std::shared_ptr<const Codec> json_codec(const std::filesystem::path& file) {
  return std::make_shared<JsonCodec>(file);
}

}  // namespace zero::tokenizers
