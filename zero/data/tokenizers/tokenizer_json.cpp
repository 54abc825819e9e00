#include "zero/data/tokenizers/tokenizer_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/utf8.h"

namespace zero::tokenizers {
namespace {

constexpr size_t kLongestText = size_t{1} << 30;
constexpr uint64_t kMostAddedToken = uint64_t{1} << 24;

void require_utf8(std::string_view text) {
  if (text.size() >= kLongestText) {
    throw DataError(fmt::format("A text of {} is too long to be encoded as one; cut it.",
                                format_bytes(static_cast<double>(text.size()))));
  }
  if (const size_t good = valid_utf8(text); good < text.size())
    throw DataError(fmt::format("The text {} is not UTF-8 at its byte {}.",
                                in_quotes(text.substr(0, 40)), good));
}

// Returns whether a pair is the first text as it is alone, and behind it the second from its text
// on, of the type 1.
bool pairs_plainly(const Json& json) {
  auto expected = Json::array();
  auto second = Json::array();
  for (auto each : json.at("single")) {
    expected.push_back(each);
    const bool text = each.contains("Sequence");
    if (!text && second.empty()) continue;
    each[text ? "Sequence" : "SpecialToken"]["type_id"] = 1;
    if (text) each["Sequence"]["id"] = "B";
    second.push_back(std::move(each));
  }
  expected.insert(expected.end(), second.begin(), second.end());
  return json.contains("pair") && json.at("pair") == expected;
}

// Returns the tokens that a template puts before and behind the text.
std::pair<Ids, Ids> template_tokens(const Json& json) {
  std::pair<Ids, Ids> around;
  bool behind = false;
  for (const auto& each : required_array(json, "single")) {
    if (const auto& sequence = member(each, "Sequence"); !sequence.is_null()) {
      if (behind) throw Error("has a template that names the text twice");
      behind = true;
      continue;
    }
    const auto name = required<std::string>(member(each, "SpecialToken"), "id");
    const auto& ids = required_array(member(member(json, "special_tokens"), name.c_str()), "ids");
    for (const auto& id : ids) {
      if (!id.is_number_unsigned()) throw Error(fmt::format("has the token {}", id.dump()));
      (behind ? around.second : around.first).push_back(id.get<uint32_t>());
    }
  }
  if (!behind) throw Error("has a template without the text");
  return around;
}

// ["[CLS]", 101]
uint32_t named_token(const Json& json, const char* key) {
  const auto& pair = required_array(json, key);
  if (pair.size() != 2 || !pair[1].is_number_unsigned())
    throw Error(fmt::format("has the '{}' {}", key, excerpt(pair.dump())));
  return pair[1].get<uint32_t>();
}

}  // namespace

TokenizerJson::TokenizerJson(std::string_view json, std::string_view source) {
  std::string stage;
  try {
    const auto file = parse_json(json);
    if (!file.is_object()) throw Error("is no object");
    const auto enter = [&](const char* key) -> const Json& {
      stage = fmt::format("its '{}' ", key);
      return member(file, key);
    };
    normalize_ = make_normalizer(enter("normalizer"));
    cut_ = make_pre_tokenizer(enter("pre_tokenizer"));
    model_ = make_vocabulary_model(enter("model"));
    decode_ = make_decoder(enter("decoder"));
    for (const auto& [piece, token] : model_->vocabulary()) {
      if (token >= pieces_.size()) {
        pieces_.resize(token + size_t{1});
        known_.resize(pieces_.size());
      }
      pieces_[token] = piece;
      known_[token] = true;
    }
    add_tokens(enter("added_tokens"));
    special_.resize(pieces_.size());
    set_post_processor(enter("post_processor"));
    if (pieces_.empty()) throw Error("has no tokens");
  } catch (const Error& error) {
    throw DataError(fmt::format("{} is not a tokenizer.json that libzero reads: {}{}.", source,
                                stage.empty() ? "it " : stage, error.what()));
  }
}

void TokenizerJson::add_tokens(const nlohmann::json& list) {
  if (list.is_null()) return;
  if (!list.is_array()) throw Error("is no array");
  std::map<uint32_t, std::string> contents;
  for (const auto& each : list) {
    const auto id = required<uint64_t>(each, "id");
    AddedToken token{.content = required<std::string>(each, "content"),
                     .id = static_cast<uint32_t>(id),
                     .single_word = optional_member(each, "single_word", false),
                     .strip_left = optional_member(each, "lstrip", false),
                     .strip_right = optional_member(each, "rstrip", false),
                     .normalized = optional_member(each, "normalized", false),
                     .special = optional_member(each, "special", false)};
    if (id >= kMostAddedToken) throw Error(fmt::format("has the token {}", id));
    if (const auto other = this->id(token.content); other && *other != id) {
      throw Error(fmt::format("gives the token {} the id {}, and elsewhere {}",
                              in_quotes(token.content), id, *other));
    }
    const bool known = id < known_.size() && known_[id];
    const auto& owner =
        contents.emplace(token.id, known ? pieces_[id] : token.content).first->second;
    if (owner != token.content) {
      throw Error(fmt::format("gives the token {} the id {}, which {} has",
                              in_quotes(token.content), id, in_quotes(owner)));
    }
    const size_t size = std::max<size_t>(pieces_.size(), id + 1);
    pieces_.resize(size);
    known_.resize(size);
    special_.resize(size);
    known_[id] = true;
    special_[id] = token.special;
    added_.insert_or_assign(token.content, token.id);
    if (token.normalized) token.content = normalize_(token.content);
    pieces_[id] = token.content;
    (token.normalized ? normalized_ : raw_).add(token);
  }
}

void TokenizerJson::set_post_processor(const nlohmann::json& json) {
  if (json.is_null()) return;
  const auto type = required<std::string>(json, "type");
  std::pair<Ids, Ids> around;
  if (type == "Sequence") {
    for (const auto& each : required_array(json, "processors")) set_post_processor(each);
    return;
  }
  if (type == "ByteLevel") return;  // it moves offsets alone
  if (type == "BertProcessing" || type == "RobertaProcessing") {
    around = {{named_token(json, "cls")}, {named_token(json, "sep")}};
    pairs_ = type == "BertProcessing";
  } else if (type == "TemplateProcessing") {
    around = template_tokens(json);
    pairs_ = pairs_plainly(json);
  } else {
    unknown("post_processor", type);
  }
  for (const auto& side : {around.first, around.second}) {
    for (const auto token : side) {
      if (token >= pieces_.size()) throw Error(fmt::format("adds the unknown token {}", token));
    }
  }
  before_.insert(before_.begin(), around.first.begin(), around.first.end());
  after_.insert(after_.end(), around.second.begin(), around.second.end());
}

WordCache TokenizerJson::take_cache() const {
  const std::lock_guard lock(mutex_);
  if (caches_.empty()) return {};
  auto cache = std::move(caches_.back());
  caches_.pop_back();
  return cache;
}

void TokenizerJson::give_back(WordCache cache) const {
  const std::lock_guard lock(mutex_);
  caches_.push_back(std::move(cache));
}

void TokenizerJson::encode_part(const TextPart& part, WordCache& cache, Ids& tokens) const {
  const auto text = normalize_(std::string(part.text));
  for (const auto& inner : normalized_.cut(text, part.first)) {
    if (inner.token >= 0) {
      tokens.push_back(static_cast<uint32_t>(inner.token));
      continue;
    }
    for (const auto& word : cut_({{std::string(inner.text), inner.first}}))
      model_->encode(word.text, cache, tokens);
  }
}

void TokenizerJson::encode(std::string_view text, bool special, Ids& tokens) const {
  require_utf8(text);
  auto cache = take_cache();
  if (special) tokens.insert(tokens.end(), before_.begin(), before_.end());
  for (const auto& part : raw_.cut(text, true)) {
    if (part.token >= 0) {
      tokens.push_back(static_cast<uint32_t>(part.token));
    } else {
      encode_part(part, cache, tokens);
    }
  }
  if (special) tokens.insert(tokens.end(), after_.begin(), after_.end());
  give_back(std::move(cache));
}

std::string TokenizerJson::decode(const Ids& tokens, bool skip_special) const {
  std::vector<std::string> pieces;
  for (const auto token : tokens) {
    if (known_[token] && !(skip_special && special_[token])) pieces.push_back(pieces_[token]);
  }
  std::string text;
  for (const auto& piece : decode_(std::move(pieces))) text += piece;
  return text;
}

std::optional<uint32_t> TokenizerJson::id(std::string_view piece) const {
  if (const auto found = added_.find(piece); found != added_.end()) return found->second;
  const auto& vocabulary = model_->vocabulary();
  const auto found = vocabulary.find(piece);
  return found == vocabulary.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace zero::tokenizers
