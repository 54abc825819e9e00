// The options of `zero train` that stand for keys of a configuration file.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/zero/options.h"
#include "zero/config/fields.h"

namespace zero::app {

/// What the command line says, which comes before what a file says.
struct CommandLine {
  std::string config_file;
  std::optional<int> nproc;
  bool lenient = false;
  /// The rows that each option stands for, with the value given.
  std::vector<std::pair<const fields::Field<Settings>*, fields::Json>> values;
  /// Of options of the optimizer, whichever it is: the option and its value.
  std::vector<std::pair<std::string, std::string>> hyper_parameters;

  /// Adds the options to `parser`, which fills this in.
  void add_to(OptionParser& parser);
  /// `file` (of present names) with what the command line says in its place.
  fields::Json over(fields::Json file) const;
  /// Sets what the command line says. Throws ConfigError for what cannot be used.
  void apply(Settings& settings) const;
  /// Something of the optimizer is said.
  bool names(const std::string& option) const;
};

}  // namespace zero::app
