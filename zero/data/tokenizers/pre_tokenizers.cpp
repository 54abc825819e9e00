#include "zero/data/tokenizers/pre_tokenizers.h"

#include <map>
#include <string_view>
#include <utility>

#include "zero/data/tokenizers/byte_characters.h"
#include "zero/data/tokenizers/characters.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/tokenizers/regex.h"

namespace zero::tokenizers {
namespace {

// This is GPT-2's expression.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Becomes of a match: dropped, a word of its own, joined to the word before or behind it, or joined
// to other matches beside it.
enum class Behavior : uint8_t { removed, isolated, with_previous, with_next, contiguous };

Behavior behavior_of(const std::string& name) {
  static const std::map<std::string, Behavior, std::less<>> all{
      {"Removed", Behavior::removed},
      {"Isolated", Behavior::isolated},
      {"MergedWithPrevious", Behavior::with_previous},
      {"MergedWithNext", Behavior::with_next},
      {"Contiguous", Behavior::contiguous}};
  const auto found = all.find(name);
  if (found == all.end()) unknown("behavior", name);
  return found->second;
}

// Cuts words at the matches that `each(text, on_match)` finds.
template <typename Each>
Words split_at(const Words& words, Behavior behavior, bool invert, const Each& each) {
  struct Part {
    size_t begin;
    size_t end;
    bool match;
  };
  Words out;
  out.reserve(words.size());
  std::vector<Part> parts;
  for (const auto& word : words) {
    parts.clear();
    const auto add = [&](size_t begin, size_t end, bool match) {
      if (begin == end) return;
      if (behavior == Behavior::removed && match) return;
      if (!parts.empty()) {
        auto& last = parts.back();
        const bool join = (behavior == Behavior::with_previous && match && !last.match) ||
                          (behavior == Behavior::with_next && !match && last.match) ||
                          (behavior == Behavior::contiguous && match == last.match);
        if (join) {
          last.end = end;
          last.match = match;
          return;
        }
      }
      parts.push_back({begin, end, match});
    };
    size_t done = 0;
    each(word.text, [&](size_t begin, size_t end) {
      add(done, begin, invert);
      add(begin, end, !invert);
      done = end;
    });
    add(done, word.text.size(), invert);
    for (const auto& part : parts) {
      out.push_back(
          {word.text.substr(part.begin, part.end - part.begin), word.first && part.begin == 0});
    }
  }
  return out;
}

template <typename Is>
Words split_at_characters(const Words& words, Behavior behavior, const Is& is) {
  return split_at(words, behavior, false, [&](std::string_view text, const auto& on_match) {
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      if (is(next_character(text, at))) on_match(begin, at);
    }
  });
}

PreTokenizer byte_level(const Json& json) {
  const bool space = required<bool>(json, "add_prefix_space");
  std::shared_ptr<const Regex> regex;
  if (optional_member(json, "use_regex", true)) regex = std::make_shared<Regex>(kByteLevelPattern);
  return [space, regex](Words words) {
    for (auto& word : words) {
      if (space && !word.text.starts_with(' ')) word.text.insert(word.text.begin(), ' ');
    }
    if (regex != nullptr) {
      words = split_at(
          words, Behavior::isolated, false,
          [&](std::string_view text, const auto& on_match) { regex->each(text, on_match); });
    }
    for (auto& word : words) word.text = bytes_to_characters(word.text);
    return words;
  };
}

PreTokenizer metaspace(const Json& json) {
  const auto sign = required<std::string>(json, "replacement");
  const auto scheme = optional_member<std::string>(
      json, "prepend_scheme", optional_member(json, "add_prefix_space", true) ? "always" : "never");
  if (sign.empty()) unknown("replacement", sign);
  if (scheme != "always" && scheme != "never" && scheme != "first")
    unknown("prepend_scheme", scheme);
  return [sign, scheme, split = optional_member(json, "split", true)](Words words) {
    for (auto& word : words) {
      std::string text;
      for (const char c : word.text) c == ' ' ? text += sign : text += c;
      const bool prepend = scheme == "always" || (scheme == "first" && word.first);
      word.text = prepend && !text.starts_with(sign) ? sign + text : std::move(text);
    }
    if (!split) return words;
    return split_at(words, Behavior::with_next, false,
                    [&](std::string_view text, const auto& on_match) {
                      for (size_t at = text.find(sign); at != std::string_view::npos;
                           at = text.find(sign, at + sign.size()))
                        on_match(at, at + sign.size());
                    });
  };
}

PreTokenizer split(const Json& json) {
  return [pattern = Pattern(member(json, "pattern")),
          behavior = behavior_of(required<std::string>(json, "behavior")),
          invert = optional_member(json, "invert", false)](const Words& words) {
    return split_at(words, behavior, invert, [&](std::string_view text, const auto& on_match) {
      pattern.each(text, on_match);
    });
  };
}

}  // namespace

PreTokenizer make_pre_tokenizer(const nlohmann::json& json) {
  if (json.is_null()) return [](Words words) { return words; };
  const auto type = required<std::string>(json, "type");
  if (type == "Sequence") {
    std::vector<PreTokenizer> all;
    for (const auto& each : required_array(json, "pretokenizers"))
      all.push_back(make_pre_tokenizer(each));
    return [all](Words words) {
      for (const auto& each : all) words = each(std::move(words));
      return words;
    };
  }
  if (type == "Split") return split(json);
  if (type == "ByteLevel") return byte_level(json);
  if (type == "Metaspace") return metaspace(json);
  if (type == "Digits") {
    const auto behavior =
        required<bool>(json, "individual_digits") ? Behavior::isolated : Behavior::contiguous;
    return [regex = Regex("\\p{N}"), behavior](const Words& words) {
      return split_at(words, behavior, false, [&](std::string_view text, const auto& on_match) {
        regex.each(text, on_match);
      });
    };
  }
  if (type == "WhitespaceSplit") {
    return
        [](const Words& words) { return split_at_characters(words, Behavior::removed, is_white); };
  }
  if (type == "Punctuation") {
    const auto behavior = behavior_of(optional_member<std::string>(json, "behavior", "Isolated"));
    return [behavior](const Words& words) {
      return split_at_characters(words, behavior, is_punctuation);
    };
  }
  if (type == "BertPreTokenizer") {
    return [](const Words& words) {
      return split_at_characters(split_at_characters(words, Behavior::removed, is_white),
                                 Behavior::isolated, is_punctuation);
    };
  }
  unknown("pre_tokenizer", type);
}

}  // namespace zero::tokenizers
