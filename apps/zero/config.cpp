// `zero config`: checks a configuration file, and says what is in force.
#include <fmt/format.h>

#include <string>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/config/fields.h"

namespace zero::app {

int config(const Arguments& arguments) {
  OptionParser parser(
      "config",
      "Checks a configuration file and prints the settings in force with it (without a file the "
      "defaults) as JSON.\nFiles written for DeepSpeed can be read; docs/config.md explains every "
      "key.");
  std::string file;
  int ranks = 1;
  bool markdown = false;
  parser.add_option("file", file, "JSON file with DeepSpeed's keys")->type_name("FILE");
  parser
      .add_option("-n,--nproc", ranks,
                  "Ranks, by which train_batch_size = micro-batch x accumulation x ranks")
      ->check(positive())
      ->type_name("N");
  parser.add_flag("--markdown", markdown, "Print the tables of docs/config.md instead");
  if (const auto status = parser.read(arguments)) return *status;
  if (markdown) {
    fmt::print("{}", fields::markdown());
    return 0;
  }
  const auto settings = file.empty() ? Settings() : Settings::load(file, ranks);
  fmt::print("{}\n", settings.dump());
  return 0;
}

}  // namespace zero::app
