// The report of a training run as a page of HTML: what `zero report` writes.
//
//   const auto page = zero::report::report({zero::report::read_log("my_run")});
//   zero::report::write_report("report.html", page);
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "zero/report/run_log.h"

namespace zero::report {

struct ReportOptions {
  /// A browser loads the page again after that many seconds; 0: it does not.
  int refresh_seconds = 0;
};

/// Returns the report of one run, or of two beside each other, as one page that needs nothing else.
/// All that comes from logs is escaped. Throws ConfigError for another number of runs.
std::string report(const std::vector<RunLog>& runs, const ReportOptions& options = {});

/// Throws ConfigError if `file` cannot get a report: it exists and is none, or its folder does not
/// exist. Changes nothing.
void check_report(const std::filesystem::path& file);
/// Writes a report, in one piece, in place of an earlier one. Throws ConfigError as `check_report`,
/// and Error if the disk is full.
void write_report(const std::filesystem::path& file, const std::string& page);

}  // namespace zero::report
