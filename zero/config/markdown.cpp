// The tables of docs/config.md, and the text of `zero config --explain` about one key.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <variant>

#include "zero/base/error.h"
#include "zero/config/fields.h"

namespace zero::fields {

namespace {

/// Returns the first part of a key; empty at the top level.
std::string section_of(const std::string& key) {
  const auto dot = key.find('.');
  return dot == std::string::npos ? "" : key.substr(0, dot);
}

std::string meaning_of(const About& about) {
  std::string text = fmt::format("{}.", about.sentence);
  if (!about.also.empty()) text += fmt::format(" Also `{}`.", fmt::join(about.also, "`, `"));
  if (!about.details.empty()) text += fmt::format(" {}", about.details);
  if (!about.refused.empty())
    text += fmt::format(" An error if it is switched on: {}", about.refused);
  if (!about.stands_for.empty()) text += fmt::format(" Sets `{}`.", about.stands_for);
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

/// A row with its default, if it has one, and with whether it acts.
struct Line {
  Spec row;
  std::string none;
  bool acts = true;
};

std::string default_of(const Json& value, const Spec& row) {
  if (value.is_null()) return row.about.auto_is_none ? "\"auto\"" : "";
  return show(value);
}

template <class Root>
std::vector<Line> lines_of(const std::vector<Field<Root>>& rows, const Root& defaults) {
  std::vector<Line> lines;
  for (const auto& row : rows) {
    lines.push_back({row, row.get ? default_of(row.get(defaults), row) : "", bool(row.set)});
  }
  return lines;
}

std::vector<Line> lines_of(const ParamsTable& table) {
  std::vector<Line> lines;
  for (size_t i = 0; i < table.rows.size(); ++i)
    lines.push_back({table.rows[i], default_of(table.defaults[i], table.rows[i]), true});
  return lines;
}

std::string table(const std::vector<Line>& lines, const std::string& prefix = "") {
  std::string text = "| key | values | default | `zero train` | meaning |\n|---|---|---|---|---|\n";
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto& row = lines[i].row;
    if (row.key.empty() || !row.about.replaced_by.empty()) continue;
    std::string keys = fmt::format("`{}{}`", prefix, row.key);
    // Keys that are accepted alike share a line.
    const auto same = [&](const Line& next) {
      const auto& other = next.row.about;
      return !lines[i].acts && !next.acts &&
             next.row.key.substr(0, next.row.key.rfind('.')) ==
                 row.key.substr(0, row.key.rfind('.')) &&
             other.sentence == row.about.sentence && other.details == row.about.details &&
             other.refused == row.about.refused && next.row.wanted() == row.wanted() &&
             other.also.empty() && row.about.also.empty() && other.stands_for.empty();
    };
    while (i + 1 < lines.size() && same(lines[i + 1])) {
      const auto& key = lines[++i].row.key;
      keys += fmt::format(", `{}`", key.substr(key.rfind('.') + 1));
    }
    text += fmt::format("| {} | {} | {} | {} | {} |\n", keys, row.wanted(), lines[i].none,
                        option_of(row), meaning_of(row.about));
  }
  return text;
}

/// Returns the table of sections in which no key acts. It has a line for each reason, with the last
/// parts of the keys.
std::string table_without_effect(const std::vector<std::vector<Line>>& sections) {
  std::string text =
      "## Sections without effect\nWarnings and errors do not mention a section that is switched "
      "off. `*` is every other key of the section.\n\n"
      "| section | keys | effect |\n|---|---|---|\n";
  for (const auto& lines : sections) {
    std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
    for (const auto& line : lines) {
      const auto meaning = meaning_of(line.row.about);
      auto reason = std::find_if(reasons.begin(), reasons.end(),
                                 [&](const auto& other) { return other.first == meaning; });
      if (reason == reasons.end()) reason = reasons.insert(reason, {meaning, {}});
      const auto key = line.row.key.substr(line.row.key.rfind('.') + 1);
      auto& keys = reason->second;
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
    for (const auto& [meaning, keys] : reasons)
      text += fmt::format("| `{}` | `{}` | {} |\n", section_of(lines.front().row.key),
                          fmt::join(keys, "`, `"), meaning);
  }
  return text + "\n";
}

/// Returns all lines that can be explained, with the full key and the type that has the parameter.
std::vector<std::pair<Line, std::string>> all_lines() {
  std::vector<std::pair<Line, std::string>> all;
  const auto add = [&](std::vector<Line> lines, const std::string& prefix, std::string_view whose) {
    for (auto& line : lines) {
      if (line.row.key.empty()) continue;
      line.row.key = prefix + line.row.key;
      all.emplace_back(std::move(line), whose);
    }
  };
  add(lines_of(settings(), Settings()), "", "");
  [&]<class... Chosen>(const std::variant<Chosen...>*) {
    (add(lines_of(hyper_parameters<Chosen>(), Chosen()), "optimizer.params.",
         write_optimizer(Chosen()).at("type").template get<std::string>()),
     ...);
  }(static_cast<const Optimizer*>(nullptr));
  for (const auto& params : schedule_tables())
    add(lines_of(params), params.prefix, params.title.substr(params.title.find(" of ") + 4));
  return all;
}

std::string effect_of(const Line& line) {
  const auto& about = line.row.about;
  if (!about.refused.empty())
    return fmt::format("An error if it is switched on: {}", about.refused);
  if (!about.stands_for.empty()) return fmt::format("Sets {}.", about.stands_for);
  if (!about.only.is_null()) return fmt::format("Any other value is an error: {}.", about.because);
  return line.acts ? "" : "Has no effect here.";
}

/// Returns the key, and lines that explain it.
std::string explanation_of(const Line& line) {
  const auto& about = line.row.about;
  std::string text = fmt::format("{}\n  {}.", line.row.key, about.sentence);
  if (!about.details.empty()) text += fmt::format(" {}", about.details);
  text += "\n";
  const auto add = [&](std::string_view name, std::string_view value) {
    if (!value.empty()) text += fmt::format("  {:<8} {}\n", name, value);
  };
  add("values", line.row.wanted());
  add("default", line.none);
  add("option", about.option);
  add("also", fmt::format("{}", fmt::join(about.also, ", ")));
  add("effect", effect_of(line));
  add("cost", about.cost.empty() && !line.acts ? "none" : about.cost);
  return text;
}

}  // namespace

std::string markdown() {
  std::string text;
  const auto all = lines_of(settings(), Settings());
  std::vector<std::string> sections;
  for (const auto& line : all) {
    if (line.row.key.empty()) continue;
    const auto section = section_of(line.row.key);
    if (std::find(sections.begin(), sections.end(), section) == sections.end())
      sections.push_back(section);
  }
  std::vector<std::vector<Line>> without_effect;
  for (const auto& section : sections) {
    std::vector<Line> here;
    for (const auto& line : all) {
      if (section_of(line.row.key) == section) here.push_back(line);
    }
    const bool acts = section.empty() || std::any_of(here.begin(), here.end(),
                                                     [](const Line& line) { return line.acts; });
    if (!acts) {
      without_effect.push_back(std::move(here));
      continue;
    }
    text += section.empty() ? "## Top level\n" : fmt::format("## `{}`\n", section);
    text += table(here) + "\n";
  }
  text += table_without_effect(without_effect);
  text.pop_back();
  optim::for_each_algorithm([&](const auto& kind) {
    using Chosen = std::remove_cvref_t<decltype(kind)>;
    const auto& first = optimizer_section<Chosen>().names.front();
    text += fmt::format(
        "\n## `optimizer.params` of {}\n{}", first.name,
        table(lines_of(hyper_parameters<Chosen>(), first.defaults), "optimizer.params."));
  });
  for (const auto& params : schedule_tables()) {
    const auto space = params.title.find(' ');
    text += fmt::format("\n## `{}`{}\n{}", params.title.substr(0, space),
                        params.title.substr(space), table(lines_of(params), params.prefix));
  }
  return text;
}

std::string explain(std::string_view key) {
  const auto all = all_lines();
  std::vector<size_t> found;
  const auto look = [&](auto&& fits) {
    if (!found.empty()) return;
    for (size_t i = 0; i < all.size(); ++i) {
      const auto& row = all[i].first.row;
      const auto names = names_of(row);
      const bool option = !row.about.option.empty() && row.about.option == key;
      if (option || std::any_of(names.begin(), names.end(), fits)) found.push_back(i);
    }
  };
  look([&](const std::string& name) { return name == key; });
  look([&](const std::string& name) { return name.ends_with("." + std::string(key)); });
  if (found.empty()) {
    std::vector<std::string> known;
    for (const auto& [line, whose] : all) {
      for (const auto& name : names_of(line.row)) {
        known.push_back(name);
        known.push_back(name.substr(name.rfind('.') + 1));
      }
    }
    throw ConfigError(fmt::format("There is no key '{}'.{}", key,
                                  key.size() <= 100 ? did_you_mean(key, known) : std::string()));
  }
  // Parameters that several types share are explained once.
  std::vector<std::pair<std::string, std::string>> blocks;  // the text, and the types that have it
  for (const auto i : found) {
    const auto& [line, whose] = all[i];
    const auto text = explanation_of(line);
    const auto same = std::find_if(blocks.begin(), blocks.end(),
                                   [&](const auto& block) { return block.first == text; });
    if (same == blocks.end()) {
      blocks.emplace_back(text, whose);
    } else {
      same->second += ", " + whose;
    }
  }
  std::string text;
  for (const auto& [block, whose] : blocks) {
    const auto head = block.find('\n');
    text += fmt::format("{}{}{}{}", text.empty() ? "" : "\n", block.substr(0, head),
                        whose.empty() ? "" : " of " + whose, block.substr(head));
  }
  return text;
}

}  // namespace zero::fields
