// DeepSpeed's keys of what is measured, and its sections of monitors that `zero train` has:
// zero/train/monitors.h.
#include <fmt/format.h>

#include <string>
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

void add_comms_logger(All& all) {
  Rows rows(all, Part::program, "comms_logger", &Settings::program, &ProgramSettings::comms_logger);
  rows.add("enabled",
           {.sentence = "Print how long collectives take, by kind and size of message, at the end",
            .details = "And write it to log.jsonl: docs/profiling.md. Of rank 0.",
            .option = "--comms-logger"},
           &CommsLogger::enabled);
  rows.add("verbose", {.sentence = "Print each call too"}, &CommsLogger::verbose);
  rows.add("prof_all", {.sentence = "Of every collective; else of those in `prof_ops`"},
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
    }
  };
  all.back().get = [](const Settings& root) { return Json(root.program.comms_logger.prof_ops); };
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
}

}  // namespace zero::fields
