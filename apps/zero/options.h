// What the subcommands share in reading their options.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "apps/zero/subcommands.h"

namespace zero::app {

/// A parser of the options of `zero NAME`, with the program's manners. Numbers are shown with their
/// defaults.
class OptionParser : public CLI::App {
 public:
  OptionParser(std::string name, std::string description);
  /// Reads `arguments`. Returns an exit status where there is nothing left to do (--help). Throws
  /// ConfigError for what cannot be used, with the nearest option that exists.
  std::optional<int> read(const Arguments& arguments);
};

/// Checks of numbers that say which one, and what it should be.
CLI::Validator positive();
CLI::Validator not_negative();

}  // namespace zero::app
