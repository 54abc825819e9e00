#include "zero/data/document.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "zero/base/error.h"
#include "zero/data/read_chat_template.h"

namespace zero {

namespace {

// GPT-2's folder names its end of a text in config.json alone, by its number. A model's embedding
// may have more rows than its tokenizer has tokens, so a number that is no token ends nothing.
std::optional<int64_t> end_of_model(const std::filesystem::path& folder,
                                    const Tokenizer& tokenizer) {
  const auto config = read_object(folder / "config.json");
  const auto found = config.find("eos_token_id");
  if (found == config.end() || !found->is_number_unsigned()) return {};
  const auto token = found->get<uint64_t>();
  if (token >= static_cast<uint64_t>(tokenizer.vocab_size())) return {};
  return static_cast<int64_t>(token);
}

}  // namespace

DocumentEncoder::DocumentEncoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  if (tokenizer.file().empty()) return;
  const auto folder = std::filesystem::absolute(tokenizer.file()).parent_path();
  chat_template_ = ChatTemplate::load(folder);
  if (tokenizer.pieces_are_text()) return;
  const auto special = tokenizer.special_tokens();
  special_ = {special.begin(), special.end()};
  const auto end = special_token(folder, "eos_token");
  end_ = end.empty() ? end_of_model(folder, tokenizer) : tokenizer.token(end);
  if (!end.empty() && !end_) {
    throw DataError(fmt::format("The eos_token of {} is \"{}\", which its tokenizer.json lacks.",
                                folder.string(), end));
  }
}

// Note [Tokens of an answer]
// A token may join characters of a prompt and of the answer behind it. So the place in the tokens
// that belongs to a place in the text is where the tokens of the text before it and those of the
// whole text part.
Document DocumentEncoder::encode(const Example& example) const {
  const auto special = example.by_template ? SpecialTokens::without : SpecialTokens::with;
  const std::string_view text = example.text.text;
  Document document;
  auto& tokens = document.tokens;
  tokens = tokenizer_.encode(text, special);
  const auto of_text = static_cast<std::ptrdiff_t>(tokens.size());
  if (!example.by_template && end_ && (tokens.empty() || tokens.back() != *end_))
    tokens.push_back(*end_);
  if (tokens.empty()) throw DataError("has no tokens");
  document.ends_open = !example.by_template && !end_ && !special_.contains(tokens.back());
  document.marks.assign(tokens.size(), 0);
  const auto place = [&](size_t offset) {
    if (offset == 0) return size_t{0};
    if (offset == text.size()) return tokens.size();
    const auto before = tokenizer_.encode(text.substr(0, offset), special);
    const auto parting =
        std::mismatch(tokens.begin(), tokens.begin() + of_text, before.begin(), before.end());
    return static_cast<size_t>(parting.first - tokens.begin());
  };
  for (const auto& [begin, end] : example.text.answers) {
    const size_t last = place(end);
    for (size_t i = place(begin); i < last; ++i) document.marks[i] = kSupervised;
  }
  document.marks[0] = kBeginsDocument;
  return document;
}

Document DocumentEncoder::encode(const LabelledText& text) const {
  Document document{.tokens = {}, .marks = {}, .label = text.label};
  size_t second = 0;
  if (text.pair) {
    std::tie(document.tokens, second) = tokenizer_.encode_pair(text.text, *text.pair);
  } else {
    document.tokens = tokenizer_.encode(text.text, SpecialTokens::with);
    second = document.tokens.size();
  }
  if (document.tokens.empty()) throw DataError("has no tokens");
  document.marks.assign(document.tokens.size(), kSecondText);
  std::fill_n(document.marks.begin(), second, 0);
  document.marks[0] |= kBeginsDocument;
  return document;
}

}  // namespace zero
