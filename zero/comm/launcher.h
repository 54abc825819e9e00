// Starts the ranks of a job on this host and looks after them until the last has ended. A job over
// several hosts has a launcher on each host.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero::comm {

/// Says where the ranks' output goes.
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
  /// The folder of RankLogs::files; made if absent.
  std::filesystem::path log_dir{};
  /// The time between SIGTERM and SIGKILL, once a rank has failed.
  std::chrono::milliseconds grace = std::chrono::seconds(2);

  // These are for a job over several hosts. All its launchers get the same, except the node's rank.
  int nnodes = 1;
  int node_rank = 0;  ///< this host has the ranks from node_rank * nproc on
  /// the address of node 0, whose launcher hosts the store of all ranks
  std::string master_addr{};
  uint16_t master_port = 29500;

  // Restarts after a failure.
  int max_restarts = 0;
  /// The fewest ranks of the whole job that a restart may have; 0: as many as at first. Hosts that
  /// are lost take their ranks with them; on one host the ranks that were killed are lost.
  int min_ranks = 0;
  /// The time that node 0's launcher waits for the others before a restart goes on without them.
  std::chrono::milliseconds rejoin = std::chrono::seconds(30);
  /// The place, in memory, of a folder that outlives the ranks (memory_folder.h), if there may be
  /// restarts. Empty: /dev/shm, if that can be written.
  std::filesystem::path memory_folder{};
};

/// Runs `nproc` copies of the command with the environment that zero::init() and torchrun's
/// programs read, and hosts their store. Blocks until all have ended. Returns 0, or the status of
/// the rank that failed first (128 + N for signal N); the last line on stderr names that rank and
/// says how it ended.
///
/// When a rank fails the others get SIGTERM, and SIGKILL after the grace period. SIGINT, SIGTERM
/// and SIGHUP to this process, except those that it ignores, are passed on to every rank, which may
/// take its time to end; a second SIGINT kills them. The ranks die with this process.
///
/// If the job is over several hosts, each launcher looks after its own ranks. If one of them
/// fails, the others on its host first get a second to tell the other hosts. The launcher of node 0
/// keeps the store open until the other launchers have ended: five seconds after a failure, else
/// five minutes.
///
/// With `max_restarts` the ranks are started again after a failure, at most so many times, with
/// TORCHELASTIC_RESTART_COUNT counted up: Note [Restarts] in launch_store.h. A rank that exits with
/// status 2 has refused what it was given, so no restart would help, unless it was given fewer
/// ranks than at first: then the next attempt, which is not counted, has one rank fewer.
///
/// Output is passed on as its reader takes it. If the reader takes none, the launcher still handles
/// signals and failures, keeps up to 1 MiB, and lets ranks that write more wait; at the end it
/// waits for the reader, unless one of those signals has come. Output that nobody can read any more
/// is dropped, and the job goes on.
///
/// Call it from the main thread of a process that has no other threads: while it runs it blocks the
/// three signals, ignores SIGPIPE and SIGXFSZ, and has SIGCHLD's default, which the ranks get too.
/// Throws ConfigError if the command cannot be run, and CommError if the system gives no
/// process, pipe or port.
int launch(const LaunchOptions& options);

}  // namespace zero::comm
