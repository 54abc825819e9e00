// `zero train`: GPT-2 on tokens.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <csignal>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/ranks.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/config/fields.h"
#include "zero/train/resume.h"
#include "zero/train/trainer.h"

namespace zero::app {
namespace {

constexpr const char* kDescription =
    "Trains a GPT-2 with its optimizer states (--stage 1), gradients (2) and parameters (3) "
    "sharded over the ranks.\n\n"
    "  zero train --model gpt2-nano --data bible.txt --out run --nproc 2 --stage 3\n\n"
    "DIR gets log.jsonl (every step), model.safetensors (Hugging Face's names) and config.json. "
    "Ctrl-C stops after the\n"
    "step and keeps the weights; --resume goes on with the options of the run's checkpoint, but "
    "for "
    "those given anew.\n"
    "Under torchrun, mpirun or srun leave --nproc out. Every option may stand in a file "
    "(--config): "
    "DeepSpeed's keys\n"
    "for the engine and a section \"train\" for the rest; the command line comes first.";

using fields::Json;

/// What the command line says, which comes before what a file says.
struct CommandLine {
  std::string config_file;
  std::optional<int> nproc;
  /// The rows that each option stands for, with the value given.
  std::vector<std::pair<const fields::Field<Settings>*, Json>> values;
  /// Of options of the optimizer, whichever it is: the option and its value.
  std::vector<std::pair<std::string, std::string>> hyper_parameters;

  void apply(Settings& settings) const;
};

std::string type_name(const fields::Spec& row) {
  using fields::Kind;
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

/// A default as --help shows it; `value` is null where there is none.
std::string default_text(const fields::Spec& row, const Json& value) {
  for (const auto& [word, meaning] : row.about.words) {
    if (value == meaning) return std::string(word);
  }
  if (value.is_null()) return row.about.zero_is_none ? "0" : "";
  return value.is_string() ? value.dump().substr(1, value.dump().size() - 2) : fields::show(value);
}

/// The options of the table's rows. Several rows may have one option.
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
      option = parser.add_option_function<std::string>(name, read, description(row))
                   ->type_name(type_name(row))
                   ->default_str(default_text(row, row.get ? row.get(defaults) : Json()));
    }
    if (row.part == fields::Part::engine) option->group("Engine");
    if (row.part == fields::Part::model) option->group("Model");
    if (!row.about.replaced_by.empty()) option->group("");  // not in the help
  }
}

/// Those of the optimizers' rows.
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

void CommandLine::apply(Settings& settings) const {
  for (const auto& [row, value] : values) row->set(settings, value);
  auto optimizer = settings.engine.optimizer.value_or(Optimizer(train::kDefaultOptimizer));
  for (const auto& [option, text] : hyper_parameters) {
    std::visit([&](auto& chosen) { set_hyper_parameter(chosen, option, text); }, optimizer);
  }
  settings.engine.optimizer = optimizer;
  settings.validate();
}

/// Reads the command line. Returns an exit status where there is nothing left to do.
std::optional<int> read_command_line(const Arguments& arguments, CommandLine& line) {
  OptionParser parser("train", kDescription);
  parser.add_option("--config", line.config_file, "JSON file with any of these options")
      ->type_name("FILE");
  parser
      .add_option("-n,--nproc", line.nproc,
                  "Ranks to start on this host; 1 unless a launcher has started some")
      ->type_name("N");
  add_settings(parser, line);
  add_hyper_parameters<AdamW>(parser, line);
  add_hyper_parameters<Sgd>(parser, line);
  return parser.read(arguments);
}

/// The file with the command line's batch in it: its train_batch_size holds for both.
std::string with_batch(const std::string& text, const std::string& origin,
                       const CommandLine& line) {
  auto file = fields::parse_json(text, origin);
  for (const auto& [row, value] : line.values) {
    if (row->key == "train_micro_batch_size_per_gpu" || row->key == "gradient_accumulation_steps")
      fields::put(file, row->key, value);
  }
  return file.dump();
}

}  // namespace

int train(const Arguments& arguments) {
  CommandLine line;
  if (const auto status = read_command_line(arguments, line)) return *status;
  std::string origin = line.config_file;
  std::string text = origin.empty() ? "{}" : fields::read_text(origin);
  auto asked = fields::read_settings(fields::parse_json(text, origin), origin);
  for (const auto& [row, value] : line.values) row->set(asked, value);
  // A resumed run goes on as it was: the checkpoint's settings, the file's, the command line's.
  const train::RunFolder folder(asked.program.out);
  const auto saved = asked.program.resume ? train::saved_settings(folder) : std::nullopt;
  const auto ranks = choose_ranks(line.nproc, saved ? saved->ranks : 1);
  (void)Settings::parse(text, ranks.size(), origin);  // right by itself
  if (saved) {
    text = train::override_settings(saved->configuration, text);
    if (origin.empty()) origin = "The checkpoint";
  }
  auto settings = Settings::parse(with_batch(text, origin, line), ranks.size(), origin);
  line.apply(settings);
  // Of `zero train | tee log` a Ctrl-C ends tee too: the weights are saved all the same.
  std::signal(SIGPIPE, SIG_IGN);

  // One process checks, so that a mistake is told once.
  if (ranks.first()) train::check_run(settings, ranks.size());
  return run_on_ranks(ranks, {"train"}, arguments, [&](const std::shared_ptr<comm::Group>& group) {
    train::Trainer trainer(settings, group);
    return trainer.train() == 0 ? 0 : kInterrupted;
  });
}

}  // namespace zero::app
