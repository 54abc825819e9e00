// `zero config`: checks a configuration file, and says what is in force and where it comes from.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "apps/zero/command_line.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/config/fields.h"

namespace zero::app {
namespace {

using fields::Json;

/// Where the values in force come from.
class Origins {
 public:
  Origins(Json file, const CommandLine& line) : file_(std::move(file)), line_(line) {
    for (const auto& [row, value] : line.values) fields::put(given_, row->key, value);
  }

  std::string of(const std::string& key) const {
    const auto* given = fields::look_up(given_, key);
    if (given != nullptr || said(key)) return "command line";
    if (stands(key)) return "file";
    const bool batch =
        key == "train_micro_batch_size_per_gpu" || key == "gradient_accumulation_steps";
    if (batch && stands("train_batch_size")) return "file, by train_batch_size";
    return "default";
  }

 private:
  bool stands(const std::string& key) const {
    const auto* value = fields::look_up(file_, key);
    return value != nullptr && !fields::is_default(*value);
  }
  /// By an option of the optimizer.
  bool said(const std::string& key) const {
    constexpr std::string_view kParams = "optimizer.params.";
    if (!key.starts_with(kParams)) return false;
    for (const auto& [option, value] : line_.hyper_parameters) {
      if (fields::stands_for_parameter(option, std::string_view(key).substr(kParams.size())))
        return true;
    }
    return false;
  }

  Json file_;
  const CommandLine& line_;
  Json given_ = Json::object();
};

/// The lines of `object`, each value with its origin as a comment.
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

/// The file with what the command line says in its place.
std::string with_options(const CommandLine& line, const std::string& text) {
  if (line.values.empty()) return text;
  auto file = fields::parse_json(text, line.config_file);
  try {
    file = fields::with_present_names(file, line.config_file);
  } catch (const ConfigError&) {  // what is wrong is among what the check finds
  }
  return line.over(std::move(file)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// What becomes of the file's keys, and the exit status.
int check(const std::string& text, int ranks, const std::string& file, bool lenient) {
  const auto findings = Settings::check(text, ranks, file, {.lenient = lenient});
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
                  "Tell what of the file acts, what has no effect and what is refused; the exit "
                  "status is 2 where something is");
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
  if (only_check) return check(with_options(line, text), *line.nproc, file, line.lenient);
  const auto named = fields::with_present_names(fields::parse_json(text, file), file);
  const auto merged = line.over(named).dump(-1, ' ', false, Json::error_handler_t::replace);
  auto settings = Settings::parse(merged, *line.nproc, file, {.lenient = line.lenient});
  line.apply(settings);
  std::vector<std::string> lines;
  add_lines(lines, Json::parse(settings.dump()), "", Origins(named, line));
  fmt::print("{{\n{}\n}}\n", fmt::join(lines, "\n"));
  return 0;
}

}  // namespace zero::app
