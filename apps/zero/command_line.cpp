#include "apps/zero/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <variant>

#include "zero/base/error.h"
#include "zero/train/trainer.h"

namespace zero::app {
namespace {

using fields::Json;

std::string type_name(const fields::Spec& row) {
  using fields::Kind;
  if (row.about.alone) return fmt::format("[{}]", row.about.argument);
  if (!row.about.argument.empty()) return std::string(row.about.argument);
  if (row.kind == Kind::bytes) return "BYTES";
  if (row.kind == Kind::integer) return "INT";
  if (row.kind == Kind::number) return "FLOAT";
  return "TEXT";
}

std::string description(const fields::Spec& row) {
  std::string text = row.about.option.starts_with("--no-") ? "Without it: " : "";
  text += row.about.sentence;
  std::vector<std::string> words = row.choices;
  for (const auto& [word, value] : row.about.words) words.emplace_back(word);
  if (!words.empty() && text.find("none") == std::string::npos)
    text += fmt::format(" ({})", fmt::join(words, ", "));
  return text;
}

/// Returns a default as --help shows it; `value` is null where there is none.
std::string default_text(const fields::Spec& row, const Json& value) {
  if (!row.about.by_option.is_null()) return "";
  for (const auto& [word, meaning] : row.about.words) {
    if (value == meaning) return std::string(word);
  }
  if (value.is_null()) return row.about.zero_is_none ? "0" : "";
  return value.is_string() ? value.dump().substr(1, value.dump().size() - 2) : fields::show(value);
}

/// Adds the options of the table's rows. Several rows may have one option.
void add_settings(OptionParser& parser, CommandLine& line) {
  Settings defaults;
  defaults.program.micro_batch_size = train::kDefaultMicroBatch;
  for (const auto& row : fields::settings()) {
    const std::string name(row.about.option);
    if (name.empty()) continue;
    if (parser.get_option_no_throw(name) != nullptr) continue;
    const auto take = [&line, name](const auto& value_of) {
      for (const auto& other : fields::settings()) {
        if (other.about.option == name) line.values.emplace_back(&other, value_of(other));
      }
    };
    CLI::Option* option = nullptr;
    if (row.is_flag()) {
      option = parser.add_flag_callback(
          name,
          [take, value = Json(!name.starts_with("--no-"))] {
            take([&](const fields::Spec&) { return value; });
          },
          description(row));
    } else {
      const auto read = [take](const std::string& text) {
        take([&](const fields::Spec& other) { return other.from_option(text); });
      };
      const auto read_all = [take](const std::vector<std::string>& texts) {
        take([&](const fields::Spec& other) {
          return other.normalize(Json(texts), other.about.option);
        });
      };
      option = (row.kind == fields::Kind::texts
                    ? parser
                          .add_option_function<std::vector<std::string>>(name, read_all,
                                                                         description(row))
                          ->allow_extra_args(false)
                    : parser.add_option_function<std::string>(name, read, description(row)))
                   ->type_name(type_name(row))
                   ->default_str(default_text(row, row.get ? row.get(defaults) : Json()));
      if (row.about.alone) option->expected(0, 1);
    }
    if (row.part == fields::Part::engine) option->group("Engine");
    if (row.part == fields::Part::model) option->group("Model");
    if (!row.about.replaced_by.empty()) option->group("");  // in no help
    if (!row.about.common) parser.show_in_help_all(option);
  }
}

/// Adds the options of an optimizer's rows.
template <class Chosen>
void add_hyper_parameters(OptionParser& parser, CommandLine& line) {
  const Optimizer defaults = train::kDefaultOptimizer;
  const auto* shown = std::get_if<Chosen>(&defaults);
  for (const auto& row : fields::hyper_parameters<Chosen>()) {
    const std::string name(row.about.option);
    if (name.empty() || parser.get_option_no_throw(name) != nullptr) continue;
    auto* option = parser.add_option_function<std::string>(
        name,
        [&line, name, &row](const std::string& text) {
          (void)row.from_option(text);
          line.hyper_parameters.emplace_back(name, text);
        },
        description(row));
    option->type_name(type_name(row))->group("Optimizer");
    if (!row.about.common) parser.show_in_help_all(option);
    if (shown != nullptr) option->default_str(default_text(row, row.get(*shown)));
  }
}

template <class Chosen>
void set_hyper_parameter(Chosen& optimizer, const std::string& option, const std::string& text) {
  for (const auto& row : fields::hyper_parameters<Chosen>()) {
    if (row.about.option != option) continue;
    row.set(optimizer, row.from_option(text));
    return;
  }
  throw ConfigError(
      fmt::format("{} is not an option of the optimizer that the configuration names.", option));
}

}  // namespace

void CommandLine::add_to(OptionParser& parser) {
  parser.show_in_help_all(
      parser.add_flag("--lenient", lenient,
                      "Pass over what the file asks for and libzero does not have, and unknown "
                      "keys, with a warning"));
  add_settings(parser, *this);
  // An option is added once, for the first optimizer that has it.
  [&]<class... Chosen>(const std::variant<Chosen...>*) {
    (add_hyper_parameters<Chosen>(parser, *this), ...);
  }(static_cast<const Optimizer*>(nullptr));
}

Json CommandLine::over(Json file) const {
  if (!file.is_object()) return file;  // which is refused where it is read
  const auto given = [&](std::string_view option) {
    return std::any_of(values.begin(), values.end(),
                       [&](const auto& value) { return value.first->about.option == option; });
  };
  // The program's schedule comes in place of the file's section, and a section of the command line
  // in place of the file's schedule.
  if (given("--schedule")) fields::remove(file, "scheduler");
  if (given("--scheduler")) {
    for (const char* key : {"train.min_lr", "train.decay_steps"}) fields::remove(file, key);
  }
  for (const auto& [row, value] : values) {
    const auto section = file.find(row->key.substr(0, row->key.find('.')));
    const bool in_section = row->key.find('.') != std::string::npos && section != file.end();
    if (in_section && !section->is_object() && !fields::is_default(*section)) continue;  // the same
    fields::put(file, row->key, value);
  }
  return file;
}

std::vector<std::string> CommandLine::without_effect(const Settings& settings) const {
  std::vector<std::string> sentences;
  if (!settings.scheduler) return sentences;
  const auto* cycle = std::get_if<optim::DeepSpeedOneCycle>(&*settings.scheduler);
  if (cycle != nullptr && cycle->cycle_momentum && settings.engine.optimizer &&
      !train::has_betas(*settings.engine.optimizer)) {
    sentences.emplace_back(
        "scheduler.params.cycle_momentum has no effect: the optimizer has no betas.");
  }
  const bool gives_rate = std::any_of(hyper_parameters.begin(), hyper_parameters.end(),
                                      [](const auto& given) { return given.first == "--lr"; });
  if (gives_rate && optim::ignores_optimizer_rate(*settings.scheduler))
    sentences.emplace_back("--lr has no effect: the section scheduler says all rates.");
  return sentences;
}

void CommandLine::apply(Settings& settings) const {
  for (const auto& [row, value] : values) row->set(settings, value);
  if (!hyper_parameters.empty()) {
    auto optimizer = settings.engine.optimizer.value_or(Optimizer(train::kDefaultOptimizer));
    for (const auto& given : hyper_parameters) {
      std::visit([&](auto& chosen) { set_hyper_parameter(chosen, given.first, given.second); },
                 optimizer);
    }
    settings.engine.optimizer = optimizer;
  }
  settings.validate();
}

}  // namespace zero::app
