#include "zero/data/tokenizers/normalizers.h"

#include <map>
#include <string_view>
#include <vector>

#include "zero/data/tokenizers/characters.h"
#include "zero/data/tokenizers/fields.h"
#include "zero/data/tokenizers/regex.h"

namespace zero::tokenizers {
namespace {

Normalizer replace_matches(const Json& json) {
  return [pattern = Pattern(member(json, "pattern")),
          content = required<std::string>(json, "content")](const std::string& text) {
    std::string out;
    size_t done = 0;
    pattern.each(text, [&](size_t begin, size_t end) {
      out.append(text, done, begin - done) += content;
      done = end;
    });
    return out.append(text, done);
  };
}

// Drops white space from the ends.
Normalizer strip_white(bool left, bool right) {
  return [left, right](std::string text) {
    size_t end = text.size();
    for (size_t at = end; right && end > 0 && is_white(previous_character(text, at));) end = at;
    text.resize(end);
    size_t begin = 0;
    for (size_t at = 0; left && begin < text.size() && is_white(next_character(text, at));)
      begin = at;
    return text.erase(0, begin);
  };
}

std::string bert_clean(std::string_view text, bool clean, bool space_han) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    auto c = next_character(text, at);
    if (clean) {
      const bool kept = c == '\t' || c == '\n' || c == '\r';
      if (c == 0 || c == 0xFFFD || (!kept && is_control(c))) continue;
      if (is_white(c)) c = ' ';
    }
    const bool apart = space_han && is_han(c);
    if (apart) out += ' ';
    append(out, c);
    if (apart) out += ' ';
  }
  return out;
}

Normalizer bert(const Json& json) {
  const bool clean = required<bool>(json, "clean_text");
  const bool space_han = required<bool>(json, "handle_chinese_chars");
  const bool lower = required<bool>(json, "lowercase");
  const bool strip = optional_member(json, "strip_accents", lower);
  return [=](const std::string& text) {
    auto out = bert_clean(text, clean, space_han);
    if (strip) out = without_marks(normal_form(std::move(out), NormalForm::nfd));
    return lower ? lower_case(out) : out;
  };
}

}  // namespace

Normalizer make_normalizer(const nlohmann::json& json) {
  if (json.is_null()) return [](std::string text) { return text; };
  const auto type = required<std::string>(json, "type");
  if (type == "Sequence") {
    std::vector<Normalizer> all;
    for (const auto& each : required_array(json, "normalizers"))
      all.push_back(make_normalizer(each));
    return [all](std::string text) {
      for (const auto& each : all) text = each(std::move(text));
      return text;
    };
  }
  static const std::map<std::string, NormalForm, std::less<>> forms{{"NFC", NormalForm::nfc},
                                                                    {"NFD", NormalForm::nfd},
                                                                    {"NFKC", NormalForm::nfkc},
                                                                    {"NFKD", NormalForm::nfkd}};
  if (const auto form = forms.find(type); form != forms.end())
    return [form = form->second](std::string t) { return normal_form(std::move(t), form); };
  if (type == "Lowercase") return lower_case;
  if (type == "StripAccents") return without_marks;
  if (type == "Replace") return replace_matches(json);
  if (type == "BertNormalizer") return bert(json);
  if (type == "Strip")
    return strip_white(required<bool>(json, "strip_left"), required<bool>(json, "strip_right"));
  if (type == "Prepend") {
    return [before = required<std::string>(json, "prepend")](const std::string& text) {
      return text.empty() ? text : before + text;
    };
  }
  unknown("normalizer", type);
}

}  // namespace zero::tokenizers
