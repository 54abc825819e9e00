// DeepSpeed's sections of what `zero train` measures and reports beside its log:
// zero/train/monitors.h.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "zero/base/error.h"
#include "zero/config/rows.h"

namespace zero::fields {

namespace {

/// The section of one that writes files into a folder. `option` stands for all of it.
void add_files(All& all, MonitorSettings ProgramSettings::*monitor, const std::string& section,
               std::string_view option, std::string_view what, std::string_view details) {
  Rows rows(all, Part::program, section, &Settings::program, monitor);
  rows.add("enabled",
           {.sentence = what,
            .details = details,
            .option = option,
            .argument = "DIR",
            .by_option = true},
           &MonitorSettings::enabled);
  rows.add("output_path",
           {.sentence = "Folder in which `job_name` is; empty: the run's (`train.out`)",
            .details = "DeepSpeed: where it is started.",
            .option = option},
           &MonitorSettings::output_path);
  rows.add("job_name",
           {.sentence = "Folder of the files; empty: `output_path` itself",
            .details = "The option leaves it empty. The folder is of one run: another is refused "
                       "there, unless it continues or replaces that run (`train.resume`, "
                       "`train.overwrite`).",
            .option = option,
            .by_option = ""},
           &MonitorSettings::job_name);
}

/// Throws ConfigError where no collective is called so, here or in DeepSpeed.
void check_collective(const std::string& name) {
  constexpr std::array<std::string_view, 6> kHere{"all_gather", "reduce_scatter", "all_reduce",
                                                  "broadcast",  "all_to_all",     "control"};
  constexpr std::array<std::string_view, 8> kOfDeepSpeed{
      "reduce", "send", "recv", "isend", "irecv", "gather", "scatter", "inference_all_reduce"};
  const bool here = std::any_of(kHere.begin(), kHere.end(),
                                [&](std::string_view known) { return name.starts_with(known); });
  const bool there =
      std::find(kOfDeepSpeed.begin(), kOfDeepSpeed.end(), name) != kOfDeepSpeed.end();
  if (here || there || name.ends_with("barrier")) return;
  throw ConfigError(fmt::format(
      "comms_logger.prof_ops holds \"{}\", which is no collective. They are \"all_gather\", "
      "\"reduce_scatter\", \"all_reduce\", \"broadcast\", \"all_to_all\" and \"control\".",
      name));
}

void add_comms_logger(All& all) {
  Rows rows(all, Part::program, "comms_logger", &Settings::program, &ProgramSettings::comms_logger);
  rows.add("enabled",
           {.sentence = "Print how long collectives take, by kind and size of message, at the end",
            .details = "And write it to log.jsonl: docs/profiling.md. Of rank 0.",
            .option = "--comms-logger"},
           &CommsLogger::enabled);
  rows.add("verbose", {.sentence = "Print each call too"}, &CommsLogger::verbose);
  rows.add("prof_all", {.sentence = "Time every collective; else those in `prof_ops`"},
           &CommsLogger::prof_all);
  rows.add("debug",
           {.sentence = "`verbose` names what a call is for: a unit of parameters",
            .details = "DeepSpeed: the function that called."},
           &CommsLogger::debug);
  rows.accept<std::vector<Json>>(
      {"prof_ops"},
      {.sentence = "Collectives, where `prof_all` is false",
       .details = "\"all_gather\", \"reduce_scatter\", \"all_reduce\", \"broadcast\", "
                  "\"all_to_all\", \"control\" (\"barrier\"), and DeepSpeed's names "
                  "that begin so (\"all_gather_into_tensor\")."});
  all.back().set = [](Settings& root, const Json& list) {
    auto& chosen = root.program.comms_logger.prof_ops;
    chosen.clear();
    for (const auto& op : list) {
      if (!op.is_string()) {
        throw ConfigError(fmt::format(
            "comms_logger.prof_ops holds {}; it must be an array of names, as \"all_gather\".",
            op.dump()));
      }
      chosen.push_back(op.get<std::string>());
      check_collective(chosen.back());
    }
  };
  all.back().get = [](const Settings& root) { return Json(root.program.comms_logger.prof_ops); };
}

/// `zero train` wrote runs for Weights & Biases itself once; the option says what to do instead.
void add_wandb_option(All& all) {
  all.push_back(accepted<Settings, std::string>(
      "", {.sentence = "Write a run for Weights & Biases",
           .option = "--wandb",
           .replaced_by = "--tensorboard DIR: `wandb sync DIR` sends the event files there"}));
  all.back().part = Part::program;
}

void add_flops_profiler(All& all) {
  using Profiler = FlopsProfilerSettings;
  Rows rows(all, Part::program, "flops_profiler", &Settings::program,
            &ProgramSettings::flops_profiler);
  rows.add("enabled",
           {.sentence = "Count one step's FLOPs by module, and report them to the console or FILE",
            .details = "With times, and the part of what the machine's matrix products reach. The "
                       "numbers are in log.jsonl too.",
            .option = "--flops-profiler",
            .argument = "FILE",
            .alone = true,
            .by_option = true,
            .cost = "The step that is counted takes a little longer; the others do not."},
           &Profiler::enabled);
  rows.add("profile_step",
           {.sentence = "Steps before the one that is counted",
            .details = "DeepSpeed's too: it calls the first step 0. They are those of this start, "
                       "also where a run is resumed; of a shorter run the last step is counted."},
           &Profiler::profile_step);
  rows.add(
      "module_depth",
      {.sentence = "How deep the report goes into the modules; -1: to the innermost", .least = -1},
      &Profiler::module_depth);
  rows.add("top_modules",
           {.sentence = "Modules of each depth that are named as the largest", .least = 1},
           &Profiler::top_modules);
  rows.add("detailed",
           {.sentence = "The report has a table of all modules",
            .details = "Else totals and the "
                       "largest alone."},
           &Profiler::detailed);
  rows.add("output_file",
           {.sentence = "File of the report, in place of what is there; empty: the console",
            .details = "With a file the console has the totals.",
            .option = "--flops-profiler"},
           &Profiler::output_file);
  rows.add("recompute_fwd_factor",
           {.sentence = "Part of forward that backward does again, for its FLOPs",
            .details = "1 where every layer is recomputed (`activation_checkpointing`).",
            .least = 0},
           &Profiler::recompute_fwd_factor);
}

}  // namespace

void add_monitors(All& all) {
  add_comms_logger(all);
  add_files(all, &ProgramSettings::tensorboard, "tensorboard", "--tensorboard",
            "Write event files for TensorBoard to this folder",
            "By samples under DeepSpeed's names, by steps all that a step of log.jsonl has; the "
            "configuration and the sample as texts.");
  add_files(all, &ProgramSettings::csv_monitor, "csv_monitor", "--csv",
            "Write a CSV file for each number of a step to this folder",
            "With DeepSpeed's names and columns.");
  add_wandb_option(all);
  add_flops_profiler(all);
}

}  // namespace zero::fields
