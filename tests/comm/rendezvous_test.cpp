#include "zero/comm/rendezvous.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <future>
#include <map>
#include <thread>

#include "tests/support/message_of.h"
#include "tests/support/run_program.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/comm/process.h"
#include "zero/comm/token.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Variables = std::map<std::string, std::string>;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Job job_of(const Variables& variables) {
  return job_from_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string complaint_about(const Variables& variables) {
  return zero::message_of<ConfigError>([&] { job_of(variables); });
}

const Variables kTorchrun{{"RANK", "1"},
                          {"WORLD_SIZE", "4"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "localhost"},
                          {"MASTER_PORT", "29500"}};

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}
Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(JobFromEnvironment, SaysWhichTransportIsAskedFor) {
  EXPECT_EQ(job_of({}).transport, "gloo");
  EXPECT_EQ(job_of({{"ZERO_TRANSPORT", "mpich"}}).transport, "mpich");
  EXPECT_EQ(job_of({{"ZERO_TRANSPORT", "mpi"}}).transport, "mpi");
  EXPECT_EQ(
      job_of(
          {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}, {"ZERO_TRANSPORT", "mpi"}})
          .transport,
      "openmpi");
  EXPECT_THAT(complaint_about({{"ZERO_TRANSPORT", "glo"}}), HasSubstr("Did you mean 'gloo'?"));
}

TEST(JobFromEnvironment, IsAloneWithoutALauncher) {
  const auto job = job_of({{"HOME", "/"}});
  EXPECT_EQ(job.launcher, "");
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.size, 1);
}

TEST(JobFromEnvironment, ReadsTorchrun) {
  const auto job = job_of(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True"));
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.size, 4);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_size, 4);
  EXPECT_THAT(job.addresses, ElementsAre("localhost"));
  EXPECT_EQ(job.port, 29500);
  EXPECT_TRUE(job.launcher_hosts_store);
  EXPECT_FALSE(job_of(kTorchrun).launcher_hosts_store);
  EXPECT_EQ(job_of(with(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "2")).prefix,
            job_of(kTorchrun).prefix)
      << "each agent counts its own restarts";
}

TEST(JobFromEnvironment, PutsTheLaunchersTokenIntoThePrefix) {
  const auto token = random_token();
  const auto job = job_of(with(kTorchrun, kTokenVariable, token));
  EXPECT_THAT(job.prefix, EndsWith("/" + token));
  EXPECT_THAT(job.prefix, StartsWith(job_of(kTorchrun).prefix));
  for (const std::string wrong : {"", "abc", "../../../../../../../../../../etc"}) {
    const auto complaint = complaint_about(with(kTorchrun, kTokenVariable, wrong));
    EXPECT_THAT(complaint, AllOf(HasSubstr(kTokenVariable), HasSubstr("32 hexadecimal digits")));
  }
}

TEST(JobFromEnvironment, TellsZeroLaunchFromTorchrun) {
  const auto launched = with(kTorchrun, kLauncherVariable, kOwnLauncher);
  EXPECT_EQ(job_of(launched).launcher, "zero launch");
  EXPECT_THAT(complaint_about(without(launched, "RANK")), HasSubstr("zero launch sets both"));
  EXPECT_EQ(job_of(kTorchrun).launcher, "torchrun");
  EXPECT_EQ(job_of(with(launched, "TORCHELASTIC_RUN_ID", "7")).launcher, "torchrun")
      << "which `zero launch` has started";
}

TEST(JobFromEnvironment, ReadsOpenMpi) {
  const auto job = job_of({{"OMPI_COMM_WORLD_RANK", "2"},
                           {"OMPI_COMM_WORLD_SIZE", "3"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                           {"PMIX_NAMESPACE", "77.1"},
                           {"PMI_RANK", "9"}});
  EXPECT_EQ(job.launcher, "mpirun");
  EXPECT_EQ(job.rank, 2);
  EXPECT_EQ(job.size, 3);
  EXPECT_EQ(job.port, 0);
  EXPECT_THAT(job.key, HasSubstr("77.1"));
}

TEST(JobFromEnvironment, ReadsMpich) {
  const auto job = job_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}});
  EXPECT_EQ(job.launcher, "MPICH");
  EXPECT_EQ(job.size, 2);
  EXPECT_THAT(job.key, HasSubstr(std::to_string(getppid())));
}

TEST(JobFromEnvironment, ReadsASlurmStepButNotABatchScript) {
  const Variables step{{"SLURM_PROCID", "1"},
                       {"SLURM_NTASKS", "2"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_JOB_ID", "42"},
                       {"SLURM_STEP_ID", "3"}};
  const auto job = job_of(step);
  EXPECT_EQ(job.launcher, "Slurm");
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.size, 2);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_THAT(job.key, HasSubstr("42.3"));
  EXPECT_EQ(job_of(without(step, "SLURM_STEP_ID")).size, 1);
  EXPECT_EQ(job_of(with(step, "SLURM_STEP_NUM_TASKS", "4")).size, 4)
      << "a step may have fewer tasks than its job";
  EXPECT_TRUE(job.addresses.empty()) << "one node: by file";
}

// The variables that Debian 12's OpenMPI 4.1.4, MPICH 4.0.2 and Slurm 22.05 set for 2 ranks on each
// of the hosts zh1 and zh2, in the first rank of zh2. Variables that nobody reads here are left
// out.
const Variables kOpenMpiOnTwoHosts{
    {"OMPI_COMM_WORLD_RANK", "2"},
    {"OMPI_COMM_WORLD_SIZE", "4"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"OMPI_MCA_ess_base_jobid", "688324609"},
    {"OMPI_MCA_orte_hnp_uri", "688324608.0;tcp://10.77.0.1:47315"},
    {"OMPI_MCA_orte_local_daemon_uri", "688324608.1;tcp://10.77.0.2:59807"},
    {"PMIX_NAMESPACE", "688324609"},
    {"PMIX_SERVER_URI41", "688324608.1;tcp4://127.0.0.1:56961"}};
const Variables kMpichOnTwoHosts{{"HYDI_CONTROL_FD", "7"}, {"PMI_FD", "8"},
                                 {"PMI_RANK", "2"},        {"PMI_SIZE", "4"},
                                 {"MPI_LOCALNRANKS", "2"}, {"MPI_LOCALRANKID", "0"}};
const Variables kSlurmOnTwoHosts{{"SLURM_JOB_ID", "1"},
                                 {"SLURM_STEP_ID", "0"},
                                 {"SLURM_PROCID", "2"},
                                 {"SLURM_LOCALID", "0"},
                                 {"SLURM_NTASKS", "4"},
                                 {"SLURM_NNODES", "2"},
                                 {"SLURM_STEP_NUM_TASKS", "4"},
                                 {"SLURM_STEP_NUM_NODES", "2"},
                                 {"SLURM_STEP_NODELIST", "zh[1-2]"},
                                 {"SLURM_JOB_NODELIST", "zh[1-2]"},
                                 {"SLURM_LAUNCH_NODE_IPADDR", "10.77.0.1"}};
const Variables kPmi2{{"PMI_FD", "13"}, {"PMI_JOBID", "1.0"}, {"PMI_RANK", "2"}, {"PMI_SIZE", "4"}};

void expect_rank_2_of_4_on_2_hosts(const Job& job) {
  EXPECT_EQ(job.rank, 2);
  EXPECT_EQ(job.size, 4);
  EXPECT_EQ(job.local_rank, 0);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_TRUE(job.across_hosts());
}

TEST(JobFromEnvironment, MeetsAtTheHostOfMpirun) {
  const auto job = job_of(kOpenMpiOnTwoHosts);
  expect_rank_2_of_4_on_2_hosts(job);
  EXPECT_THAT(job.addresses, ElementsAre("10.77.0.1"));
  EXPECT_GE(job.port, 20000) << "not one that the system gives to clients";
  EXPECT_LT(job.port, 32768);
  EXPECT_NE(job.port, job_of(with(kOpenMpiOnTwoHosts, "PMIX_NAMESPACE", "688324610")).port);
  EXPECT_THAT(job.prefix, HasSubstr("688324609")) << "the keys are this job's alone";
  EXPECT_THAT(job_of(with(kOpenMpiOnTwoHosts, "OMPI_MCA_orte_hnp_uri",
                          "1.0;tcp://10.0.0.1,10.1.0.1:47;tcp6://[fe80::1]:48"))
                  .addresses,
              ElementsAre("10.0.0.1", "10.1.0.1"));
  EXPECT_THAT(job_of(with(kOpenMpiOnTwoHosts, "OMPI_MCA_orte_hnp_uri", "1.0;tcp6://[fe80::1]:48"))
                  .addresses,
              ElementsAre("fe80::1"));
  EXPECT_THAT(complaint_about(without(kOpenMpiOnTwoHosts, "OMPI_MCA_orte_hnp_uri")),
              HasSubstr("mpirun -x MASTER_ADDR=HOST"));
}

// These are OpenMPI 5.0.11's.
TEST(JobFromEnvironment, MeetsAtTheHostThatIsInTheJobsNameOfOpenMpi5) {
  const Variables variables{{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "prterun-zh1-9@1"},
                            {"PMIX_SERVER_URI41", "prterun-zh1-9@0.1;tcp4://127.0.0.1:43823"}};
  const auto job = job_of(variables);
  expect_rank_2_of_4_on_2_hosts(job);
  EXPECT_THAT(job.addresses, ElementsAre("zh1"));
  EXPECT_THAT(job_of(with(variables, "PMIX_NAMESPACE", "prterun-node-1-4711@1")).addresses,
              ElementsAre("node-1"));
}

TEST(JobFromEnvironment, MeetsAtTheFirstNodeOfASlurmStepWhateverItsMpi) {
  auto under_pmi2 = kSlurmOnTwoHosts;
  under_pmi2.insert(kPmi2.begin(), kPmi2.end());
  for (const auto& variables : {kSlurmOnTwoHosts, under_pmi2}) {
    const auto job = job_of(variables);
    EXPECT_EQ(job.launcher, "Slurm");
    expect_rank_2_of_4_on_2_hosts(job);
    EXPECT_THAT(job.addresses, ElementsAre("zh1", "10.77.0.1"));
    EXPECT_GE(job.port, 20000);
    EXPECT_NE(job.port, job_of(with(variables, "SLURM_STEP_ID", "1")).port);
  }
}

TEST(JobFromEnvironment, FindsTheFirstNameInSlurmsLists) {
  const auto first = [](const std::string& list) {
    return job_of(with(kSlurmOnTwoHosts, "SLURM_STEP_NODELIST", list)).addresses.at(0);
  };
  EXPECT_EQ(first("alpha,beta"), "alpha");
  EXPECT_EQ(first("node[07-09,12],gpu1"), "node07");
  EXPECT_EQ(first("node[3,5]"), "node3");
  EXPECT_EQ(first("rack[1-2]-node[010-011].site"), "rack1-node010.site");
}

TEST(JobFromEnvironment, AsksMpichForAnAddressWhereHostsAreSeveral) {
  EXPECT_THAT(complaint_about(kMpichOnTwoHosts),
              AllOf(HasSubstr("MPICH started 4 ranks, 2 of them on this host"),
                    HasSubstr("-genv MASTER_ADDR")));
  const auto job =
      job_of(with(with(kMpichOnTwoHosts, "MASTER_ADDR", "zh1"), "MASTER_PORT", "29500"));
  expect_rank_2_of_4_on_2_hosts(job);
  EXPECT_THAT(job.addresses, ElementsAre("zh1"));
}

TEST(JobFromEnvironment, ReadsMpichInsideASlurmAllocation) {
  auto variables = with(with(kMpichOnTwoHosts, "MASTER_ADDR", "zh1"), "MASTER_PORT", "29500");
  // The variables of mpiexec's helpers, one a node, which srun started.
  variables.insert(kSlurmOnTwoHosts.begin(), kSlurmOnTwoHosts.end());
  variables["SLURM_PROCID"] = "1";
  variables["SLURM_NTASKS"] = variables["SLURM_STEP_NUM_TASKS"] = "2";
  const auto job = job_of(variables);
  EXPECT_EQ(job.launcher, "MPICH");
  expect_rank_2_of_4_on_2_hosts(job);
}

TEST(JobFromEnvironment, TakesWhatIsSaidOverWhatTheLauncherKnows) {
  for (const auto& variables : {kOpenMpiOnTwoHosts, kSlurmOnTwoHosts}) {
    const auto known = job_of(variables);
    const auto addressed = job_of(with(variables, "MASTER_ADDR", "10.9.9.9"));
    EXPECT_THAT(addressed.addresses, ElementsAre("10.9.9.9"));
    EXPECT_EQ(addressed.port, known.port);
    const auto other_port = job_of(with(variables, "MASTER_PORT", "4711"));
    EXPECT_EQ(other_port.addresses, known.addresses);
    EXPECT_EQ(other_port.port, 4711);
  }
}

TEST(JobFromEnvironment, TakesAnAddressFromAnyLauncher) {
  const auto job =
      job_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}});
  EXPECT_THAT(job.addresses, ElementsAre("h"));
  EXPECT_EQ(job.port, 1);
}

TEST(JobFromEnvironment, NamesTheVariableItsValueAndWhatItShouldBe) {
  EXPECT_THAT(complaint_about(with(kTorchrun, "RANK", "one")),
              AllOf(HasSubstr("RANK is 'one'"), HasSubstr("whole number")));
  EXPECT_THAT(complaint_about(with(kTorchrun, "RANK", "")), HasSubstr("RANK is ''"));
  EXPECT_THAT(complaint_about(with(kTorchrun, "RANK", "-1")), HasSubstr("RANK is '-1'"));
  EXPECT_THAT(complaint_about(with(kTorchrun, "RANK", "1x")), HasSubstr("RANK is '1x'"));
  EXPECT_THAT(complaint_about(with(kTorchrun, "RANK", "4")),
              AllOf(HasSubstr("RANK is 4"), HasSubstr("WORLD_SIZE is 4")));
  EXPECT_THAT(complaint_about(with(kTorchrun, "WORLD_SIZE", "0")), HasSubstr("WORLD_SIZE is '0'"));
  EXPECT_THAT(complaint_about(with(kTorchrun, "MASTER_PORT", "65536")),
              HasSubstr("MASTER_PORT is '65536'"));
  EXPECT_THAT(complaint_about(with(kTorchrun, "MASTER_ADDR", "")), HasSubstr("MASTER_ADDR is ''"));
  EXPECT_THAT(complaint_about(with(kTorchrun, "LOCAL_RANK", "7")), HasSubstr("LOCAL_RANK is 7"));
}

TEST(JobFromEnvironment, WantsBothOfAPair) {
  EXPECT_THAT(complaint_about(without(kTorchrun, "RANK")),
              AllOf(HasSubstr("RANK is not set"), HasSubstr("WORLD_SIZE is")));
  EXPECT_THAT(complaint_about(without(kTorchrun, "WORLD_SIZE")),
              HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(complaint_about(without(kTorchrun, "MASTER_PORT")),
              HasSubstr("MASTER_PORT is not set"));
  EXPECT_THAT(complaint_about(without(without(kTorchrun, "MASTER_PORT"), "MASTER_ADDR")),
              HasSubstr("MASTER_PORT are not set"));
  EXPECT_THAT(complaint_about({{"OMPI_COMM_WORLD_RANK", "0"}}),
              HasSubstr("OMPI_COMM_WORLD_SIZE is not set"));
  EXPECT_THAT(complaint_about({{"PMI_SIZE", "1"}}), HasSubstr("PMI_RANK is not set"));
  EXPECT_THAT(complaint_about({{"SLURM_PROCID", "0"}}), HasSubstr("SLURM_NTASKS is not set"));
}

/// Returns the error of each of `size` ranks (threads here) at a meeting, or "".
std::vector<std::string> meet_all(const Job& job, const std::vector<int>& ranks,
                                  milliseconds timeout, const std::filesystem::path& folder,
                                  int meetings = 1) {
  std::vector<std::string> messages(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        Job mine = job;
        mine.rank = ranks[i];
        for (int meeting = 0; meeting < meetings; ++meeting) {
          const auto store = join_store(mine, timeout, folder).store;
          if (store->add("sum", 1) > job.size) messages[i] = "an earlier meeting's keys";
          store->set("done/" + std::to_string(mine.rank), "");
          // Rank 0 may host the store, so it stays until all have finished with it.
          for (int rank = 0; rank < job.size; ++rank)
            store->wait({"done/" + std::to_string(rank)}, seconds(20));
          store->add("left", 1);
          while (mine.rank == 0 && store->add("left", 0) < job.size)
            std::this_thread::sleep_for(milliseconds(5));
        }
      } catch (const Error& error) {
        messages[i] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return messages;
}

/// A process that has ended and that nobody has waited for, and the time when it started.
class Zombie {
 public:
  Zombie() : pid_(fork()) {
    if (pid_ == 0) {
      pause();
      _exit(0);
    }
    started_ = start_time(pid_).value_or(0);
    kill(pid_, SIGKILL);
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  Zombie(const Zombie&) = delete;
  Zombie& operator=(const Zombie&) = delete;
  ~Zombie() { waitpid(pid_, nullptr, 0); }
  pid_t pid() const { return pid_; }
  uint64_t started() const { return started_; }

 private:
  pid_t pid_;
  uint64_t started_ = 0;
};

class Meet : public ::testing::Test {
 protected:
  Job job(int size) const {
    return {.launcher = "mpirun", .size = size, .local_size = size, .key = "k/1", .prefix = "p"};
  }
  std::filesystem::path only_file() const { return folder_ / "job-k_1"; }
  bool empty() const { return std::filesystem::is_empty(folder_.path()); }
  test::TemporaryFolder folder_;
};

TEST_F(Meet, JoinsTheRanksOfOneHostAndLeavesNothingBehind) {
  for (const auto& message : meet_all(job(3), {0, 1, 2}, seconds(20), folder_.path()))
    EXPECT_EQ(message, "");
  EXPECT_TRUE(empty());
}

TEST_F(Meet, GivesAFreshStoreEachTime) {
  for (const auto& message : meet_all(job(2), {0, 1}, seconds(20), folder_.path(), 3))
    EXPECT_EQ(message, "");
}

TEST_F(Meet, IgnoresWhatACrashedJobLeftBehind) {
  auto other = host_local_store(seconds(10));  // somebody else's store, on the port of the dead job
  const auto port = std::to_string(other.port);
  const Job leftover = job(2);
  const Zombie zombie;
  // The files name a process that has ended, one whose end its parent has not asked for yet, one
  // that runs but was started at another moment, one that gives no token, and garbage.
  const auto self = std::to_string(getpid());
  const auto token = " " + random_token() + "\n";
  for (const std::string& text :
       {fmt::format("{} 4194304 1{}", port, token),
        fmt::format("{} {} {}{}", port, zombie.pid(), zombie.started(), token),
        fmt::format("{} {} 1{}", port, self, token),
        fmt::format("{} {} {} abc\n", port, self, start_time(getpid()).value_or(0)),
        std::string("garbage")}) {
    test::write_file(only_file(), text);
    for (const auto& message : meet_all(leftover, {0, 1}, seconds(20), folder_.path()))
      EXPECT_EQ(message, "");
    EXPECT_TRUE(empty());
    test::write_file(only_file(), text);
    const auto messages = meet_all(leftover, {1}, milliseconds(300), folder_.path());
    EXPECT_THAT(messages[0], AllOf(HasSubstr("waited 0.3 s for rank 0"), HasSubstr("job-k_1")));
  }
}

TEST_F(Meet, RemovesWhatJobsLeftBehindADayAgo) {
  const auto old = folder_ / "job-old", fresh = folder_ / "job-fresh", foreign = folder_ / "notes";
  for (const auto& file : {old, fresh, foreign}) test::write_file(file, "1 4194304 1\n");
  const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(25);
  for (const auto& file : {old, foreign}) std::filesystem::last_write_time(file, long_ago);
  for (const auto& message : meet_all(job(2), {0, 1}, seconds(20), folder_.path()))
    EXPECT_EQ(message, "");
  EXPECT_FALSE(std::filesystem::exists(old));
  EXPECT_TRUE(std::filesystem::exists(fresh)) << "its job may be starting";
  EXPECT_TRUE(std::filesystem::exists(foreign)) << "not a job's";
}

TEST_F(Meet, TakesATimeoutBeyondAllClocks) {
  for (const auto& message : meet_all(job(2), {0, 1}, milliseconds::max(), folder_.path()))
    EXPECT_EQ(message, "");
}

TEST_F(Meet, NamesTheRanksThatNeverArrived) {
  const auto messages = meet_all(job(4), {0, 2}, milliseconds(800), folder_.path());
  for (const auto& message : messages) EXPECT_THAT(message, HasSubstr("ranks 1, 3 never arrived"));
  EXPECT_TRUE(empty());
}

/// Starts ranks whose launcher hosts the store, and keeps it when it starts them again.
class MeetInALaunchersStore : public Meet {
 protected:
  Job client(int size) const {
    Job job = Meet::job(size);
    job.addresses = {kLoopback};
    job.port = launchers_.port;
    job.launcher_hosts_store = true;
    return job;
  }
  std::vector<std::string> meet(int size, const std::vector<int>& ranks, milliseconds timeout) {
    return meet_all(client(size), ranks, timeout, folder_.path());
  }
  void expect_to_meet(int size) {
    std::vector<int> all;
    for (int rank = 0; rank < size; ++rank) all.push_back(rank);
    EXPECT_THAT(meet(size, all, seconds(20)), ::testing::Each(""));
  }
  c10d::Store& store() { return *launchers_.store; }
  /// Returns the name of the newest meeting, once there is one.
  std::string current() { return store().get_to_str("p/current"); }

 private:
  LocalStore launchers_ = host_local_store(seconds(20));
};

TEST_F(MeetInALaunchersStore, Meets) {
  for (const auto& message : meet_all(client(2), {0, 1}, seconds(20), folder_.path(), 2))
    EXPECT_EQ(message, "");
}

TEST_F(MeetInALaunchersStore, MeetsAgainAfterAnAttemptThatMet) {
  expect_to_meet(2);
  expect_to_meet(2);
  expect_to_meet(3);  // with a node more
  expect_to_meet(2);
}

TEST_F(MeetInALaunchersStore, MeetsAgainAfterAttemptsOfWhichSomeRanksNeverCame) {
  for (const auto& came : {std::vector<int>{0}, {1}, {0, 2}, {1, 2}}) {
    for (const auto& message : meet(3, came, milliseconds(200)))
      EXPECT_THAT(message, HasSubstr("never arrived"));
  }
  expect_to_meet(3);
}

TEST_F(MeetInALaunchersStore, ARankThatSignedInWithADeadAttemptSignsInAnew) {
  EXPECT_THAT(meet(2, {0}, milliseconds(200))[0], HasSubstr("rank 1 never arrived"));
  const auto dead = current();
  auto early = std::async(std::launch::async, [&] { return meet(2, {1}, seconds(20)); });
  store().wait({"p/" + dead + "/here/1"}, seconds(20));  // the rank takes that for the present one
  EXPECT_THAT(meet(2, {0}, seconds(20)), ElementsAre(""));
  EXPECT_THAT(early.get(), ElementsAre(""));
}

TEST_F(MeetInALaunchersStore, ARankWaitsWhereTheNewestAttemptIsOver) {
  expect_to_meet(2);
  EXPECT_THAT(meet(2, {1}, milliseconds(300))[0], HasSubstr("rank 0 never arrived"));
}

TEST_F(Meet, HostsAStoreAtTheAddressItIsGiven) {
  Job addressed = job(2);
  addressed.addresses = {"localhost"};
  addressed.port = [] {
    return host_local_store(seconds(1)).port;
  }();  // free, now that it is closed
  for (const auto& message : meet_all(addressed, {0, 1}, seconds(20), folder_.path(), 2))
    EXPECT_EQ(message, "");
}

/// Returns true if somebody listens at `address`.
bool listens(const char* address, uint16_t port) {
  const Descriptor client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in there{};
  there.sin_family = AF_INET;
  there.sin_port = htons(port);
  inet_pton(AF_INET, address, &there.sin_addr);
  return connect(client.get(), reinterpret_cast<const sockaddr*>(&there), sizeof(there)) == 0;
}

TEST_F(Meet, ListensAtTheAddressItIsGivenAlone) {
  Job addressed = job(2);
  addressed.addresses = {kLoopback};
  addressed.port = [] { return host_local_store(seconds(1)).port; }();
  c10::intrusive_ptr<c10d::Store> hosted;
  std::thread rank_zero([&] { hosted = join_store(addressed, seconds(60), folder_.path()).store; });
  while (!listens(kLoopback, addressed.port)) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_FALSE(listens("127.0.0.2", addressed.port)) << "another address of this host";
  Job other = addressed;
  other.rank = 1;
  join_store(other, seconds(60), folder_.path());
  rank_zero.join();
}

TEST_F(Meet, ListensNowhereWhereTheAddressIsAnotherHosts) {
  Job elsewhere = job(2);
  elsewhere.addresses = {"192.0.2.1"};  // the address is kept for examples: nobody has it
  elsewhere.port = [] { return host_local_store(seconds(1)).port; }();
  EXPECT_THAT(meet_all(elsewhere, {0}, seconds(20), folder_.path())[0],
              AllOf(HasSubstr("could not open the job's store at 192.0.2.1"),
                    HasSubstr("an address of this host")));
}

TEST_F(MeetInALaunchersStore, PutsKeysBehindATokenThatRankZeroMakes) {
  std::vector<int> found(2);
  std::vector<std::thread> ranks;
  const auto start = [&](int rank) {
    ranks.emplace_back([&, rank, mine = client(2)]() mutable {
      mine.rank = rank;
      const auto joined = join_store(mine, seconds(60), folder_.path()).store;
      found[static_cast<size_t>(rank)] = joined->check({"word"}) ? 1 : 0;
    });
  };
  start(0);
  // Somebody who sees where the ranks meet writes what they will look for.
  for (const auto& where : {std::string("p/"), "p/" + current() + "/"})
    store().set(where + "word", "of a stranger");
  start(1);
  for (auto& rank : ranks) rank.join();
  EXPECT_THAT(found, ::testing::Each(0));
}

TEST_F(MeetInALaunchersStore, RefusesARollCallThatAnotherHasEnded) {
  store().set("p/current", "x");
  auto rank = std::async(std::launch::async, [&] { return meet(2, {1}, seconds(20)); });
  store().wait({"p/x/here/1"}, seconds(20));
  store().set("p/x/complete", "go on");
  EXPECT_THAT(rank.get()[0], HasSubstr("that ranks of this job did not write"));
}

TEST(Launch, GivesAllRanksOneTokenThatIsNewEachTime) {
  const auto tokens = [] {
    const auto outcome = test::run({ZERO_PROGRAM, "launch", "-n", "2", "--logs", "prefix", "--",
                                    "sh", "-c", std::string("echo token=$") + kTokenVariable});
    std::vector<std::string> found;
    for (size_t at = 0; (at = outcome.out.find("token=", at)) != std::string::npos; ++at)
      found.push_back(outcome.out.substr(at + 6, 32));
    return found;
  };
  const auto first = tokens();
  ASSERT_EQ(first.size(), 2u);
  EXPECT_TRUE(is_token(first[0]));
  EXPECT_EQ(first[0], first[1]);
  EXPECT_NE(first[0], tokens().at(0));
}

TEST_F(Meet, NamesAnAddressThatCannotBeReached) {
  Job lost = job(2);
  lost.addresses = {kLoopback};
  lost.port = [] { return host_local_store(seconds(1)).port; }();
  const auto messages = meet_all(lost, {1}, milliseconds(500), folder_.path());
  EXPECT_THAT(messages[0], HasSubstr("127.0.0.1:" + std::to_string(lost.port)));
}

TEST_F(Meet, NamesAPortThatIsTaken) {
  const auto local = host_local_store(seconds(20));
  Job taken = job(2);
  taken.addresses = {kLoopback};
  taken.port = local.port;
  const auto messages = meet_all(taken, {0}, milliseconds(500), folder_.path());
  EXPECT_THAT(messages[0], AllOf(HasSubstr("could not open"), HasSubstr(std::to_string(local.port)),
                                 HasSubstr("MASTER_PORT")));
}

TEST(RendezvousFolder, IsThisUsersAlone) {
  test::TemporaryFolder folder;
  setenv("TMPDIR", folder.path().c_str(), 1);
  const auto path = rendezvous_folder();
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  EXPECT_EQ(rendezvous_folder(), path);
  chmod(path.c_str(), 0777);
  EXPECT_THROW(rendezvous_folder(), ConfigError);
  setenv("TMPDIR", "/no/such/folder", 1);
  EXPECT_THROW(rendezvous_folder(), ConfigError);
  unsetenv("TMPDIR");
}

}  // namespace
}  // namespace zero::comm
