// `zero train`: a language model on tokens.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "apps/zero/command_line.h"
#include "apps/zero/origins.h"
#include "apps/zero/ranks.h"
#include "apps/zero/subcommands.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/group.h"
#include "zero/comm/job.h"
#include "zero/config/fields.h"
#include "zero/planner/answer_text.h"
#include "zero/planner/here.h"
#include "zero/train/device.h"
#include "zero/train/planned_run.h"
#include "zero/train/resume.h"
#include "zero/train/trainer.h"

namespace zero::app {
namespace {

constexpr const char* kDescription =
    "Trains a language model with its optimizer states (--stage 1), gradients (2) and parameters "
    "(3) "
    "sharded over the ranks.\n\n"
    "  zero train --model gpt2-nano --data bible.txt --out run --nproc 2 --stage 3\n\n"
    "DIR gets log.jsonl (every step), model.safetensors (Hugging Face's names) and config.json. "
    "Ctrl-C stops after the\n"
    "step and keeps the weights; --resume goes on with the options of the run's checkpoint, but "
    "for those given\n"
    "anew. Under torchrun, mpirun or srun leave --nproc out. Every option may stand in a file "
    "(--config): DeepSpeed's\n"
    "keys for the engine and a section \"train\" for the rest; the command line comes first.";

/// Reads the command line. Returns an exit status where there is nothing left to do.
std::optional<int> read_command_line(const Arguments& arguments, CommandLine& line, bool& plans) {
  OptionParser parser("train", kDescription);
  parser.add_option("--config", line.config_file, "JSON file with any of these options")
      ->type_name("FILE");
  parser
      .add_option("-n,--nproc", line.nproc,
                  "Ranks to start on this host; 1 unless a launcher has started some")
      ->type_name("N");
  parser.add_flag(
      "--plan", plans,
      "Say what the run would take of this machine, beside other configurations, and do "
      "not train");
  line.add_to(parser);
  return parser.read(arguments);
}

void warn(std::string_view text) {
  // fmt::print would throw where nobody reads any more.
  std::fputs(fmt::format("zero: warning: {}\n", text).c_str(), stderr);
}

/// Returns the folder of the run that is meant, and how it is resumed. Other mistakes of the
/// file are told once it is whole, with the command line in it.
struct Asked {
  ProgramSettings program{};
  bool batch = false;  ///< other batches than the checkpoint's, perhaps
};

Asked run_asked_for(const CommandLine& line, const std::string& text, const std::string& origin) {
  const auto given =
      line.over(fields::with_present_names(fields::parse_json(text, origin), origin));
  Asked asked;
  const auto text_of = [&](const char* key, std::string& value) {
    const auto* found = fields::look_up(given, key);
    if (found != nullptr && found->is_string()) value = found->get<std::string>();
  };
  text_of("train.out", asked.program.out);
  text_of("train.resume_from", asked.program.resume_from);
  const auto flag = [&](const char* key) {
    const auto* found = fields::look_up(given, key);
    return found != nullptr && *found == true;
  };
  asked.program.resume = flag("train.resume");
  asked.program.overwrite = flag("train.overwrite");
  for (const char* key :
       {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    const auto* found = fields::look_up(given, key);
    asked.batch = asked.batch || (found != nullptr && found->is_number());
  }
  return asked;
}

/// Returns how many ranks the job had at first, or 0 where the launcher does not say.
int ranks_at_first() {
  const auto text = comm::environment_variable(comm::kFirstRanksVariable).value_or("0");
  int ranks = 0;
  std::from_chars(text.data(), text.data() + text.size(), ranks);
  return ranks;
}

std::string dump(const fields::Json& json) {
  return json.dump(-1, ' ', false, fields::Json::error_handler_t::replace);
}

/// Returns the plan of a run on `hosts` hosts like this one, which is measured first, together with
/// the others.
train::PlannedRun plan_here(const Settings& settings, int ranks, int hosts = 1,
                            const plan::Link& network = {}, const plan::OfHosts& together = {}) {
  if (settings.program.threads && !together)
    at::set_num_threads(static_cast<int>(*settings.program.threads));
  const auto machines = [&](const Config& config) {
    auto cluster = plan::measured_here(ranks / hosts, config.nvme_folders(), together);
    if (hosts > 1) {
      cluster.hosts = hosts;
      cluster.between = network;
    }
    return cluster;
  };
  return train::plan_run(settings, ranks, hosts, machines, together);
}

void print_plan(const Settings& settings, const train::PlannedRun& planned) {
  const auto& [model, question, run, answer, notes] = planned;
  fmt::print("{}\n{}\nThis run:\n{}\n{}", plan::title(model, question, answer),
             plan::here_text(question.cluster), plan::table_text({run}, 1),
             plan::memory_text(run, "it"));
  for (const auto& note : notes) fmt::print("{}\n", note);
  if (run.fits()) {
    fmt::print("Its {} steps take {} by these speeds.\n", settings.program.steps,
               plan::duration(static_cast<double>(settings.program.steps) * run.time.seconds));
  } else {
    fmt::print("It does not fit: it {}.\n", plan::verdict(run));
  }
  constexpr size_t kRows = 6;
  fmt::print("\nSteps of as many sequences:\n{}\n{}{}", plan::table_text(answer.candidates, kRows),
             plan::sentences_text(answer), plan::bounds_text(answer.bounds));
}

/// Plans a run whose ranks a launcher has started on several hosts, and prints the plan on the
/// first rank. Collective.
void plan_on_hosts(const Settings& settings, comm::Group& group) {
  // All ranks measure with as many threads.
  const auto threads = comm::gather_records(
      group, settings.program.threads.value_or(at::get_num_threads()), "threads");
  at::set_num_threads(static_cast<int>(std::ranges::min(threads)));
  const auto network = plan::measured_network(group);
  // The first rank of each host measures for its host's ranks, at the same time as the others.
  std::optional<train::PlannedRun> planned;
  plan::measure_together(group, [&](const plan::OfHosts& together) {
    planned = plan_here(settings, group.size(), group.topology().hosts, network, together);
  });
  if (group.rank() == 0) print_plan(settings, *planned);
}

/// Gives `file` the micro-batches with which a step has as many samples on `ranks` as the
/// configuration `meant` has on `first`. Throws ConfigError where no number of them does.
void keep_batch(fields::Json& file, const fields::Json& meant, int first, int ranks) {
  const auto whole =
      Settings::parse(dump(meant), first, "", {.lenient = true, .warn = [](std::string_view) {}});
  const auto kept = fields::Json::parse(train::keep_global_batch({whole.dump(), first}, ranks));
  fields::remove(file, "train_batch_size");
  for (const char* key : {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    if (kept.contains(key)) fields::put(file, key, kept.at(key));
  }
}

}  // namespace

int train(const Arguments& arguments) {
  CommandLine line;
  bool plans = false;
  if (const auto status = read_command_line(arguments, line, plans)) return *status;
  std::string origin = line.config_file;
  std::string text = origin.empty() ? "{}" : fields::read_text(origin);
  // A resumed run goes on as it was: the checkpoint's settings, the file's, the command line's.
  auto asked = run_asked_for(line, text, origin);
  const auto file_given = fields::with_present_names(fields::parse_json(text, origin), origin);
  const auto as_given = line.over(file_given);
  const CommandLine line_given = line;
  const auto jobs = comm::launched_jobs();
  const bool restarted = std::ranges::any_of(jobs, &comm::LaunchedJob::restarted);
  const auto resume = train::with_auto_resume(asked.program, jobs);
  asked.program = resume;
  if (train::continues(asked.program)) train::RunFolder(asked.program.out).check(false, true);
  std::optional<train::Source> source;
  if (asked.program.resume) source = train::find_checkpoint(asked.program);
  const auto saved = source ? train::saved_settings(*source) : std::nullopt;
  const auto ranks = choose_ranks(line.nproc, saved ? saved->ranks : 1);
  std::jthread reading;
  // A run with copies in memory mostly goes on from those.
  std::error_code ignored;
  const bool has_copies = MemoryCopies::launcher_folder() &&
                          std::filesystem::exists(train::memory_folder(asked.program), ignored);
  if (source && ranks.launched() && !has_copies && !plans)
    reading = train::read_ahead(*source, ranks.rank(), ranks.size());
  // The process that only starts the others leaves warnings to the first of them.
  const bool tells = ranks.first() && (plans || ranks.launched() || ranks.size() == 1);
  const auto tell = [&](std::string_view warning) {
    if (tells) warn(warning);
  };
  if (saved) {
    const auto configuration =
        asked.batch ? saved->configuration : train::keep_global_batch(*saved, ranks.size());
    text = train::override_settings(configuration, text, origin);
    // The checkpoint also has the values that the section of the command line leaves out.
    for (auto& [row, value] : line.values) {
      if (row->key != "optimizer") continue;
      const auto given = dump({{row->key, value}});
      value = fields::Json::parse(train::override_settings(configuration, given, "--optimizer"))
                  .at(row->key);
    }
    if (origin.empty()) origin = "The checkpoint";
  }
  auto file = line.over(fields::with_present_names(fields::parse_json(text, origin), origin));
  // A job that was started again has steps of as many samples as before. If no checkpoint of its
  // own says how many, the command line does, for the ranks that the job had at first.
  // With --nproc a launcher of one rank says nothing about the ranks that this program starts.
  const int first_ranks = line.nproc && !ranks.launched() ? 0 : ranks_at_first();
  const bool own = saved && train::is_started_again(train::RunFolder(asked.program.out), jobs);
  const bool kept = own || (restarted && first_ranks > 0 && first_ranks != ranks.size() &&
                            (asked.batch || !saved));
  if (own) {
    keep_batch(file, fields::Json::parse(saved->configuration), saved->ranks, ranks.size());
  } else if (kept) {
    const auto meant =
        saved ? line.over(fields::with_present_names(fields::parse_json(text, origin), origin))
              : as_given;
    keep_batch(file, meant, first_ranks, ranks.size());
  }
  auto settings =
      Settings::parse(dump(file), ranks.size(), origin, {.lenient = line.lenient, .warn = tell});
  line.apply(settings);
  if (kept) {
    settings.engine.gradient_accumulation_steps =
        file.value("gradient_accumulation_steps", int64_t{1});
  }
  settings.program.resume = resume.resume;
  settings.program.resume_from = resume.resume_from;
  settings.program.overwrite = resume.overwrite;
  for (const auto& sentence : line.without_effect(settings)) tell(sentence);
  if (plans) {
    if (ranks.across_hosts()) {
      return run_on_ranks(ranks, {"train"}, arguments,
                          [&](const std::shared_ptr<comm::Group>& group) {
                            plan_on_hosts(settings, *group);
                            return 0;
                          });
    }
    if (ranks.first()) print_plan(settings, plan_here(settings, ranks.size()));
    return 0;
  }
  // A Ctrl-C at `zero train | tee log` ends tee too; the weights are saved all the same.
  std::signal(SIGPIPE, SIG_IGN);

  // One process checks, so that a mistake is told once.
  if (ranks.first()) train::check_run(settings, ranks.size());
  return run_on_ranks(ranks, {"train"}, arguments, [&](const std::shared_ptr<comm::Group>& host) {
    const auto group = train::on_training_device(host, settings.program.device,
                                                 settings.program.through_host, warn);
    const Origins origins(file_given, line_given,
                          saved ? fields::Json::parse(saved->configuration) : fields::Json());
    std::vector<std::unique_ptr<train::Monitor>> monitors;
    monitors.push_back(origins_monitor(train::RunFolder(settings.program.out).log(), origins));
    train::Trainer trainer(settings, group, std::move(monitors));
    return trainer.train() == 0 ? 0 : kInterrupted;
  });
}

}  // namespace zero::app
