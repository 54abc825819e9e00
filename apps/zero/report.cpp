// `zero report`: a page that shows a training run, or two beside each other.
#include "zero/report/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"
#include "zero/train/stop.h"

namespace zero::app::reporting {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDescription =
    "Writes a page of HTML that shows a run of `zero train`, or two beside each other: losses, "
    "rates and norms,\n"
    "the time of steps by part, memory beside the formula and the plan, traffic beside the "
    "formula, what was\n"
    "unusual, and the configuration. The page needs no network, no script and no other file.\n\n"
    "  zero report my_run\n"
    "  zero report my_run another_run --out both.html\n"
    "  zero report my_run --watch";

struct Asked {
  std::vector<std::string> runs;
  std::string out;
  bool watch = false;
  int every = 5;
};

std::vector<report::RunLog> read(const std::vector<std::string>& runs) {
  std::vector<report::RunLog> logs;
  for (const auto& run : runs) logs.push_back(report::read_log(run));
  return logs;
}

/// Writes the page.
std::vector<report::RunLog> write(const Asked& asked, int refresh_seconds) {
  auto logs = read(asked.runs);
  report::write_report(asked.out, report::report(logs, {.refresh_seconds = refresh_seconds}));
  return logs;
}

/// Writes the page again and again until all runs have ended, or a signal comes. The last one does
/// not ask a browser to load it again.
std::vector<report::RunLog> watch(const Asked& asked) {
  const train::StopSignals signals;
  const auto goes_on = [](const report::RunLog& log) { return !log.end; };
  auto logs = write(asked, asked.every);
  fmt::print("{} is written again every {} s while the run goes on; Ctrl-C ends that.\n", asked.out,
             asked.every);
  std::fflush(stdout);
  auto next = std::chrono::steady_clock::now();
  while (signals.received() == 0 && std::ranges::any_of(logs, goes_on)) {
    next += std::chrono::seconds(asked.every);
    while (signals.received() == 0 && std::chrono::steady_clock::now() < next)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    logs = write(asked, asked.every);
  }
  return write(asked, 0);
}

}  // namespace

int run(const Arguments& arguments) {
  Asked asked;
  OptionParser parser("report", kDescription);
  parser.add_option("run", asked.runs, "Folders that `zero train` got as --out")
      ->required()
      ->expected(1, 2)
      ->type_name("RUN [RUN2]");
  parser.add_option("-o,--out", asked.out, "File for the page; else report.html in the first RUN")
      ->type_name("FILE");
  parser.add_flag("--watch", asked.watch,
                  "Write the page again while the run goes on; a browser that shows it follows");
  parser.add_option("--every", asked.every, "Seconds between pages with --watch")
      ->check(CLI::Range(1, 3600));
  if (const auto status = parser.read(arguments)) return *status;
  if (asked.out.empty()) {
    const fs::path run(asked.runs.front());
    std::error_code error;
    asked.out = ((fs::is_directory(run, error) ? run : run.parent_path()) / "report.html").string();
  }
  report::check_report(asked.out);
  const auto logs = asked.watch ? watch(asked) : write(asked, 0);
  fmt::print("{}: {}", asked.out, logs.front().name);
  if (logs.size() > 1) fmt::print(" and {}", logs.back().name);
  fmt::print(", {} steps, {} events\n", logs.front().steps.size(), logs.front().events.size());
  return 0;
}

}  // namespace zero::app::reporting

namespace zero::app {

int report_runs(const Arguments& arguments) { return reporting::run(arguments); }

}  // namespace zero::app
