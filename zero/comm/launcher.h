// Starts the ranks of a job on this host and looks after them until the last has ended.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

namespace zero::comm {

/// What becomes of the ranks' output.
enum class RankLogs {
  rank0,   ///< rank 0 keeps the launcher's stdout, the other ranks' stdout is dropped; stderr as in
           ///< `prefix`
  prefix,  ///< every line of every rank, whole, behind "[rank] "
  files,   ///< stdout and stderr of rank N go to LOG_DIR/rank-N.log, which is emptied first
};

struct LaunchOptions {
  int nproc = 1;
  /// The program, found through PATH, and its arguments.
  std::vector<std::string> command{};
  RankLogs logs = RankLogs::rank0;
  /// For RankLogs::files; made if absent.
  std::filesystem::path log_dir{};
  /// Between SIGTERM and SIGKILL, once a rank has failed.
  std::chrono::milliseconds grace = std::chrono::seconds(2);
};

/// Runs `nproc` copies of the command with the environment that zero::init() and torchrun's
/// programs read, and hosts their store. Blocks until all have ended; returns 0, or the status of
/// the rank that failed first (128 + N for signal N), whose name and fate are the last line on
/// stderr.
///
/// When a rank fails the others get SIGTERM, and SIGKILL after the grace period. SIGINT, SIGTERM
/// and SIGHUP to this process, but for those that it ignores, are passed on to every rank, which
/// may take its time to end; a second SIGINT kills them. The ranks die with this process; the loss
/// of whoever reads its output ends neither. Call it from the main thread of a process that has no
/// other threads: it blocks these signals, and ignores SIGPIPE, while it runs. Throws ConfigError
/// where the command cannot be run, and CommError where the system gives no process, pipe or port.
int launch(const LaunchOptions& options);

}  // namespace zero::comm
