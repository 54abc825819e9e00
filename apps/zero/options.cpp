#include "apps/zero/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "zero/base/error.h"

namespace zero::app {
namespace {

/// Every option's names with their dashes, subcommands' included.
std::vector<std::string> known_options(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
    for (const auto& name : option->get_snames()) names.push_back("-" + name);
  }
  for (const auto* subcommand : app.get_subcommands({})) names.push_back(subcommand->get_name());
  return names;
}

CLI::Validator number_check(const char* name, const char* what, bool zero_will_do) {
  const auto check = [=](std::string& text) -> std::string {
    double number = 0;
    const bool fits =
        CLI::detail::lexical_cast(text, number) && (zero_will_do ? number >= 0 : number > 0);
    return fits ? "" : fmt::format("'{}' should be a number {}", text, what);
  };
  return {check, name};
}

}  // namespace

CLI::Validator positive() { return number_check("POSITIVE", "above 0", false); }
CLI::Validator not_negative() { return number_check("NONNEGATIVE", "of 0 or more", true); }

OptionParser::OptionParser(std::string name, std::string description)
    : CLI::App(std::move(description), "zero " + std::move(name)) {
  get_formatter()->column_width(34);
  get_formatter()->label("REQUIRED", "");
  option_defaults()->always_capture_default();
}

std::optional<int> OptionParser::read(const Arguments& arguments) {
  const CLI::App* innermost = this;
  try {
    parse(std::vector<std::string>(arguments.rbegin(),
                                   arguments.rend()));  // CLI11 takes them from the back
    return std::nullopt;
  } catch (const CLI::CallForHelp&) {
    for (const auto* chosen : get_subcommands()) innermost = chosen;
    fmt::print("{}", innermost->help(innermost == this ? "" : get_name()));
    return 0;
  } catch (const CLI::ExtrasError&) {
    for (const auto* chosen : get_subcommands()) innermost = chosen;
    auto unknown = remaining(true).front();
    if (unknown.starts_with("-")) unknown = unknown.substr(0, unknown.find('='));
    throw ConfigError(fmt::format("`{}` has no {} '{}'.{} See `{} --help`.", get_name(),
                                  unknown.starts_with("-") ? "option" : "argument", unknown,
                                  did_you_mean(unknown, known_options(*innermost)), get_name()));
  } catch (const CLI::ParseError& error) {
    throw ConfigError(
        fmt::format("{}: {}. See `{} --help`.", get_name(), error.what(), get_name()));
  }
}

}  // namespace zero::app
