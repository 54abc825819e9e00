// `zero launch`: any program as the ranks of a job on this host, or of this host's part of one.
#include "zero/comm/launcher.h"

#include <fmt/format.h>

#include <map>

#include "apps/zero/options.h"
#include "apps/zero/subcommands.h"
#include "zero/base/error.h"

namespace zero::app {

int launch(const Arguments& arguments) {
  OptionParser parser(
      "launch",
      "Runs N copies of PROGRAM on this host, each with the environment that zero::init() reads\n"
      "(RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; torchrun's "
      "names).\n"
      "When a copy fails the others are stopped, and its status is the status of the launch; with\n"
      "--max-restarts all are started again. `zero train` then goes on from its newest "
      "checkpoint.\n"
      "For a job over several hosts run it on each, with --nnodes, --node-rank and --master-addr.");
  comm::LaunchOptions options;
  const std::map<std::string, comm::RankLogs> logs{{"rank0", comm::RankLogs::rank0},
                                                   {"prefix", comm::RankLogs::prefix},
                                                   {"files", comm::RankLogs::files}};
  std::string log_mode = "prefix";
  parser.add_option("-n,--nproc", options.nproc, "Number of ranks")
      ->required()
      ->default_str("")
      ->type_name("N");
  parser.add_option("--nnodes", options.nnodes, "Hosts of the job, each with N ranks")
      ->type_name("H");
  parser.add_option("--node-rank", options.node_rank, "This host's place among them, from 0")
      ->type_name("K");
  parser
      .add_option("--master-addr", options.master_addr,
                  "Name or address of the host with --node-rank 0, as the others reach it")
      ->type_name("HOST");
  parser.add_option("--master-port", options.master_port, "A free port there")
      ->check(CLI::Range(1, 65535))
      ->type_name("PORT");
  parser
      .add_option("--logs", log_mode,
                  "prefix: every line of every rank behind [RANK]; rank0: rank 0's output as it "
                  "is, and the stderr of the others; files: into --log-dir")
      ->check(CLI::IsMember({"prefix", "rank0", "files"}))
      ->type_name("MODE");
  std::string log_dir = "logs";
  parser.add_option("--log-dir", log_dir, "Folder of rank-N.log, for --logs files")
      ->type_name("DIR");
  parser
      .add_option("--max-restarts", options.max_restarts,
                  "Start the ranks again after a failure, at most so many times")
      ->type_name("R");
  parser
      .add_option("--min-ranks", options.min_ranks,
                  "Restart without the ranks that were killed, and without the hosts that do not "
                  "come back, as long as the job has so many ranks; else with all of them")
      ->type_name("A");
  double rejoin = 30;
  parser
      .add_option("--rejoin", rejoin,
                  "Time that a restart waits for the other hosts before it goes on without them")
      ->check(between(0, 86400))
      ->type_name("SECONDS");
  parser
      .add_option("--memory-folder", options.memory_folder,
                  "Place in memory for the copies of zero train --memory-copies; /dev/shm without "
                  "the option")
      ->type_name("DIR");
  parser.add_option("command", options.command, "The program and its arguments, behind --")
      ->required()
      ->type_name("PROGRAM ARGS...");
  parser.positionals_at_end();
  if (const auto status = parser.read(arguments)) return *status;
  for (const char* option : {"--master-addr", "--master-port"}) {
    if (options.nnodes > 1 || parser.count(option) == 0) continue;
    throw ConfigError(
        fmt::format("{0} is {1}, but --nnodes is 1: the ranks of one host meet at a free port that "
                    "the launcher finds by itself. Leave {0} out, or give --nnodes.",
                    option, parser.get_option(option)->as<std::string>()));
  }
  options.rejoin = std::chrono::milliseconds(static_cast<int64_t>(rejoin * 1000));
  options.logs = logs.at(log_mode);
  options.log_dir = log_dir;
  return comm::launch(options);
}

}  // namespace zero::app
