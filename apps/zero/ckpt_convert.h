// `zero ckpt import`, `export`, `diff` and `reshard`: checkpoints of other programs, and two
// checkpoints.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "apps/zero/options.h"

namespace zero::app {

class CheckpointConversions {
 public:
  /// Adds the subcommands. This outlives the parser's reading.
  explicit CheckpointConversions(OptionParser& parser);
  /// Runs the one that was given, if it is one of these, and returns the exit status: `diff` has 1
  /// where the checkpoints differ.
  int run() const;

 private:
  int import() const;
  int export_to() const;
  int diff() const;
  int reshard() const;

  std::string from_;
  std::string to_;
  std::string form_ = "hf";
  std::string shard_ = "5 GB";
  int64_t ranks_ = 1;
  std::optional<int> stage_;
  double tolerance_ = 0;
  bool weights_ = false;
  bool json_ = false;
  CLI::App* import_ = nullptr;
  CLI::App* export_ = nullptr;
  CLI::App* diff_ = nullptr;
  CLI::App* reshard_ = nullptr;
};

}  // namespace zero::app
