// `zero config` checks a configuration file, and says what is in force and where it comes from.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "apps/zero/command_line.h"
#include "apps/zero/origins.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/config/fields.h"
#include "zero/train/run.h"

namespace zero::app {
namespace {

using fields::Json;

/// Adds the lines of `object`, each value with its origin as a comment.
void add_lines(std::vector<std::string>& lines, const Json& object, const std::string& path,
               const Origins& origins) {
  const std::string indent(2 * (1 + std::count(path.begin(), path.end(), '.')), ' ');
  size_t left = object.size();
  for (const auto& [key, value] : object.items()) {
    const char* comma = --left > 0 ? "," : "";
    const auto name = Json(key).dump();
    if (value.is_object() && !value.empty()) {
      lines.push_back(fmt::format("{}{}: {{", indent, name));
      add_lines(lines, value, path + key + ".", origins);
      lines.push_back(fmt::format("{}}}{}", indent, comma));
    } else {
      lines.push_back(fmt::format("{}{}: {}{}  // {}", indent, name,
                                  value.dump(-1, ' ', false, Json::error_handler_t::replace), comma,
                                  origins.of(path + key)));
    }
  }
}

/// Returns the file with the settings of the command line in place of its own.
std::string with_options(const CommandLine& line, const std::string& text) {
  if (line.values.empty()) return text;
  auto file = fields::parse_json(text, line.config_file);
  try {
    file = fields::with_present_names(file, line.config_file);
  } catch (const ConfigError&) {  // the check finds it again
  }
  return line.over(std::move(file)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Reads the settings as `zero train` does, and checks them as far as no data and no folder is
/// needed.
Settings read_settings(const CommandLine& line, const std::string& merged,
                       const ReadOptions& options) {
  auto settings = Settings::parse(merged, *line.nproc, line.config_file, options);
  line.apply(settings);
  train::check_options(settings);
  return settings;
}

/// Finds out what becomes of each key of the file and of the options.
std::vector<Finding> find_all(const CommandLine& line, const std::string& text) {
  const auto merged = with_options(line, text);
  auto findings = Settings::check(merged, *line.nproc, line.config_file, {.lenient = line.lenient});
  const auto is_refused = [](const Finding& finding) { return finding.effect == Effect::refused; };
  if (std::any_of(findings.begin(), findings.end(), is_refused)) return findings;
  try {
    const auto settings =
        read_settings(line, merged, {.lenient = line.lenient, .warn = [](std::string_view) {}});
    for (auto& sentence : line.without_effect(settings))
      findings.push_back({.effect = Effect::none, .text = std::move(sentence)});
  } catch (const ConfigError& error) {
    findings.push_back({.effect = Effect::refused, .text = error.what()});
  }
  return findings;
}

/// Prints what becomes of the keys. Returns the exit status.
int print_check(const std::vector<Finding>& findings) {
  const auto of = [&](std::initializer_list<Effect> effects) {
    std::vector<Finding> chosen;
    for (const auto& finding : findings) {
      if (std::find(effects.begin(), effects.end(), finding.effect) != effects.end())
        chosen.push_back(finding);
    }
    return chosen;
  };
  const auto print = [](std::string_view title, const std::vector<Finding>& chosen) {
    if (chosen.empty()) return;
    fmt::print("{}\n", title);
    for (const auto& line : fields::lines_of(chosen)) fmt::print("  {}\n", line);
  };
  print("acts", of({Effect::acts}));
  print("needs nothing here: it is so anyway, or the default", of({Effect::holds}));
  print("switched off", of({Effect::off}));
  print("has no effect here", of({Effect::none}));
  const auto refused = of({Effect::refused});
  print("refused", refused);
  return refused.empty() ? 0 : kUsage;
}

}  // namespace

int config(const Arguments& arguments) {
  OptionParser parser(
      "config",
      "Checks a configuration file and prints the settings in force with it (without a file the "
      "defaults), each with\nwhere it comes from. Files written for DeepSpeed can be read; "
      "docs/config.md explains every key. The options of\n`zero train` may be given too.");
  CommandLine line;
  line.nproc = 1;
  bool markdown = false;
  bool only_check = false;
  std::string key;
  parser.add_option("file", line.config_file, "JSON file with DeepSpeed's keys")->type_name("FILE");
  parser
      .add_option("-n,--nproc", line.nproc,
                  "Ranks, by which train_batch_size = micro-batch x accumulation x ranks")
      ->check(positive())
      ->type_name("N");
  parser.add_flag("--check", only_check,
                  "Say which keys act, which have no effect and which are refused; the exit status "
                  "is 2 where one is refused");
  parser.add_option("--explain", key, "Tell what a key does, its default and its cost")
      ->type_name("KEY");
  parser.add_flag("--markdown", markdown, "Print the tables of docs/config.md instead");
  line.add_to(parser);
  if (const auto status = parser.read(arguments)) return *status;
  if (markdown) {
    fmt::print("{}", fields::markdown());
    return 0;
  }
  if (!key.empty()) {
    fmt::print("{}", fields::explain(key));
    return 0;
  }
  const auto& file = line.config_file;
  const std::string text = file.empty() ? "{}" : fields::read_text(file);
  if (only_check) return print_check(find_all(line, text));
  const auto named = fields::with_present_names(fields::parse_json(text, file), file);
  const auto merged = line.over(named).dump(-1, ' ', false, Json::error_handler_t::replace);
  const auto settings = read_settings(line, merged, {.lenient = line.lenient});
  std::vector<std::string> lines;
  add_lines(lines, Json::parse(settings.dump()), "", Origins(named, line));
  fmt::print("{{\n{}\n}}\n", fmt::join(lines, "\n"));
  return 0;
}

}  // namespace zero::app
