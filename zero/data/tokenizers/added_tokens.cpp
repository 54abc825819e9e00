#include "zero/data/tokenizers/added_tokens.h"

#include "zero/data/tokenizers/characters.h"

namespace zero::tokenizers {

void AddedTokens::add(const AddedToken& token) {
  if (token.content.empty()) return;
  size_t node = 0;
  for (const char byte : token.content) {
    const auto [found, made] = nodes_[node].next.try_emplace(byte, nodes_.size());
    node = found->second;
    if (made) nodes_.emplace_back();
  }
  nodes_[node].token = static_cast<int64_t>(tokens_.size());
  tokens_.push_back(token);
}

const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at) const {
  int64_t longest = -1;
  for (size_t node = 0; at < text.size(); ++at) {
    const auto found = nodes_[node].next.find(text[at]);
    if (found == nodes_[node].next.end()) break;
    node = found->second;
    if (nodes_[node].token >= 0) longest = nodes_[node].token;
  }
  return longest < 0 ? nullptr : &tokens_[static_cast<size_t>(longest)];
}

std::vector<TextPart> AddedTokens::cut(std::string_view text, bool first) const {
  std::vector<TextPart> parts;
  size_t done = 0;
  const auto add_text = [&](size_t end) {
    if (end > done) parts.push_back({text.substr(done, end - done), first && done == 0, -1});
  };
  if (!tokens_.empty()) {
    for (size_t at = 0; at < text.size();) {
      const auto* token = longest_at(text, at);
      if (token == nullptr) {
        ++at;
        continue;
      }
      size_t begin = at;
      size_t end = at += token->content.size();
      if (token->single_word) {
        size_t before = begin;
        size_t behind = end;
        if (end < text.size() && is_word(next_character(text, behind))) continue;
        if (begin > 0 && is_word(previous_character(text, before))) continue;
      }
      for (size_t i = begin; token->strip_left && begin > done; begin = i) {
        if (!is_white(previous_character(text, i))) break;
      }
      for (size_t i = end; token->strip_right && end < text.size(); end = i) {
        if (!is_white(next_character(text, i))) break;
      }
      add_text(begin);
      parts.push_back({token->content, false, token->id});
      done = at = end;
    }
  }
  add_text(text.size());
  return parts;
}

}  // namespace zero::tokenizers
