// The places that the settings in force come from.
#pragma once

#include <memory>
#include <string>

#include "apps/zero/command_line.h"
#include "zero/config/fields.h"
#include "zero/train/monitor.h"

namespace zero::app {

class Origins {
 public:
  /// `file` has the keys of a file by their present names. `line` outlives this. `saved` are the
  /// settings of a checkpoint, if a run goes on from one.
  Origins(fields::Json file, const CommandLine& line, fields::Json saved = {});

  /// Returns "command line", "file", "file, by train_batch_size", "checkpoint" or "default".
  std::string of(const std::string& key) const;

 private:
  bool said(const std::string& key) const;

  fields::Json file_;
  const CommandLine& line_;
  fields::Json given_ = fields::Json::object();
  fields::Json saved_, defaults_;
};

/// Returns a monitor that adds a line to `log`, before that of the first step: the origin of each
/// setting that is no default. `origins` is copied.
std::unique_ptr<train::Monitor> origins_monitor(const std::string& log, const Origins& origins);

}  // namespace zero::app
