#include "zero/data/tokenizers/byte_pairs.h"

#include <fmt/format.h>

#include <algorithm>
#include <queue>
#include <tuple>

#include "zero/data/tokenizers/characters.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {
namespace {

constexpr size_t kMostCachedWords = 100'000;
constexpr size_t kLongestCachedWord = 256;

uint64_t pair_key(uint32_t left, uint32_t right) { return (uint64_t{left} << 32) | right; }

}  // namespace

BytePairs::BytePairs(const nlohmann::json& model)
    : VocabularyModel(model),
      ignore_merges_(optional_member(model, "ignore_merges", false)),
      fuse_unknown_(optional_member(model, "fuse_unk", false)) {
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const auto text = optional_member<std::string>(model, key, ""); !text.empty())
      unknown(key, text);
  }
  if (const auto& dropout = member(model, "dropout"); !dropout.is_null() && dropout != 0.0)
    unknown("dropout", dropout.dump());
  if (const auto text = optional_member<std::string>(model, "unk_token", ""); !text.empty()) {
    unknown_ = find(text);
    if (!unknown_)
      throw Error(fmt::format("has the unk_token {}, which its vocabulary lacks", in_quotes(text)));
  }
  if (optional_member(model, "byte_fallback", false)) {
    for (size_t byte = 0; byte < 256; ++byte) bytes_[byte] = find(fmt::format("<0x{:02X}>", byte));
  }
  const auto& merges = required_array(model, "merges");
  merges_.reserve(merges.size());
  uint32_t rank = 0;
  for (const auto& merge : merges) add_merge(merge, rank++);
}

void BytePairs::add_merge(const nlohmann::json& merge, uint32_t rank) {
  std::array<std::string, 2> sides;  // "a b" or ["a", "b"]
  bool good = false;
  if (merge.is_string()) {
    const auto& text = merge.get_ref<const std::string&>();
    const auto blank = text.find(' ');
    good = blank != std::string::npos && text.find(' ', blank + 1) == std::string::npos;
    if (good) sides = {text.substr(0, blank), text.substr(blank + 1)};
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
             merge[1].is_string()) {
    good = true;
    sides = {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  if (!good) throw Error(fmt::format("has the merge {} (number {})", excerpt(merge.dump()), rank));
  std::array<uint32_t, 3> tokens{};
  size_t at = 0;
  for (const auto& piece : {sides[0], sides[1], sides[0] + sides[1]}) {
    const auto token = find(piece);
    if (!token) {
      throw Error(fmt::format("has a merge (number {}) of the piece {}, which its vocabulary lacks",
                              rank, in_quotes(excerpt(piece))));
    }
    tokens[at++] = *token;
  }
  merges_[pair_key(tokens[0], tokens[1])] = {rank, tokens[2]};
}

const BytePairs::Merge* BytePairs::merge_of(uint32_t left, uint32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

Ids BytePairs::characters_of(std::string_view word) const {
  Ids tokens;
  bool after_unknown = false;
  for (size_t at = 0; at < word.size();) {
    const size_t begin = at;
    next_character(word, at);
    const auto character = word.substr(begin, at - begin);
    if (const auto token = find(character)) {
      tokens.push_back(*token);
      after_unknown = false;
      continue;
    }
    const auto byte_token = [&](char byte) { return bytes_[static_cast<unsigned char>(byte)]; };
    if (std::all_of(character.begin(), character.end(), byte_token)) {
      for (const char byte : character) tokens.push_back(*byte_token(byte));
      after_unknown = false;
      continue;
    }
    if (!unknown_) continue;
    if (!after_unknown || !fuse_unknown_) tokens.push_back(*unknown_);
    after_unknown = true;
  }
  return tokens;
}

// Merges the pair of the lowest rank, the leftmost of equals, until there is none.
Ids BytePairs::merged(Ids tokens) const {
  struct Symbol {
    uint32_t token;
    uint32_t previous;
    uint32_t next;
  };
  constexpr uint32_t kNone = ~uint32_t{0};
  const auto count = static_cast<uint32_t>(tokens.size());
  std::vector<Symbol> symbols(count);
  for (uint32_t i = 0; i < count; ++i)
    symbols[i] = {tokens[i], i == 0 ? kNone : i - 1, i + 1 == count ? kNone : i + 1};
  using Candidate = std::tuple<uint32_t, uint32_t, uint32_t>;  // rank, place, token
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto look = [&](uint32_t place) {
    if (place == kNone || symbols[place].next == kNone) return;
    const auto* merge = merge_of(symbols[place].token, symbols[symbols[place].next].token);
    if (merge != nullptr) candidates.emplace(merge->rank, place, merge->token);
  };
  std::vector<bool> gone(count, false);
  for (uint32_t i = 0; i < count; ++i) look(i);
  while (!candidates.empty()) {
    const auto [rank, place, token] = candidates.top();
    candidates.pop();
    auto& left = symbols[place];
    if (gone[place] || left.next == kNone) continue;
    const auto* merge = merge_of(left.token, symbols[left.next].token);
    if (merge == nullptr || merge->token != token) continue;  // of before another merge
    gone[left.next] = true;
    left.token = token;
    left.next = symbols[left.next].next;
    if (left.next != kNone) symbols[left.next].previous = place;
    look(left.previous);
    look(place);
  }
  size_t kept = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (!gone[i]) tokens[kept++] = symbols[i].token;
  }
  tokens.resize(kept);
  return tokens;
}

void BytePairs::encode(std::string_view word, WordCache& cache, Ids& tokens) const {
  if (ignore_merges_) {
    if (const auto whole = find(word)) return tokens.push_back(*whole);
  }
  if (const auto found = cache.find(word); found != cache.end()) {
    tokens.insert(tokens.end(), found->second.begin(), found->second.end());
    return;
  }
  auto made = merged(characters_of(word));
  tokens.insert(tokens.end(), made.begin(), made.end());
  if (word.size() <= kLongestCachedWord && cache.size() < kMostCachedWords)
    cache.emplace(word, std::move(made));
}

}  // namespace zero::tokenizers
