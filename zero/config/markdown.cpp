// The tables of docs/config.md.
#include <fmt/format.h>

#include <algorithm>

#include "zero/config/fields.h"

namespace zero::fields {

namespace {

std::string section_of(const std::string& key) { return key.substr(0, key.find('.')); }

std::string meaning_of(const About& about) {
  std::string text = fmt::format("{}.", about.sentence);
  if (!about.also.empty()) {
    text += " Also `";
    for (size_t i = 0; i < about.also.size(); ++i)
      text += fmt::format("{}{}", i > 0 ? "`, `" : "", about.also[i]);
    text += "`.";
  }
  if (!about.details.empty()) text += fmt::format(" {}", about.details);
  return text;
}

std::string option_of(const Spec& row) {
  const auto& about = row.about;
  if (about.option.empty()) return "";
  std::string text(about.option);
  for (const auto& [word, value] : about.words) {
    if (value) text += fmt::format(" {}", word);
  }
  return fmt::format("`{}`", text);
}

/// The table of `rows`, whose keys all begin with `section`. `defaults` has the defaults.
template <class Root>
std::string table(const std::vector<Field<Root>>& rows, const std::string& prefix,
                  const Root& defaults) {
  std::string text = "| key | values | default | `zero train` | meaning |\n|---|---|---|---|---|\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    if (row.key.empty() || !row.about.replaced_by.empty()) continue;
    std::string keys = fmt::format("`{}{}`", prefix, row.key);
    // Keys that are accepted alike share a line.
    const auto same = [&](const Spec& next) {
      return !row.get && next.about.sentence == row.about.sentence &&
             next.about.details == row.about.details && next.wanted() == row.wanted() &&
             next.about.also.empty() && row.about.also.empty();
    };
    while (i + 1 < rows.size() && !rows[i + 1].get && same(rows[i + 1])) {
      const auto& key = rows[++i].key;
      keys += fmt::format(", `{}`", key.substr(key.rfind('.') + 1));
    }
    std::string none;
    if (row.get) {
      const auto value = row.get(defaults);
      if (!value.is_null()) none = show(value);
    }
    text += fmt::format("| {} | {} | {} | {} | {} |\n", keys, row.wanted(), none, option_of(row),
                        meaning_of(row.about));
  }
  return text;
}

}  // namespace

std::string markdown() {
  std::string text;
  const auto& rows = settings();
  for (size_t i = 0; i < rows.size();) {
    const bool nested = rows[i].key.find('.') != std::string::npos;
    const auto section = section_of(rows[i].key);
    std::vector<Field<Settings>> here;
    for (; i < rows.size() && (rows[i].key.find('.') != std::string::npos) == nested &&
           (!nested || section_of(rows[i].key) == section);
         ++i)
      here.push_back(rows[i]);
    text += nested ? fmt::format("## `{}`\n", section) : "## Top level\n";
    text += table(here, "", Settings()) + "\n";
  }
  text += "## `optimizer.params` of AdamW and Adam\n" +
          table(hyper_parameters<AdamW>(), "optimizer.params.", AdamW());
  text += "\n## `optimizer.params` of SGD\n" +
          table(hyper_parameters<Sgd>(), "optimizer.params.", Sgd());
  return text;
}

}  // namespace zero::fields
