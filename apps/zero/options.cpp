#include "apps/zero/options.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/architectures.h"
#include "zero/planner/hardware.h"

namespace zero::app {
namespace {

/// Returns the names of all options with their dashes, and those of subcommands.
std::vector<std::string> known_options(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
    for (const auto& name : option->get_snames()) names.push_back("-" + name);
  }
  for (const auto* subcommand : app.get_subcommands({})) names.push_back(subcommand->get_name());
  return names;
}

/// `fits` is asked about numbers that are finite.
template <class Fits>
CLI::Validator number_check(const std::string& name, const std::string& what, const Fits& fits) {
  const auto check = [=](std::string& text) -> std::string {
    double number = 0;
    const bool good =
        CLI::detail::lexical_cast(text, number) && std::isfinite(number) && fits(number);
    return good ? "" : fmt::format("'{}' should be a number {}", text, what);
  };
  return {check, name};
}

/// Throws ConfigError where an option that takes one value, or none, is given twice.
void refuse_repetition(const CLI::Option& option, const std::string& program) {
  const auto& given = option.results();
  const bool takes_several = option.get_items_expected_max() > 1 ||
                             option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  if (takes_several || given.size() < 2) return;
  const bool bare = std::ranges::all_of(given, [](const auto& each) { return each.empty(); }) ||
                    option.get_items_expected_max() == 0;  // without values
  throw ConfigError(fmt::format(
      "{}: {} is given {} times{}; give it once.", program, option.get_name(), given.size(),
      bare ? std::string() : fmt::format(" ({})", fmt::join(given, ", "))));
}

}  // namespace

CLI::Validator positive() {
  return number_check("POSITIVE", "above 0", [](double number) { return number > 0; });
}
CLI::Validator not_negative() {
  return number_check("NONNEGATIVE", "of 0 or more", [](double number) { return number >= 0; });
}
CLI::Validator between(double least, double most) {
  return number_check(fmt::format("FLOAT in [{} - {}]", least, most),
                      fmt::format("from {} to {}", least, most),
                      [=](double number) { return number >= least && number <= most; });
}

void add_base_format(OptionParser& parser, BaseFormat& format) {
  std::map<std::string, BaseFormat> formats;
  for (const auto& [name, each] : kBaseFormats) formats.emplace(name, each);
  parser
      .add_option_function<std::string>(
          "--lora-quantize-base",
          [&format, formats](const auto& name) { format = formats.at(name); },
          "Quantise the weights of linear layers first, as the adapter's run did: nf4, int8, or "
          "none")
      ->type_name("FORMAT")
      ->check(CLI::IsMember(formats));
}

double quantity(const char* option, const std::string& text, Quantity what) {
  if (text.empty()) return 0;
  std::string_view rest = text;
  const auto ends_with = [&](std::string_view suffix) {
    if (!rest.ends_with(suffix)) return false;
    rest.remove_suffix(suffix.size());
    return true;
  };
  ends_with("/s");
  double scale = 1;
  if (what == Quantity::flops) {
    if (!ends_with("FLOPS")) ends_with("FLOP");
  } else if (what == Quantity::count) {
    if (ends_with("B")) scale = 1e9;
  } else if (ends_with("bit")) {
    scale = 1.0 / 8;
  } else {
    ends_with("B");
  }
  for (const auto& [prefix, power] :
       {std::pair{"k", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}, {"P", 1e15}}) {
    if (!ends_with(prefix)) continue;
    scale *= power;
    break;
  }
  double number = 0;
  if (!CLI::detail::lexical_cast(std::string(rest), number) || !std::isfinite(number) ||
      !(number > 0)) {
    throw ConfigError(fmt::format(
        "{} is '{}'; it should be a number above 0 with k, M, G, T or P, as {}.", option, text,
        what == Quantity::flops   ? "50T"
        : what == Quantity::count ? "300G"
                                  : "16GB/s or 10Gbit"));
  }
  return number * scale;
}

double speed(const char* option, const std::string& text, Quantity what) {
  const double value = quantity(option, text, what);
  const bool flops = what == Quantity::flops;
  const bool unit =
      text.find(flops ? "FLOP" : "B") != std::string::npos || text.find("bit") != std::string::npos;
  if (text.empty() || unit || value >= plan::kLeastSpeed) return value;
  throw ConfigError(
      fmt::format("{0} is '{1}', which is {2:.6g} {3} a second without a unit, and less than "
                  "{4:.0f} million is "
                  "hardly meant. Give a unit, as {0} {5}.",
                  option, text, value, flops ? "FLOPs" : "bytes", plan::kLeastSpeed * 1e-6,
                  flops ? "800T" : "10Gbit/s or 10GB/s"));
}

std::unique_ptr<LanguageModelConfig> model_for_sequences(const std::string& model, int64_t seq) {
  auto sizes = language_model_config(model);
  if (seq <= sizes->context()) return sizes;
  throw ConfigError(fmt::format("--seq is {}, but the model {} takes at most {} tokens.", seq,
                                model, sizes->context()));
}

OptionParser::OptionParser(std::string name, std::string description, const std::string& program)
    : CLI::App(std::move(description), program + " " + std::move(name)) {
  get_formatter()->column_width(34);
  get_formatter()->label("REQUIRED", "");
  option_defaults()->always_capture_default();
}

void OptionParser::show_in_help_all(CLI::Option* option) {
  if (rare_.empty()) {
    set_help_all_flag("--help-all", "Print all options and exit");
    footer(fmt::format("`{} --help-all` has the rest of the options.", get_name()));
  }
  rare_.push_back(option);
}

std::optional<int> OptionParser::read(const Arguments& arguments) {
  const auto innermost = [this] {
    const CLI::App* app = this;
    for (const auto* chosen : get_subcommands()) app = chosen;
    return app;
  };
  try {
    // CLI11 takes them from the back.
    parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    for (const auto* option : innermost()->get_options()) refuse_repetition(*option, get_name());
    return std::nullopt;
  } catch (const CLI::CallForAllHelp&) {
    footer("");
    fmt::print("{}", help());
    return 0;
  } catch (const CLI::CallForHelp&) {
    for (auto* option : rare_) option->group("");  // CLI11 leaves options without a group out
    const auto* app = innermost();
    fmt::print("{}", app->help(app == this ? "" : get_name()));
    return 0;
  } catch (const CLI::ExtrasError&) {
    auto unknown = remaining(true).front();
    if (unknown.starts_with("-")) unknown = unknown.substr(0, unknown.find('='));
    throw ConfigError(fmt::format("`{}` has no {} '{}'.{} See `{} --help`.", get_name(),
                                  unknown.starts_with("-") ? "option" : "argument", unknown,
                                  did_you_mean(unknown, known_options(*innermost())), get_name()));
  } catch (const CLI::ParseError& error) {
    for (const auto* option : innermost()->get_options()) refuse_repetition(*option, get_name());
    throw ConfigError(
        fmt::format("{}: {}. See `{} --help`.", get_name(), error.what(), get_name()));
  }
}

int report(const std::exception& error) {
  std::string message = error.what();
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) {
    message =
        torch->what_without_backtrace();  // its first line says what; the rest is a stack trace
    message = message.substr(0, message.find('\n'));
  }
  std::fflush(stdout);
  if (isatty(STDERR_FILENO) == 1) std::fputs("\r\033[K", stderr);  // another rank's progress bar
  // fmt::print would throw where nobody reads any more.
  std::fputs(fmt::format("zero: error: {}\n", message).c_str(), stderr);
  return dynamic_cast<const ConfigError*>(&error) ? kUsage : kFailed;
}

}  // namespace zero::app
