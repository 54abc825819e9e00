// Tests the findings of `zero doctor`, on machines that folders play, and on this one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "apps/zero/doctor_checks.h"
#include "tests/support/run_program.h"
#include "zero/base/error.h"

namespace zero::app::checkup {
namespace {

namespace fs = std::filesystem;
using test::run;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Json = nlohmann::json;

comm::Lookup variables(std::map<std::string, std::string> all) {
  return [all = std::move(all)](const std::string& name) -> std::optional<std::string> {
    const auto found = all.find(name);
    if (found == all.end()) return std::nullopt;
    return found->second;
  };
}

/// Four cores, all of them this process's.
class Machine : public ::testing::Test {
 protected:
  Machine() {
    root.write("sys/devices/system/cpu/online", "0-3\n");
    root.write("proc/self/status", "Name: zero\nCpus_allowed_list:\t0-3\n");
    root.write("proc/self/cgroup", "0::/job\n");
    root.write("sys/fs/cgroup/job/cgroup.procs", "");
  }
  /// The finding `name` of a check; what the report promises of every finding is checked on the
  /// way.
  template <class Check, class... Arguments>
  Finding found(const std::string& name, Check check, const Arguments&... arguments) const {
    Report report;
    check(report, arguments...);
    Finding result;
    for (const auto& finding : report.findings()) {
      EXPECT_FALSE(finding.value.empty()) << finding.name;
      EXPECT_EQ(finding.change.empty(), finding.mark == Mark::ok) << finding.name;
      if (finding.mark != Mark::ok) {
        EXPECT_THAT(finding.change, EndsWith("."));
        EXPECT_THAT(finding.cost, EndsWith("."));
      }
      if (finding.name == name) result = finding;
    }
    EXPECT_EQ(result.name, name);
    return result;
  }
  Finding cores(const std::string& name, int ranks,
                std::map<std::string, std::string> set = {}) const {
    return found(name, check_cores, root.path(), variables(std::move(set)), ranks);
  }
  Finding memory(const std::string& name, int ranks = 1) const {
    return found(name, check_memory, root.path(), ranks);
  }
  Finding limits(const std::string& name, int ranks) const {
    return found(name, check_limits, root.path(), Plan{.ranks = ranks}, 4);
  }
  Finding disk(const std::string& name, const fs::path& path) const {
    return found(name, check_disk, root.path(), path.string());
  }
  Finding links(const std::string& name, int hosts,
                std::map<std::string, std::string> set = {}) const {
    return found(name, check_links, root.path(), variables(std::move(set)), hosts);
  }
  const TemporaryFolder root;
};

TEST_F(Machine, ThatFitsHasNothingToChange) {
  const auto threads = cores("threads", 2);
  EXPECT_EQ(threads.mark, Mark::ok);
  EXPECT_THAT(threads.value, StartsWith("2 ranks x 2 threads"));
  EXPECT_EQ(cores("available", 1).value, "4 cores");
  root.write("proc/self/status", "Cpus_allowed_list:\t1-2\n");
  EXPECT_EQ(cores("available", 1).value, "2 of 4 cores");
  EXPECT_THAT(cores("threads", 2).value, StartsWith("2 ranks x 1 thread"));
}

TEST_F(Machine, QuotaBelowTheThreadsIsAProblemInBothVersionsOfCgroups) {
  root.write("sys/fs/cgroup/cpu.max", "max 100000\n");
  root.write("sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  const auto check = [&] {
    EXPECT_EQ(cores("cgroup quota", 1).mark, Mark::advice);
    EXPECT_THAT(cores("cgroup quota", 1).value, HasSubstr("1.50 cores"));
    const auto threads = cores("threads", 1);
    EXPECT_EQ(threads.mark, Mark::problem);
    EXPECT_EQ(threads.change, "Set OMP_NUM_THREADS=1.");
    EXPECT_THAT(threads.cost, HasSubstr("threads take turns on 1.50 cores"));
  };
  check();
  EXPECT_EQ(cores("threads", 1, {{"OMP_NUM_THREADS", "1"}}).mark, Mark::ok);
  fs::remove(root / "sys/fs/cgroup/job/cpu.max");
  EXPECT_EQ(cores("cgroup quota", 1).value, "none");
  root.write("proc/self/cgroup", "3:cpu,cpuacct:/job\n0::/\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "150000\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  check();
}

TEST_F(Machine, MoreThreadsOrRanksThanCoresAreAProblem) {
  const auto threads = cores("threads", 2, {{"OMP_NUM_THREADS", "4"}});
  EXPECT_EQ(threads.mark, Mark::problem);
  EXPECT_EQ(threads.change, "Set OMP_NUM_THREADS=2.");
  EXPECT_THAT(threads.cost, StartsWith("8 threads take turns on 4.00 cores"));
  const auto ranks = cores("threads", 9);
  EXPECT_EQ(ranks.mark, Mark::problem);
  EXPECT_EQ(ranks.change, "Start at most 4 ranks.");
  const auto few = cores("threads", 1, {{"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(few.mark, Mark::advice);
  EXPECT_EQ(few.cost, "Usable cores without a thread: 3 of 4.");
  EXPECT_THROW(cores("threads", 1, {{"OMP_NUM_THREADS", "0"}}), ConfigError);
}

TEST_F(Machine, TwoOpenMPsInOneProcessAreAProblem) {
  root.write("proc/self/maps",
             "7f00-7f01 r-xp 0 0:0 1 /lib/libgomp.so.1\n7f02-7f03 r-xp 0 0:0 1 "
             "/opt/libiomp5.so\n7f04-7f05 r-xp 0 0:0 1 /opt/libompltarget.so\n");
  EXPECT_EQ(cores("OpenMP", 1).mark, Mark::problem);
  EXPECT_EQ(cores("OpenMP", 1).value, "libgomp, libiomp5");
  root.write("proc/self/maps", "7f00-7f01 r-xp 0 0:0 1 /lib/libgomp.so.1\n");
  EXPECT_EQ(cores("OpenMP", 1).mark, Mark::ok);
}

TEST_F(Machine, MemoryThatRanksDoNotFitInIsAProblem) {
  root.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n");
  root.write("proc/self/status", "RssAnon:\t  131072 kB\n");
  root.write("proc/sys/vm/overcommit_memory", "2\n");
  root.write("sys/fs/cgroup/job/memory.max", "268435456\n");
  EXPECT_EQ(memory("available").mark, Mark::ok);
  EXPECT_EQ(memory("available", 2).mark, Mark::problem);
  EXPECT_THAT(memory("available", 2).value, HasSubstr("cgroup"));
  EXPECT_EQ(memory("overcommit").mark, Mark::advice);
}

TEST_F(Machine, HugePagesThatAreSwitchedOffAreFound) {
  const std::string folder = "sys/kernel/mm/transparent_hugepage/";
  root.write(folder + "enabled", "always madvise [never]\n");
  root.write(folder + "shmem_enabled", "always within_size advise never [deny] force\n");
  EXPECT_EQ(memory("huge pages").mark, Mark::advice);
  EXPECT_THAT(memory("huge pages").change, HasSubstr("enabled to madvise"));
  root.write(folder + "enabled", "always [madvise] never\n");
  EXPECT_THAT(memory("huge pages").change, HasSubstr("shmem_enabled to advise"));
  root.write(folder + "shmem_enabled", "always within_size advise [never] deny force\n");
  EXPECT_EQ(memory("huge pages").mark, Mark::ok);
  EXPECT_EQ(memory("huge pages").value, "madvise, shared never");
  root.write("proc/self/status", "THP_enabled:\t0\n");
  EXPECT_THAT(memory("huge pages").change, HasSubstr("PR_SET_THP_DISABLE"));
}

TEST_F(Machine, LimitsBelowWhatAJobTakesAreProblems) {
  root.write("proc/self/limits",
             "Limit                     Soft Limit           Hard Limit           Units     \n"
             "Max file size             unlimited            unlimited            bytes     \n"
             "Max processes             40                   96365                processes \n"
             "Max open files            32                   20000                files     \n"
             "Max locked memory         65536                65536                bytes     \n"
             "Max address space         1073741824           unlimited            bytes     \n");
  EXPECT_EQ(limits("open files", 8).mark, Mark::problem);
  EXPECT_THAT(limits("open files", 8).change, HasSubstr("ulimit -n"));
  EXPECT_EQ(limits("processes and threads", 8).mark, Mark::problem);
  EXPECT_EQ(limits("processes and threads", 1).mark, Mark::ok);
  EXPECT_EQ(limits("file size", 8).mark, Mark::ok);
  EXPECT_EQ(limits("address space", 8).mark, Mark::problem);
  EXPECT_EQ(limits("locked memory", 8).mark, Mark::ok);  // libzero locks none
  fs::create_directories(root / "sys/class/infiniband/mlx5_0");
  EXPECT_THAT(limits("locked memory", 8).cost, HasSubstr("InfiniBand"));
  root.write("sys/fs/cgroup/job/pids.max", "12\n");
  root.write("sys/fs/cgroup/job/pids.current", "10\n");
  EXPECT_EQ(limits("processes and threads", 1).mark, Mark::problem);
  EXPECT_EQ(limits("processes and threads", 1).value, "2");
}

TEST_F(Machine, RanksOfThisOneCanShare) {
  for (const char* name : {"shared memory", "watching ranks", "meeting place"})
    EXPECT_EQ(found(name, check_sharing, 4).mark, Mark::ok) << name;
}

TEST_F(Machine, IoUringThatIsRefusedIsAdviceWithItsReason) {
  EXPECT_THAT(found("io_uring", check_uring, 1).value,
              ::testing::AnyOf("works, 1 queue", HasSubstr("refused after 0 of 1 queues: ")));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{.rlim_cur = 64, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  const auto refused = found("io_uring", check_uring, 100);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(refused.mark, Mark::advice);
  EXPECT_THAT(refused.value, HasSubstr("of 100 queues: "));
}

TEST_F(Machine, TmpfsAndNetworksAreToldFromDisks) {
  const TemporaryFolder folder;
  const auto path = fs::canonical(folder.path()).string();
  const auto on = [&](const std::string& mounts) {
    root.write("proc/self/mounts", mounts);
    return disk(path, path);
  };
  const auto shared =
      on("/dev/vda / ext4 rw 0 0\ntmpfs " + path + " tmpfs rw 0 0\nx " + path + "x nfs rw 0 0\n");
  EXPECT_EQ(shared.mark, Mark::problem);
  EXPECT_THAT(shared.cost, HasSubstr("memory"));
  EXPECT_EQ(on("/dev/vda / ext4 rw 0 0\nserver:/a " + path + " nfs4 rw 0 0\n").mark, Mark::advice);
  const auto local = on("/dev/vda / ext4 rw 0 0\n");
  EXPECT_EQ(local.mark, Mark::ok);
  EXPECT_EQ(local.value, "ext4 on /dev/vda");
  EXPECT_EQ(disk(path + " room", path).mark, Mark::ok);
  EXPECT_THAT(disk(path + " way", path).value, HasSubstr(", "));  // "io_uring, direct"
  EXPECT_TRUE(fs::is_empty(path));
  EXPECT_EQ(disk(path + "/none", path + "/none").mark, Mark::problem);
}

TEST_F(Machine, NamesThatMeanLoopbackAreFound) {
  root.write("proc/sys/kernel/hostname", "localhost\n");
  EXPECT_EQ(links("own name", 1).mark, Mark::advice);
  EXPECT_THAT(links("own name", 1).change, HasSubstr("/etc/hosts"));
  EXPECT_EQ(links("own name", 2).mark, Mark::problem);
  root.write("proc/sys/kernel/hostname", "10.0.0.7\n");
  EXPECT_EQ(links("own name", 2).mark, Mark::ok);
}

TEST_F(Machine, LinksOfSeveralHostsAreComputed) {
  EXPECT_EQ(links("interfaces", 2).mark, Mark::problem);
  const std::string folder = "sys/class/net/eth0/";
  root.write(folder + "type", "1\n");
  root.write(folder + "operstate", "up\n");
  root.write(folder + "speed", "1000\n");
  root.write(folder + "mtu", "1500\n");
  root.write("sys/class/net/lo/type", "772\n");
  EXPECT_EQ(links("eth0", 1).mark, Mark::ok);
  EXPECT_EQ(links("eth0", 2).mark, Mark::advice);
  EXPECT_THAT(links("eth0", 2).cost, HasSubstr("8.0 s"));
  // Only the interface that is chosen is looked at.
  EXPECT_EQ(links("eth0", 2, {{"ZERO_INTERFACE", "eth1"}}).mark, Mark::ok);
  EXPECT_EQ(links("eth0", 2, {{"ZERO_INTERFACE", "eth0"}}).mark, Mark::advice);
  root.write(folder + "speed", "100000\n");
  EXPECT_EQ(links("eth0", 2).mark, Mark::ok);
}

TEST_F(Machine, InterfacesAndTransportsThatThereAreNotAreProblems) {
  const auto chosen = links("chosen", 1, {{"ZERO_INTERFACE", "none7"}});
  EXPECT_EQ(chosen.mark, Mark::problem);
  EXPECT_THAT(chosen.change, HasSubstr("none7"));
  EXPECT_EQ(links("transport", 2).mark, Mark::ok);
  const auto wrong = links("transport", 2, {{"ZERO_TRANSPORT", "nccl"}});
  EXPECT_EQ(wrong.mark, Mark::problem);
  EXPECT_THAT(wrong.change, AllOf(HasSubstr("ZERO_TRANSPORT is 'nccl'"),
                                  HasSubstr("gloo, openmpi, mpich or mpi")));
}

Json line_of(const Json& report, const std::string& name) {
  for (const auto& line : report["findings"]) {
    if (line["name"] == name) return line;
  }
  return {};
}

TEST(Doctor, SaysTheSameInATableAndInJson) {
  const TemporaryFolder folder, temporary;
  const std::map<std::string, std::string> places{{"TMPDIR", temporary.path().string()}};
  const auto path = folder.path().string();
  const auto table = run({ZERO_PROGRAM, "doctor", "-n", "2", "--nvme-path", path}, places);
  EXPECT_EQ(table.err, "");
  for (const char* section :
       {"cores\n", "\nmemory\n", "\nlimits\n", "\nsystem\n", "\ndisks\n", "\nlinks\n"})
    EXPECT_THAT(table.out, HasSubstr(section));
  const auto outcome =
      run({ZERO_PROGRAM, "doctor", "-n", "2", "--nvme-path", path, "--json"}, places);
  const auto report = Json::parse(outcome.out);
  EXPECT_EQ(outcome.status, report["problems"] == 0 ? 0 : 1);
  int problems = 0, pieces = 0;
  for (const auto& line : report["findings"]) {
    problems += line["mark"] == "problem" ? 1 : 0;
    pieces += line["mark"] == "advice" ? 1 : 0;
    EXPECT_EQ(line.contains("change"), line["mark"] != "ok");
    EXPECT_THAT(table.out, HasSubstr(line["name"].get<std::string>()));
  }
  EXPECT_EQ(report["problems"], problems);
  EXPECT_EQ(report["advice"], pieces);
  EXPECT_THAT(table.out,
              ::testing::ContainsRegex("\n\n[0-9]+ problems?, [0-9]+ pieces? of advice\n$"));
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_TRUE(fs::is_empty(temporary.path()));
}

TEST(Doctor, EndsWithOneWhereThereIsAProblem) {
  const auto outcome = run({ZERO_PROGRAM, "doctor", "--json", "--nvme-path", "/nowhere/at/all"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(line_of(Json::parse(outcome.out), "/nowhere/at/all")["mark"], "problem");
  EXPECT_EQ(run({ZERO_PROGRAM, "doctor", "-n", "0"}).status, 2);
  EXPECT_EQ(run({ZERO_PROGRAM, "doctor"}, {{"OMP_NUM_THREADS", "many"}}).status, 2);
}

TEST(Doctor, RefusesMoreThreadsThanCores) {
  const auto threads = std::to_string(2 * std::thread::hardware_concurrency());
  const auto outcome =
      run({ZERO_PROGRAM, "doctor", "-n", "2", "--json"}, {{"OMP_NUM_THREADS", threads}});
  const auto line = line_of(Json::parse(outcome.out), "threads");
  EXPECT_EQ(line["mark"], "problem");
  EXPECT_THAT(line["cost"].get<std::string>(), HasSubstr("take turns"));
}

TEST(Doctor, MeetsTheLimitsThatItIsStartedWith) {
  const auto outcome =
      run({"sh", "-c", "ulimit -n 40; ulimit -f 2000; exec " ZERO_PROGRAM " doctor -n 2 --json"});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  const auto report = Json::parse(outcome.out);
  for (const char* name : {"open files", "file size", "shared memory"})
    EXPECT_EQ(line_of(report, name)["mark"], "problem") << name;
}

}  // namespace
}  // namespace zero::app::checkup
