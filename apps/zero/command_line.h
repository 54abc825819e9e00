// The options of `zero train` that stand for keys of a configuration file: `zero config` takes them
// too.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/zero/options.h"
#include "zero/config/fields.h"

namespace zero::app {

/// The settings that the command line gives. They come before those of a file.
struct CommandLine {
  std::string config_file;
  std::optional<int> nproc;
  bool lenient = false;
  /// The rows that each option stands for, with the value given.
  std::vector<std::pair<const fields::Field<Settings>*, fields::Json>> values;
  /// The options of the optimizer, whichever it is, with their values.
  std::vector<std::pair<std::string, std::string>> hyper_parameters;

  /// Adds the options to `parser`, which fills this in.
  void add_to(OptionParser& parser);
  /// Returns `file` (of present names) with the settings of the command line in place of its own.
  fields::Json over(fields::Json file) const;
  /// Sets the settings of the command line. Throws ConfigError for values that cannot be used.
  void apply(Settings& settings) const;
  /// Says of each option or key that has no effect with these settings why it has none.
  std::vector<std::string> without_effect(const Settings& settings) const;
};

}  // namespace zero::app
