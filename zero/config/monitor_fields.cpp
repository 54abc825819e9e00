// DeepSpeed's sections of monitors that `zero train` has: zero/train/monitors.h.
#include <string>

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

}  // namespace

void add_monitors(All& all) {
  add_files(all, &ProgramSettings::tensorboard, "tensorboard", "--tensorboard",
            "Write event files for TensorBoard to this folder",
            "By samples under DeepSpeed's names, by steps all that a step of log.jsonl has; the "
            "configuration and the sample as texts.");
  add_files(all, &ProgramSettings::csv_monitor, "csv_monitor", "--csv",
            "Write a CSV file for each number of a step to this folder",
            "With DeepSpeed's names and columns.");
}

}  // namespace zero::fields
