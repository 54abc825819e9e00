#include "zero/comm/launcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/run_program.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/comm/rendezvous.h"

namespace zero::comm {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using test::Outcome;
using test::Program;
using test::TemporaryFolder;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

/// Runs `zero launch` with a shell script on N ranks; `through` starts it.
std::vector<std::string> command(int ranks, const std::string& script,
                                 std::vector<std::string> options = {},
                                 std::vector<std::string> through = {}) {
  std::vector<std::string> words{ZERO_PROGRAM, "launch", "-n", std::to_string(ranks)};
  words.insert(words.end(), options.begin(), options.end());
  words.emplace_back("--");
  words.insert(words.end(), through.begin(), through.end());
  words.insert(words.end(), {"/bin/sh", "-c", script});
  return words;
}

Outcome launch_script(int ranks, const std::string& script, std::vector<std::string> options = {},
                      const std::map<std::string, std::string>& variables = {}) {
  return test::run(command(ranks, script, std::move(options)), variables);
}

bool exists(pid_t pid) { return kill(pid, 0) == 0; }

bool gone_within(pid_t pid, seconds limit) {
  const auto deadline = steady_clock::now() + limit;
  while (exists(pid)) {
    if (steady_clock::now() > deadline) return false;
    usleep(10000);
  }
  return true;
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

TEST(Launch, GivesEachRankItsPlace) {
  const auto outcome = launch_script(
      3,
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR ${MASTER_PORT:-none} "
      "$TORCHELASTIC_USE_AGENT_STORE");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(outcome.out, HasSubstr(fmt::format("[{0}] {0} 3 {0} 3 127.0.0.1 ", rank)));
  }
  EXPECT_THAT(outcome.out, Not(HasSubstr("none")));
  EXPECT_EQ(count(outcome.out, " True\n"), 3);
}

/// Runs the launchers of a job over several nodes, each with `ranks` ranks of a script.
std::vector<std::unique_ptr<Program>> launch_nodes(int nodes, int ranks,
                                                   const std::string& script) {
  const auto port = std::to_string([] { return host_local_store(seconds(1)).port; }());
  std::vector<std::unique_ptr<Program>> programs;
  for (int node = 0; node < nodes; ++node) {
    programs.push_back(std::make_unique<Program>(
        command(ranks, script,
                {"--nnodes", std::to_string(nodes), "--node-rank", std::to_string(node),
                 "--master-addr", kLoopback, "--master-port", port})));
  }
  return programs;
}

TEST(Launch, GivesTheRanksOfEachNodeTheirPlace) {
  const auto programs =
      launch_nodes(2, 2,
                   "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK "
                   "$MASTER_ADDR token=$ZERO_JOB_TOKEN.");
  for (int node = 0; node < 2; ++node) {
    const auto outcome = programs[static_cast<size_t>(node)]->wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(fmt::format("zero: node {} of 2: ranks {} to {}", node,
                                                   2 * node, 2 * node + 1)));
    for (int local = 0; local < 2; ++local) {
      const int rank = 2 * node + local;
      EXPECT_THAT(outcome.out, HasSubstr(fmt::format("[{0}] {0} 4 {1} 2 {2} 127.0.0.1 token=.\n",
                                                     rank, local, node)));
    }
  }
}

TEST(Launch, KeepsTheStoreUntilTheOtherNodesHaveEnded) {
  TemporaryFolder folder;
  const auto flag = (folder / "go on").string();
  const auto programs =
      launch_nodes(2, 1,
                   fmt::format("if [ $RANK = 0 ]; then echo done; exit; fi; "
                               "until [ -e '{}' ]; do sleep 0.02; done; "
                               "exec bash -c \": < /dev/tcp/127.0.0.1/$MASTER_PORT\"",
                               flag));
  ASSERT_TRUE(programs[0]->wait_for_output("done"));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it would have ended in that time
  test::write_file(flag, "");
  const auto outcome = programs[1]->wait();
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(programs[0]->wait().status, 0);
}

TEST(Launch, EndsWhereTheLauncherOfNodeZeroIsStopped) {
  TemporaryFolder folder;
  const auto flag = (folder / "go on").string();
  const auto programs = launch_nodes(2, 1,
                                     fmt::format("[ $RANK = 0 ] && echo up && exec sleep 100; "
                                                 "until [ -e '{}' ]; do sleep 0.02; done",
                                                 flag));
  ASSERT_TRUE(programs[0]->wait_for_output("up"));
  programs[0]->signal(SIGSTOP);  // it still takes connections
  test::write_file(flag, "");
  EXPECT_EQ(programs[1]->wait(seconds(15)).status, 0);
}

TEST(Launch, TellsTheRanksThatItHasStartedThem) {
  EXPECT_THAT(launch_script(1, "echo by=$ZERO_LAUNCHER.").out, HasSubstr("by=zero launch."));
  for (const auto& program : launch_nodes(2, 1, "echo by=$ZERO_LAUNCHER."))
    EXPECT_THAT(program->wait().out, HasSubstr("by=zero launch."));
}

TEST(Launch, NamesTheRankOfTheJobThatFailedOnANode) {
  const auto programs =
      launch_nodes(2, 2, "[ $RANK = 3 ] && exit 7; [ $RANK = 2 ] && exec sleep 100; exit 0");
  const auto outcome = programs[1]->wait();
  EXPECT_EQ(outcome.status, 7);
  EXPECT_THAT(outcome.err, HasSubstr("rank 3 (pid "));
  EXPECT_THAT(outcome.err, HasSubstr("the other ranks of this host were stopped"));
  EXPECT_EQ(programs[0]->wait().status, 0);
}

TEST(Launch, RefusesANodeThatCannotBe) {
  const auto complaint = [](std::vector<std::string> options) {
    return launch_script(1, "true", std::move(options)).err;
  };
  EXPECT_THAT(complaint({"--nnodes", "2"}), HasSubstr("--master-addr"));
  EXPECT_THAT(complaint({"--nnodes", "2", "--node-rank", "2", "--master-addr", "h"}),
              HasSubstr("between 0 and 1"));
  EXPECT_THAT(complaint({"--nnodes", "0"}), HasSubstr("at least 1"));
  EXPECT_THAT(complaint({"--node-rank", "1"}), HasSubstr("should be 0"));
  EXPECT_THAT(complaint({"--nnodes", "2", "--master-addr", "192.0.2.1"}),
              HasSubstr("could not open the job's store at 192.0.2.1"));
}

TEST(Launch, SharesTheCoresUnlessTheUserSaysOtherwise) {
  const auto unset =
      launch_script(64, "echo threads=$OMP_NUM_THREADS", {}, {{"OMP_NUM_THREADS", ""}});
  const auto share = std::max(1U, std::thread::hardware_concurrency() / 64);
  EXPECT_EQ(count(unset.out, "threads=" + std::to_string(share) + "\n"), 64)
      << "at least one thread each";
  const auto set =
      launch_script(2, "echo threads=$OMP_NUM_THREADS", {}, {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(count(set.out, "threads=7\n"), 2);
}

TEST(Launch, NeverInterleavesLines) {
  const auto outcome = launch_script(4,
                                     "i=0; while [ $i -lt 300 ]; do printf 'aaaaaaaaaaaaaaaa'; "
                                     "echo \"bbbbbbbbbbbbbbbbbbbb$RANK\"; i=$((i+1)); done");
  EXPECT_EQ(outcome.status, 0);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(
        count(outcome.out, fmt::format("[{0}] aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbb{0}\n", rank)),
        300);
  }
  EXPECT_EQ(count(outcome.out, "\n"), 1200);
}

TEST(Launch, KeepsALastLineWithoutEnd) {
  EXPECT_THAT(launch_script(1, "printf 'the end'").out, EndsWith("[0] the end\n"));
}

TEST(Launch, PassesRankZerosOutputAsItIs) {
  const auto outcome = launch_script(2, "echo out$RANK; echo err$RANK >&2", {"--logs", "rank0"});
  EXPECT_EQ(outcome.out, "out0\n");
  EXPECT_THAT(outcome.err, HasSubstr("[0] err0\n"));
  EXPECT_THAT(outcome.err, HasSubstr("[1] err1\n"));
}

TEST(Launch, WritesLogFiles) {
  test::TemporaryFolder folder;
  const auto logs = folder / "made/by/it";
  // Rank 1 fails once rank 0 has spoken, since rank 0 is then stopped.
  const auto outcome =
      launch_script(2,
                    "echo out$RANK; echo err$RANK >&2; if [ $RANK = 0 ]; then exec sleep 100; fi; "
                    "until grep -q err0 " +
                        (logs / "rank-0.log").string() + "; do sleep 0.05; done; exit 1",
                    {"--logs", "files", "--log-dir", logs});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(test::read_file(logs / "rank-0.log"), "out0\nerr0\n");
  EXPECT_EQ(test::read_file(logs / "rank-1.log"), "out1\nerr1\n");
  EXPECT_THAT(outcome.err, HasSubstr("see " + (logs / "rank-1.log").string()));
}

TEST(Launch, EndsWithTheFailingRanksStatusAndName) {
  const auto begin = steady_clock::now();
  const auto outcome = launch_script(3, "if [ $RANK = 2 ]; then exit 3; fi; exec sleep 100");
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(
      outcome.err,
      ::testing::MatchesRegex(
          "(.|\n)*zero: error: rank 2 \\(pid [0-9]+\\) exited with status 3; the other ranks "
          "were stopped\n"));
  EXPECT_LT(steady_clock::now() - begin, seconds(5));
}

// --- Restarts

TEST(Launch, StartsTheRanksAgainAfterAFailure) {
  const auto outcome = launch_script(
      2,
      "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || "
      "[ $RANK = 0 ] && exit 0; exit 3",
      {"--max-restarts", "3"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (const char* attempt : {"attempt 0\n", "attempt 1\n", "attempt 2\n"})
    EXPECT_EQ(count(outcome.out, attempt), 2) << outcome.out;
  EXPECT_THAT(outcome.err, HasSubstr("zero: restart 2 of 3 with 2 ranks\n"));
  EXPECT_EQ(count(outcome.err, "exited with status 3"), 2) << outcome.err;
}

TEST(Launch, EndsWithTheStatusOfTheLastRestart) {
  const auto outcome =
      launch_script(2, "exit $((7 + TORCHELASTIC_RESTART_COUNT))", {"--max-restarts", "2"});
  EXPECT_EQ(outcome.status, 9);
  EXPECT_EQ(count(outcome.err, "zero: restart"), 2) << outcome.err;
}

TEST(Launch, DoesNotStartAgainWhatRefusesItsArgumentsOrWasAskedToEnd) {
  for (const int status : {2, 130}) {
    const auto outcome =
        launch_script(2, "exit " + std::to_string(status), {"--max-restarts", "5"});
    EXPECT_EQ(outcome.status, status);
    EXPECT_EQ(count(outcome.err, "restart"), 0) << outcome.err;
  }
}

TEST(Launch, GivesAllAttemptsTheNameOfOneJob) {
  const std::string script = "echo job $ZERO_JOB; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
  const auto outcome = launch_script(1, script, {"--max-restarts", "1"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const auto name = outcome.out.substr(outcome.out.find("job "), 36);
  EXPECT_EQ(count(outcome.out, name + "\n"), 2) << outcome.out;
  EXPECT_EQ(count(launch_script(1, script, {"--max-restarts", "1"}).out, name), 0);
}

TEST(Launch, GoesOnWithoutTheRanksThatWereKilledWhereItMay) {
  const std::string script =
      "echo $WORLD_SIZE; [ $WORLD_SIZE = 3 ] && exit 2; "
      "[ $WORLD_SIZE$RANK = 42 ] && kill -9 $$; [ $WORLD_SIZE = 4 ] && sleep 60; exit 0";
  // Three ranks are refused, so there are two.
  auto outcome = launch_script(4, script, {"--max-restarts", "1", "--min-ranks", "2"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(count(outcome.out, "] 2\n"), 2) << outcome.out;
  outcome = launch_script(4, script, {"--max-restarts", "1", "--min-ranks", "3"});
  EXPECT_EQ(outcome.status, 2) << outcome.err;
}

TEST(Launch, DoesNotStartAgainOnceASignalHasCome) {
  Program job(command(2, "trap 'exit 1' TERM; echo ready; while :; do sleep 0.05; done",
                      {"--max-restarts", "5"}));
  ASSERT_TRUE(job.wait_for_output("[1] ready"));
  job.signal(SIGTERM);
  const auto outcome = job.wait(seconds(20));
  EXPECT_NE(outcome.status, 0);
  EXPECT_EQ(count(outcome.err, "restart"), 0) << outcome.err;
}

TEST(Launch, RestartsOnTheHostsThatComeBackAndTakesALateOneAtTheNext) {
  const auto port = std::to_string(host_local_store(seconds(1)).port);
  const auto node = [&](int k) {
    // In each attempt but the last the ranks wait for a file, and fail.
    return command(
        1,
        "echo attempt $TORCHELASTIC_RESTART_COUNT of $WORLD_SIZE; "
        "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; "
        "while [ ! -e $FOLDER/fail$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done; "
        "exit 1",
        {"--max-restarts", "3", "--min-ranks", "1", "--rejoin", "1", "--nnodes", "2", "--node-rank",
         std::to_string(k), "--master-addr", "127.0.0.1", "--master-port", port});
  };
  const TemporaryFolder folder;
  const std::map<std::string, std::string> variables{{"FOLDER", folder.path()}};
  const auto fail_attempt = [&](int attempt) {
    test::write_file(folder.path() / ("fail" + std::to_string(attempt)), "");
  };
  Program first(node(0), variables);
  auto second = std::make_unique<Program>(node(1), variables);
  ASSERT_TRUE(first.wait_for_output("attempt 0 of 2"));
  ASSERT_TRUE(second->wait_for_output("attempt 0 of 2"));
  second.reset();  // the host is lost
  fail_attempt(0);
  ASSERT_TRUE(first.wait_for_output("attempt 1 of 1"));
  Program again(node(1), variables);
  const auto deadline = steady_clock::now() + seconds(20);
  while (again.err().find("node 1 waits for the next restart") == std::string::npos) {
    ASSERT_LT(steady_clock::now(), deadline) << again.err();
    usleep(10000);
  }
  // It stops nobody: the launchers look at each other twice a second.
  usleep(1'200'000);
  EXPECT_EQ(count(first.out(), "attempt 2"), 0) << first.out();
  fail_attempt(1);
  const auto outcome = first.wait(seconds(30));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("attempt 2 of 2"));
  const auto other = again.wait(seconds(30));
  EXPECT_EQ(other.status, 0) << other.err;
  EXPECT_THAT(other.out, HasSubstr("[1] attempt 2 of 2"));
}

TEST(Launch, AHostWhoseRanksAreDoneComesAgainIfARankOfAnotherIsKilledAtItsExit) {
  const auto port = std::to_string(host_local_store(seconds(1)).port);
  for (const int late : {0, 1}) {
    const auto node = [&](int k) {
      return command(1,
                     fmt::format("echo attempt $TORCHELASTIC_RESTART_COUNT; "
                                 "[ $RANK = {} ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && "
                                 "sleep 0.7 && kill -9 $$; exit 0",
                                 late),
                     {"--max-restarts", "3", "--nnodes", "2", "--node-rank", std::to_string(k),
                      "--master-addr", "127.0.0.1", "--master-port", port});
    };
    Program first(node(0));
    Program second(node(1));
    for (auto* each : {&first, &second}) {
      const auto outcome = each->wait(seconds(30));
      EXPECT_EQ(outcome.status, 0) << outcome.err;
      EXPECT_THAT(outcome.err, HasSubstr("restart 1 of 3"));
    }
    EXPECT_THAT(first.out(), HasSubstr("attempt 1"));
  }
}

TEST(Launch, ALauncherThatIsKilledWhileItWaitsForTheOthersComesAgain) {
  const auto port = std::to_string(host_local_store(seconds(1)).port);
  const auto node = [&](int k) {
    return command(1,
                   "echo attempt $TORCHELASTIC_RESTART_COUNT; "
                   "[ $RANK$TORCHELASTIC_RESTART_COUNT = 00 ] && sleep 60; exit 0",
                   {"--max-restarts", "3", "--nnodes", "2", "--node-rank", std::to_string(k),
                    "--master-addr", "127.0.0.1", "--master-port", port});
  };
  Program first(node(0));
  auto second = std::make_unique<Program>(node(1));
  ASSERT_TRUE(first.wait_for_output("attempt 0"));
  ASSERT_TRUE(second->wait_for_output("attempt 0"));
  usleep(300'000);  // its rank has ended, and it waits
  second.reset();
  Program again(node(1));
  EXPECT_EQ(again.wait(seconds(30)).status, 0);
  EXPECT_EQ(first.wait(seconds(30)).status, 0);
  EXPECT_THAT(again.out(), HasSubstr("attempt 1"));
}

TEST(Launch, GoesOnWithFewerHostsOnlyIfItMay) {
  const auto port = std::to_string(host_local_store(seconds(1)).port);
  const auto node = [&](int k) {
    return command(1, "echo attempt $TORCHELASTIC_RESTART_COUNT; sleep 1; exit 1",
                   {"--max-restarts", "3", "--rejoin", "1", "--nnodes", "2", "--node-rank",
                    std::to_string(k), "--master-addr", "127.0.0.1", "--master-port", port});
  };
  Program first(node(0));
  auto second = std::make_unique<Program>(node(1));
  ASSERT_TRUE(second->wait_for_output("attempt 0"));
  second.reset();  // the host is lost
  const auto outcome = first.wait(seconds(30));
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_EQ(count(outcome.out, "attempt 1"), 0) << outcome.out;
  EXPECT_THAT(outcome.err, HasSubstr("--min-ranks"));
}

TEST(Launch, NamesTheSignalThatKilledARank) {
  const auto outcome = launch_script(2, "if [ $RANK = 1 ]; then kill -KILL $$; fi; exec sleep 100");
  EXPECT_EQ(outcome.status, 128 + SIGKILL);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1 (pid "));
  EXPECT_THAT(outcome.err, HasSubstr("was killed by signal 9 (SIGKILL)"));
}

TEST(Launch, KillsRanksThatIgnoreSigterm) {
  const auto begin = steady_clock::now();
  const auto outcome = launch_script(
      2,
      "trap '' TERM; if [ $RANK = 1 ]; then sleep 0.2; exit 5; fi; while true; do sleep 100; done");
  EXPECT_EQ(outcome.status, 5);
  EXPECT_LT(steady_clock::now() - begin, seconds(5));
}

TEST(Launch, StopsWhatAFailedRanksPeersHaveStarted) {
  test::TemporaryFolder folder;
  const std::string started = folder / "started";
  const auto outcome = launch_script(2, "if [ $RANK = 1 ]; then until [ -e " + started +
                                            " ]; do sleep 0.05; done; exit 1; fi; "
                                            "sleep 100 & echo child=$!; touch " +
                                            started + "; exec sleep 100");
  const auto at = outcome.out.find("child=");
  ASSERT_NE(at, std::string::npos);
  EXPECT_TRUE(gone_within(std::stoi(outcome.out.substr(at + 6)), seconds(2)));
}

TEST(Launch, PassesASignalOnToEveryRankOnceAndWaits) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Program program(
        command(2,
                "trap 'echo caught; sleep 0.3; echo saved; exit 130' INT TERM HUP; echo ready; "
                "while true; do sleep 0.05; done"));
    while (count(program.out(), "ready") < 2) ASSERT_TRUE(program.wait_for_output("ready"));
    program.signal(signal);
    const auto outcome = program.wait();
    EXPECT_EQ(outcome.status, 130);
    EXPECT_EQ(count(outcome.out, "caught"), 2);
    EXPECT_EQ(count(outcome.out, "saved"), 2);
    EXPECT_THAT(outcome.err, Not(HasSubstr("error"))) << "a stop that was asked for is none";
  }
}

TEST(Launch, LeavesSignalsThatItIgnoresAlone) {
  auto words = command(2,
                       "trap 'echo caught' HUP; trap 'echo stopped; exit 143' TERM; echo ready; "
                       "while true; do sleep 0.05; done",
                       {}, {"env", "--default-signal=HUP"});
  words.insert(words.begin(), "nohup");
  Program program(words);
  while (count(program.out(), "ready") < 2) ASSERT_TRUE(program.wait_for_output("ready"));
  program.signal(SIGHUP);
  program.signal(SIGTERM);  // the first signal's effect comes first
  const auto outcome = program.wait();
  EXPECT_EQ(outcome.status, 143);
  EXPECT_EQ(count(outcome.out, "stopped"), 2);
  EXPECT_EQ(count(outcome.out, "caught"), 0);
}

TEST(Launch, OutlivesTheReaderOfItsOutput) {
  test::TemporaryFolder folder;
  const std::string done = folder / "done";
  // The launcher's reader has gone. Ranks have the signals that the launcher was started with.
  std::string launch = "exec 3> >(exec true); wait $!; exec env --default-signal=PIPE";
  for (const auto& word :
       command(2,
               "echo lost; sleep 0.3; echo lost too; sh -c \"kill -PIPE \\$\\$\";"
               "echo $? > " +
                   done + "$RANK"))
    launch += " '" + word + "'";
  const auto outcome = test::run({"bash", "-c", launch + " >&3"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (const char* rank : {"0", "1"})
    EXPECT_EQ(test::read_file(done + rank), std::to_string(128 + SIGPIPE) + "\n");
}

TEST(Launch, NoticesItsRanksEndsWhereItsParentIgnoredThem) {
  const auto ignoring = [](const std::vector<std::string>& words) {
    std::vector<std::string> all{"/usr/bin/env", "--ignore-signal=CHLD"};
    all.insert(all.end(), words.begin(), words.end());
    return all;
  };
  // A rank too must learn how its child ended: sh says 127 if it cannot.
  EXPECT_EQ(test::run(ignoring(command(2, "(exit 5) & wait $! || test $? = 5"))).status, 0);
  EXPECT_EQ(test::run(ignoring(command(2, "exit $RANK"))).status, 1);
  Program program(ignoring(command(2, "echo up; exec sleep 100")));
  ASSERT_TRUE(program.wait_for_output("[1] up"));
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait(seconds(30)).status, 128 + SIGTERM);
}

/// A pipe that somebody holds and nobody reads.
class FullPipe {
 public:
  FullPipe() {
    mkfifo(path().c_str(), 0600);
    reader_ = Descriptor(open(path().c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  }
  std::string path() const { return folder_ / "pipe"; }
  std::vector<std::string> command(const std::vector<std::string>& words) const {
    std::vector<std::string> all{"/bin/sh", "-c", "exec \"$@\" > " + path() + " 2>&1", "sh"};
    all.insert(all.end(), words.begin(), words.end());
    return all;
  }
  void wait_until_full() const {
    // A pipe's room counts by pages, of which short writes may leave parts empty.
    const auto deadline = steady_clock::now() + seconds(60);
    pollfd writable{reader_.get(), POLLOUT, 0};
    for (; poll(&writable, 1, 0) > 0; usleep(10000))
      ASSERT_LT(steady_clock::now(), deadline) << "the pipe does not fill";
  }
  void close() { reader_.close(); }

 private:
  test::TemporaryFolder folder_;
  Descriptor reader_;
};

TEST(Launch, PassesSignalsOnWhileNobodyReads) {
  const test::TemporaryFolder folder;
  const FullPipe pipe;
  Program program(pipe.command(
      command(2, fmt::format("trap 'touch {0}/told$RANK; kill $!; exit 143' TERM; yes & "
                             "touch {0}/ready$RANK; wait",
                             folder.path().string()))));
  pipe.wait_until_full();
  const auto deadline = steady_clock::now() + seconds(60);
  for (const char* name : {"ready0", "ready1"}) {
    for (; !std::filesystem::exists(folder / name); usleep(10000))
      ASSERT_LT(steady_clock::now(), deadline) << name << " is missing";
  }
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait(seconds(60)).status, 128 + SIGTERM);
  for (const char* name : {"told0", "told1"}) EXPECT_TRUE(std::filesystem::exists(folder / name));
}

/// Returns true if a process runs; a zombie does not.
bool runs(pid_t pid) {
  const auto status = test::read_file(fmt::format("/proc/{}/stat", pid));
  const auto name_end = status.rfind(") ");
  return name_end != std::string::npos && status[name_end + 2] != 'Z';
}

TEST(Launch, KillsAFailedRanksPeersWhileNobodyReads) {
  const test::TemporaryFolder folder;
  FullPipe pipe;
  Program program(pipe.command(command(
      2,
      fmt::format("if [ $RANK = 1 ]; then until [ -e {0}/full ]; do sleep 0.05; done; exit 3; fi; "
                  "trap '' TERM; echo $$ > {0}/pid; while :; do echo y; done",
                  folder.path().string()))));
  pipe.wait_until_full();
  const auto stubborn = static_cast<pid_t>(std::stoi(test::read_file(folder / "pid")));
  test::write_file(folder / "full", "");
  const auto deadline = steady_clock::now() + seconds(60);
  while (runs(stubborn) && steady_clock::now() < deadline) usleep(10000);
  EXPECT_FALSE(runs(stubborn));
  pipe.close();  // and the launcher waits no longer for its reader
  EXPECT_EQ(program.wait(seconds(60)).status, 3);
}

TEST(Launch, KillsAtTheSecondInterrupt) {
  Program program(
      command(2, "trap 'echo caught' INT; echo ready; while true; do sleep 0.05; done"));
  while (count(program.out(), "ready") < 2) ASSERT_TRUE(program.wait_for_output("ready"));
  program.signal(SIGINT);
  while (count(program.out(), "caught") < 2) ASSERT_TRUE(program.wait_for_output("caught"));
  program.signal(SIGINT);
  EXPECT_EQ(program.wait().status, 130);
}

TEST(Launch, RanksDieWithTheirLauncher) {
  Program program(command(2, "echo rank=$$; exec sleep 100"));
  while (count(program.out(), "rank=") < 2) ASSERT_TRUE(program.wait_for_output("rank="));
  const auto out = program.out();
  program.signal(SIGKILL);
  EXPECT_EQ(program.wait().status, 128 + SIGKILL);
  EXPECT_TRUE(gone_within(std::stoi(out.substr(out.find("rank=") + 5)), seconds(3)));
  EXPECT_TRUE(gone_within(std::stoi(out.substr(out.rfind("rank=") + 5)), seconds(3)));
}

TEST(Launch, NamesAProgramThatCannotBeRun) {
  const auto outcome = test::run({ZERO_PROGRAM, "launch", "-n", "2", "--", "/no/such/program"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("Cannot run '/no/such/program': No such file or directory"));
}

TEST(Launch, RefusesWhatMakesNoSense) {
  EXPECT_THROW(launch({.nproc = 0, .command = {"true"}}), ConfigError);
  EXPECT_THROW(launch({.nproc = 1}), ConfigError);
  EXPECT_THROW(
      launch(
          {.nproc = 1, .command = {"true"}, .logs = RankLogs::files, .log_dir = "/dev/null/logs"}),
      ConfigError);
}

TEST(Launch, GivesTheArgumentsOnUnchanged) {
  const auto outcome = test::run(
      {ZERO_PROGRAM, "launch", "-n", "1", "--", "/bin/echo", "-n", "--logs", "a b", "--", "$HOME"});
  EXPECT_EQ(outcome.out, "[0] --logs a b -- $HOME\n");
}

}  // namespace
}  // namespace zero::comm
