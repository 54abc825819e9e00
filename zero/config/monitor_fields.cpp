// DeepSpeed's sections for the measurements and reports that `zero train` makes besides its log:
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

/// Adds the section of a monitor that writes files into a folder. `option` stands for all of it.
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
           {.sentence = "Folder that contains `job_name`; empty: the run's folder (`train.out`)",
            .details = "In DeepSpeed empty means the folder where the program was started.",
            .option = option},
           &MonitorSettings::output_path);
  rows.add("job_name",
           {.sentence = "Folder for the files inside `output_path`; empty: `output_path` itself",
            .details =
                "The option makes it empty. A folder holds one run: another run is refused there, "
                "unless it continues or replaces that run (`train.resume`, `train.overwrite`).",
            .option = option,
            .by_option = ""},
           &MonitorSettings::job_name);
}

/// Throws ConfigError if no collective has this name, here or in DeepSpeed.
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
           {.sentence = "At the end, print how long collectives took, by kind and size of message",
            .details = "The table of rank 0 is also written to log.jsonl: docs/profiling.md.",
            .option = "--comms-logger"},
           &CommsLogger::enabled);
  rows.add("verbose", {.sentence = "Also print each call"}, &CommsLogger::verbose);
  rows.add("prof_all", {.sentence = "Time every collective; false: only those in `prof_ops`"},
           &CommsLogger::prof_all);
  rows.add("debug",
           {.sentence = "With `verbose`, print the unit of parameters that a call is for",
            .details = "DeepSpeed prints the calling function."},
           &CommsLogger::debug);
  rows.accept<std::vector<Json>>(
      {"prof_ops"},
      {.sentence = "Collectives to time if `prof_all` is false",
       .details = "Names are \"all_gather\", \"reduce_scatter\", \"all_reduce\", \"broadcast\", "
                  "\"all_to_all\" and \"control\" (or \"barrier\"), and DeepSpeed's names that "
                  "begin with one of them (\"all_gather_into_tensor\")."});
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

/// Adds an option that `zero train` once had for runs of Weights & Biases; it says what to do
/// instead.
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
  rows.add(
      "enabled",
      {.sentence =
           "Count the FLOPs of one step by module, and write a report to the console or to FILE",
       .details = "The report also has times, and the part of the machine's speed in matrix "
                  "products that the step reaches. The numbers are in log.jsonl too.",
       .option = "--flops-profiler",
       .argument = "FILE",
       .alone = true,
       .by_option = true,
       .cost = "The step that is counted takes a little longer. Other steps do not."},
      &Profiler::enabled);
  rows.add("profile_step",
           {.sentence = "Number of steps before the one that is counted",
            .details = "This is DeepSpeed's numbering, in which the first step is 0. A resumed run "
                       "starts counting again. If the run is shorter, its last step is counted."},
           &Profiler::profile_step);
  rows.add(
      "module_depth",
      {.sentence = "How deep into the modules the report goes; -1: to the innermost", .least = -1},
      &Profiler::module_depth);
  rows.add(
      "top_modules",
      {.sentence = "Number of modules that are named as the largest at each depth", .least = 1},
      &Profiler::top_modules);
  rows.add("detailed",
           {.sentence = "Write a table of all modules",
            .details = "False: only totals and the largest modules."},
           &Profiler::detailed);
  rows.add("output_file",
           {.sentence = "File for the report, which is overwritten; empty: the console",
            .details = "With a file the console shows only the totals.",
            .option = "--flops-profiler"},
           &Profiler::output_file);
  rows.add("recompute_fwd_factor",
           {.sentence = "Part of forward that backward recomputes, for the count of its FLOPs",
            .details = "It is 1 if every layer is recomputed (`activation_checkpointing`).",
            .least = 0},
           &Profiler::recompute_fwd_factor);
}

}  // namespace

void add_monitors(All& all) {
  add_comms_logger(all);
  add_files(all, &ProgramSettings::tensorboard, "tensorboard", "--tensorboard",
            "Write event files for TensorBoard to this folder",
            "Curves by samples have DeepSpeed's names. Curves by steps show all numbers of a step "
            "in log.jsonl. The configuration and the sample are texts.");
  add_files(all, &ProgramSettings::csv_monitor, "csv_monitor", "--csv",
            "Write a CSV file for each number of a step to this folder",
            "Names and columns are DeepSpeed's.");
  add_wandb_option(all);
  add_flops_profiler(all);
}

}  // namespace zero::fields
