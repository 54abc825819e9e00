// `zero report`: a page that shows a training run, or two beside each other.
#include "zero/report/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "apps/zero/options.h"
#include "apps/zero/page_server.h"
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
    "  zero report my_run --watch\n"
    "  zero report my_run --watch --port 8080";

struct Asked {
  std::vector<std::string> runs;
  std::string out;
  bool watch = false;
  int every = 5;
  std::optional<uint16_t> port;
};

std::vector<report::RunLog> read(const std::vector<std::string>& runs) {
  std::vector<report::RunLog> logs;
  for (const auto& run : runs) logs.push_back(report::read_log(run));
  return logs;
}

/// Writes the page, and shows it to browsers if there is a server.
void write(const Asked& asked, const std::vector<report::RunLog>& logs, int refresh_seconds,
           PageServer* server = nullptr) {
  auto page = report::report(logs, {.refresh_seconds = refresh_seconds});
  report::write_report(asked.out, page);
  if (server != nullptr) server->show(std::move(page));
}

/// Reads the logs again into `logs`. A log that cannot be read now, since its run begins anew or
/// somebody has moved it, leaves them as they were; the first time a line says so.
void read_again(const Asked& asked, std::vector<report::RunLog>& logs, bool& readable) {
  try {
    logs = read(asked.runs);
    readable = true;
  } catch (const Error& error) {
    if (!std::exchange(readable, false)) return;
    fmt::print("The page stays as it was. {}\n", error.what());
    std::fflush(stdout);
  }
}

/// Writes the page again and again until all runs have ended, or a signal comes. The last one does
/// not ask a browser to load it again; a server stays until browsers have had time to load it.
std::vector<report::RunLog> watch(const Asked& asked) {
  const train::StopSignals signals;
  std::optional<PageServer> server;
  if (asked.port) server.emplace(*asked.port);
  auto* shown = server ? &*server : nullptr;
  const auto rest = [&] {
    const auto next = std::chrono::steady_clock::now() + std::chrono::seconds(asked.every);
    while (signals.received() == 0 && std::chrono::steady_clock::now() < next) {
      constexpr std::chrono::milliseconds kAtOnce{100};
      if (server) {
        server->serve(kAtOnce);
      } else {
        std::this_thread::sleep_for(kAtOnce);
      }
    }
  };
  auto logs = read(asked.runs);
  write(asked, logs, asked.every, shown);
  fmt::print("{} is written again every {} s while the run goes on; Ctrl-C ends that.\n", asked.out,
             asked.every);
  if (server) fmt::print("A browser of this machine finds it at {}\n", server->url());
  std::fflush(stdout);
  const auto goes_on = [](const report::RunLog& log) { return !log.end; };
  for (bool readable = true; signals.received() == 0 && std::ranges::any_of(logs, goes_on);) {
    rest();
    read_again(asked, logs, readable);
    write(asked, logs, asked.every, shown);
  }
  write(asked, logs, 0, shown);
  if (server) rest();
  return logs;
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
  parser.add_option("--port", asked.port,
                    "Serve the page of --watch to browsers of this machine (127.0.0.1) at this "
                    "port; 0: at a free one");
  if (const auto status = parser.read(arguments)) return *status;
  if (asked.out.empty()) {
    const fs::path run(asked.runs.front());
    std::error_code error;
    asked.out = ((fs::is_directory(run, error) ? run : run.parent_path()) / "report.html").string();
  }
  report::check_report(asked.out);
  if (asked.port && !asked.watch)
    throw ConfigError("--port serves the page of a run that is watched: it needs --watch.");
  std::vector<report::RunLog> logs;
  if (asked.watch) {
    logs = watch(asked);
  } else {
    logs = read(asked.runs);
    write(asked, logs, 0);
  }
  fmt::print("{}: {}", asked.out, logs.front().name);
  if (logs.size() > 1) fmt::print(" and {}", logs.back().name);
  fmt::print(", {} steps, {} events\n", logs.front().steps.size(), logs.front().events.size());
  return 0;
}

}  // namespace zero::app::reporting

namespace zero::app {

int report_runs(const Arguments& arguments) { return reporting::run(arguments); }

}  // namespace zero::app
