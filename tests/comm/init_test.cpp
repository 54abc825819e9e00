// zero::init() under real launchers.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

#include "tests/support/run_program.h"
#include "zero/comm/rendezvous.h"

namespace zero::comm {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;
using test::Outcome;
using test::Program;
using Variables = std::map<std::string, std::string>;
using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<std::string> kMpirun{"mpirun", "--allow-run-as-root", "--oversubscribe", "-n"};

std::vector<std::string> under_mpirun(int ranks, const std::string& mode) {
  auto command = kMpirun;
  command.insert(command.end(), {std::to_string(ranks), INIT_PROGRAM, mode});
  return command;
}

std::vector<std::string> under_launch(int ranks, const std::string& mode) {
  return {ZERO_PROGRAM, "launch", "-n", std::to_string(ranks), "--", INIT_PROGRAM, mode};
}

void expect_sums(const std::string& out, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_THAT(out, HasSubstr("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                               " sum " + std::to_string(ranks * (ranks + 1) / 2) + "\n"));
  }
}

TEST(Init, IsAGroupOfOneWithoutALauncher) {
  const auto outcome = test::run({INIT_PROGRAM});
  EXPECT_EQ(outcome.out, "rank 0 of 1 sum 1\n");
}

TEST(Init, MeetsUnderZeroLaunch) {
  const auto outcome = test::run(under_launch(3, "sum"));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  expect_sums(outcome.out, 3);
}

TEST(Init, MeetsUnderMpirunAndLeavesNoFile) {
  test::TemporaryFolder folder;
  const auto outcome = test::run(under_mpirun(3, "sum"), {{"TMPDIR", folder.path()}});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  expect_sums(outcome.out, 3);
  EXPECT_TRUE(std::filesystem::is_empty(folder / ("libzero-" + std::to_string(geteuid()))));
}

TEST(Init, MakesASecondGroup) {
  EXPECT_THAT(test::run(under_launch(2, "again")).out, HasSubstr("[1] again 2"));
  EXPECT_THAT(test::run(under_mpirun(2, "again")).out, HasSubstr("again 2"));
}

/// Returns the outcomes of ranks started by hand, each with the variables that `of_rank` gives it.
std::vector<Outcome> by_hand(int ranks, const std::function<Variables(int rank)>& of_rank) {
  std::vector<std::unique_ptr<Program>> programs;
  for (int rank = 0; rank < ranks; ++rank) {
    programs.push_back(
        std::make_unique<Program>(std::vector<std::string>{INIT_PROGRAM}, of_rank(rank)));
  }
  std::vector<Outcome> outcomes;
  for (auto& program : programs) outcomes.push_back(program->wait());
  return outcomes;
}

Variables torchrun(int rank, int ranks, uint16_t port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(ranks)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
          {"MASTER_ADDR", kLoopback},
          {"MASTER_PORT", std::to_string(port)},
          {"TEST_TIMEOUT_S", "20"}};
}

TEST(Init, MeetsInTorchrunsEnvironment) {
  const auto store = host_local_store(seconds(60));
  for (int attempt = 0; attempt < 2;
       ++attempt) {  // torchrun starts a failed job again, over the same store
    const auto outcomes = by_hand(2, [&](int rank) {
      auto variables = torchrun(rank, 2, store.port);
      variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
      // An agent that only hears that the other has started again does not count.
      variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(rank == 0 ? 0 : attempt);
      return variables;
    });
    expect_sums(outcomes[0].out + outcomes[1].out, 2);
  }
}

TEST(Init, MeetsAtAnAddressWithoutALaunchersStore) {
  const auto port = [] { return host_local_store(seconds(1)).port; }();
  const auto outcomes = by_hand(2, [&](int rank) { return torchrun(rank, 2, port); });
  expect_sums(outcomes[0].out + outcomes[1].out, 2);
}

TEST(Init, MeetsInSlurmsEnvironment) {
  const auto outcomes = by_hand(2, [&](int rank) {
    return Variables{{"SLURM_PROCID", std::to_string(rank)},
                     {"SLURM_NTASKS", "2"},
                     {"SLURM_LOCALID", std::to_string(rank)},
                     {"SLURM_JOB_ID", "test" + std::to_string(getpid())},
                     {"SLURM_STEP_ID", "0"}};
  });
  expect_sums(outcomes[0].out + outcomes[1].out, 2);
}

/// A script that starts ranks 0 and 1 as MPICH does, each by a script of its own that stays.
std::filesystem::path mpich_like(const test::TemporaryFolder& folder, const std::string& name) {
  const auto script = folder / name;
  test::write_file(script, fmt::format("#!/bin/sh\nexport PMI_SIZE=2\nfor rank in 0 1; do\n"
                                       "PMI_RANK=$rank sh -c '{}; exit $?' &\ndone\nwait\n",
                                       INIT_PROGRAM));
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  return script;
}

TEST(Init, MeetsUnderMpichThroughScriptsThatStay) {
  test::TemporaryFolder folder;
  const Variables variables{{"TMPDIR", folder.path()}, {"TEST_TIMEOUT_S", "20"}};
  const auto outcome = test::run({mpich_like(folder, "hydra_pmi_proxy")}, variables);
  expect_sums(outcome.out, 2);
}

TEST(Init, NamesScriptsThatStayWhereNoLauncherIsKnown) {
  test::TemporaryFolder folder;
  const Variables variables{{"TMPDIR", folder.path()}, {"TEST_TIMEOUT_S", "1"}};
  const auto outcome = test::run({mpich_like(folder, "some_launcher")}, variables);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("Rank 1 waited 1 s for rank 0"), HasSubstr("`exec`")));
}

TEST(Init, NamesARankThatNeverArrives) {
  const auto store = host_local_store(seconds(60));
  auto variables = torchrun(0, 2, store.port);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TEST_TIMEOUT_S"] = "1";
  const auto outcome = test::run({INIT_PROGRAM}, variables);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1 never arrived"));
}

// A stopped process takes connections, and never says a word.
TEST(Init, NamesAStoreThatDoesNotAnswer) {
  const auto port = [] { return host_local_store(seconds(1)).port; }();
  auto variables = torchrun(0, 2, port);
  Program host({INIT_PROGRAM}, variables);
  variables["RANK"] = variables["LOCAL_RANK"] = "1";
  variables["TEST_TIMEOUT_S"] = "2";
  const auto listens = [port] {
    std::ifstream table("/proc/net/tcp");
    std::ostringstream text;
    text << table.rdbuf();
    return text.str().find(fmt::format(":{:04X} 00000000:0000 0A", port)) != std::string::npos;
  };
  while (!listens()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  host.signal(SIGSTOP);
  const auto outcome = test::run({INIT_PROGRAM}, variables);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("127.0.0.1:" + std::to_string(port)),
                                 HasSubstr("answer"), HasSubstr("2 s")));
}

/// Starts ranks on virtual hosts, one letter each, over loopback; `of_last` is the last rank's.
std::vector<Outcome> on_hosts(const std::string& hosts,
                              const std::map<std::string, std::string>& of_last = {}) {
  const auto ranks = static_cast<int>(hosts.size());
  const auto port = [] { return host_local_store(seconds(1)).port; }();
  return by_hand(ranks, [&](int rank) {
    auto variables = torchrun(rank, ranks, port);
    const auto name = hosts.substr(static_cast<size_t>(rank), 1);
    const auto local = std::count(hosts.begin(), hosts.end(), name[0]);
    variables["LOCAL_WORLD_SIZE"] = std::to_string(local);
    variables["LOCAL_RANK"] = "0";
    variables["ZERO_HOST"] = "host-" + name;
    if (rank == ranks - 1) variables.insert(of_last.begin(), of_last.end());
    return variables;
  });
}

TEST(Init, RefusesUnevenHostsByName) {
  for (const auto& outcome : on_hosts("aab")) {
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("spread unevenly over 2 hosts"),
                                   HasSubstr("2 on host-a (ranks 0, 1), 1 on host-b (rank 2)"),
                                   HasSubstr("--nproc-per-node N")));
  }
}

TEST(Init, RefusesRanksThatAreNotInTheOrderOfTheirHosts) {
  for (const auto& outcome : on_hosts("abab")) {
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("in no order over 2 hosts"),
                                   HasSubstr("2 on host-a (ranks 0, 2), 2 on host-b (ranks 1, 3)"),
                                   HasSubstr("--nproc-per-node 2")));
  }
}

// mpirun, for one, passes no variables on to other hosts unless it is told to.
TEST(Init, RefusesHostsThatWantDifferentTransports) {
  const auto begin = steady_clock::now();
  for (const auto& outcome : on_hosts("ab", {{"ZERO_TRANSPORT", "mpich"}})) {
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("ZERO_TRANSPORT is not the same on all hosts"),
                                   HasSubstr("'gloo' for rank 0 (host-a)"),
                                   HasSubstr("'mpich' for rank 1 (host-b)")));
  }
  EXPECT_LT(steady_clock::now() - begin, seconds(10)) << "nobody waits for the other transport";
}

TEST(Init, RefusesATransportThatThereIsNot) {
  const auto outcome = test::run({INIT_PROGRAM}, {{"ZERO_TRANSPORT", "openmp"}});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr("ZERO_TRANSPORT is 'openmp'"), HasSubstr("Did you mean 'openmpi'?")));
}

TEST(Init, AsksForAnAddressWhereRanksAreOnSeveralHosts) {
  const auto outcome = test::run(
      {INIT_PROGRAM},
      {{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("MPICH started 4 ranks, 2 of them on this host"),
                                 HasSubstr("-genv MASTER_ADDR HOST")));
}

TEST(Init, ADeathEndsTheJobWithinSeconds) {
  for (const auto& command : {under_launch(3, "die"), under_mpirun(3, "die")}) {
    const auto begin = steady_clock::now();
    const auto outcome = test::run(command);
    EXPECT_LT(steady_clock::now() - begin, seconds(5 + 3)) << "5 s, and the start";
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err + outcome.out, HasSubstr("rank 1 "));
  }
  const auto outcome = test::run(under_launch(2, "die"));
  EXPECT_EQ(outcome.status, 128 + SIGKILL);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1 (pid "));
}

}  // namespace
}  // namespace zero::comm
