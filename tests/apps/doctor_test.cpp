// Tests the findings of `zero doctor`, on machines that folders play, and on this one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
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
using ::testing::IsEmpty;
using ::testing::StartsWith;
using Json = nlohmann::json;

/// The finding `name`; what the report promises of every finding is checked on the way.
Finding named(const Findings& findings, const std::string& name) {
  for (const auto& finding : findings) {
    EXPECT_FALSE(finding.value.empty()) << finding.name;
    EXPECT_EQ(finding.change.empty(), finding.mark == Mark::ok) << finding.name;
    EXPECT_EQ(finding.cost.empty(), finding.mark == Mark::ok) << finding.name;
    if (finding.mark == Mark::ok) continue;
    EXPECT_THAT(finding.change, EndsWith("."));
    EXPECT_THAT(finding.cost, EndsWith("."));
  }
  for (const auto& finding : findings) {
    if (finding.name == name) return finding;
  }
  ADD_FAILURE() << "there is no finding " << name;
  return {};
}

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
  Findings cores(int ranks, std::map<std::string, std::string> set = {}) const {
    return judge(read_cores(root.path(), variables(std::move(set))), ranks);
  }
  const TemporaryFolder root;
};

TEST_F(Machine, ThatFitsHasNothingToChange) {
  for (const auto& finding : cores(2)) EXPECT_EQ(finding.mark, Mark::ok) << finding.name;
  EXPECT_THAT(named(cores(2), "threads").value, StartsWith("2 ranks x 2 threads"));
  EXPECT_THAT(named(cores(1), "available").value, "4 cores");
}

TEST_F(Machine, QuotaBelowTheThreadsIsAProblemInBothVersionsOfCgroups) {
  root.write("sys/fs/cgroup/cpu.max", "max 100000\n");
  root.write("sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  const auto check = [&] {
    const auto all = cores(1);
    EXPECT_EQ(named(all, "cgroup quota").mark, Mark::advice);
    EXPECT_THAT(named(all, "cgroup quota").value, HasSubstr("1.50 cores"));
    const auto threads = named(all, "threads");
    EXPECT_EQ(threads.mark, Mark::problem);
    EXPECT_EQ(threads.change, "Set OMP_NUM_THREADS=1.");
    EXPECT_THAT(threads.cost, HasSubstr("threads take turns on 1.50 cores"));
  };
  check();
  EXPECT_EQ(named(cores(1, {{"OMP_NUM_THREADS", "1"}}), "threads").mark, Mark::ok);
  fs::remove(root / "sys/fs/cgroup/job/cpu.max");
  EXPECT_EQ(named(cores(1), "cgroup quota").value, "none");
  root.write("proc/self/cgroup", "3:cpu,cpuacct:/job\n0::/\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "150000\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  check();
}

TEST_F(Machine, MoreThreadsOrRanksThanCoresAreAProblem) {
  const auto threads = named(cores(2, {{"OMP_NUM_THREADS", "4"}}), "threads");
  EXPECT_EQ(threads.mark, Mark::problem);
  EXPECT_EQ(threads.change, "Set OMP_NUM_THREADS=2.");
  EXPECT_THAT(threads.cost, StartsWith("8 threads take turns on 4.00 cores"));
  const auto ranks = named(cores(9), "threads");
  EXPECT_EQ(ranks.mark, Mark::problem);
  EXPECT_EQ(ranks.change, "Start at most 4 ranks.");
}

TEST_F(Machine, ThatOthersUseIsSaidToBeBusy) {
  root.write("proc/loadavg", "0.90 0.50 0.10 1/100 4711\n");
  EXPECT_EQ(named(cores(1), "load").mark, Mark::ok);
  root.write("proc/loadavg", "3.25 0.50 0.10 1/100 4711\n");
  EXPECT_EQ(named(cores(1), "load").mark, Mark::advice);
  EXPECT_THAT(named(cores(1), "load").cost, HasSubstr("3.25 other processes"));
}

TEST_F(Machine, CoresWithoutAThreadAreCounted) {
  const auto threads = named(cores(1, {{"OMP_NUM_THREADS", "1"}}), "threads");
  EXPECT_EQ(threads.mark, Mark::advice);
  EXPECT_EQ(threads.cost, "Usable cores without a thread: 3 of 4.");
}

TEST_F(Machine, BindingIsToldApartFromACpuset) {
  root.write("proc/self/status", "Cpus_allowed_list:\t2\n");
  const auto bound = named(cores(1), "available");
  EXPECT_EQ(bound.mark, Mark::advice);
  EXPECT_EQ(bound.value, "1 of 4 cores");
  EXPECT_THAT(bound.cost, HasSubstr("3 cores"));
  root.write("sys/fs/cgroup/job/cpuset.cpus.effective", "2\n");
  EXPECT_EQ(named(cores(1), "available").mark, Mark::ok);
}

TEST_F(Machine, ThreadsThatAreNoNumberAreRefused) {
  EXPECT_THROW((void)read_cores(root.path(), variables({{"OMP_NUM_THREADS", "all"}})), ConfigError);
  EXPECT_THROW((void)read_cores(root.path(), variables({{"OMP_NUM_THREADS", "0"}})), ConfigError);
}

TEST_F(Machine, OperatorsThatLeaveVectorsUnusedAreFound) {
  root.write("proc/cpuinfo", "model name\t: Old\nflags\t\t: fpu sse4_2 avx2 fma\n");
  auto library = read_libtorch(root.path());
  EXPECT_FALSE(library.kernels.empty());
  EXPECT_TRUE(library.avx2);
  library.operators = "DEFAULT";
  EXPECT_THAT(named(judge(library), "instructions").change, HasSubstr("ATEN_CPU_CAPABILITY"));
  library.operators = "AVX2";
  EXPECT_EQ(named(judge(library), "instructions").mark, Mark::ok);
}

TEST_F(Machine, TwoOpenMPsInOneProcessAreAProblem) {
  root.write("proc/self/maps",
             "7f00-7f01 r-xp 0 0:0 1 /lib/libgomp.so.1\n7f02-7f03 r-xp 0 0:0 1 "
             "/opt/libiomp5.so\n7f04-7f05 r-xp 0 0:0 1 /opt/libompltarget.so\n");
  auto library = read_libtorch(root.path());
  EXPECT_THAT(library.runtimes, ::testing::ElementsAre("libgomp", "libiomp5"));
  EXPECT_EQ(library.backend, "OpenMP");
  EXPECT_EQ(named(judge(library), "threads").mark, Mark::problem);
  library.runtimes = {"libgomp"};
  EXPECT_EQ(named(judge(library), "threads").mark, Mark::ok);
}

TEST_F(Machine, GpusAreNamedAndWhatUsesThem) {
  EXPECT_EQ(named(judge_gpus(read_gpus(root.path())), "GPUs").value, "none");
  root.write("dev/nvidia0", "");
  root.write("dev/nvidiactl", "");
  EXPECT_THAT(read_gpus(root.path()), ::testing::ElementsAre("/dev/nvidia0"));
  root.write("proc/driver/nvidia/gpus/0000:3b:00.0/information", "Model: \t NVIDIA H100\nIRQ: 1\n");
  EXPECT_THAT(read_gpus(root.path()), ::testing::ElementsAre("NVIDIA H100 (0000:3b:00.0)"));
  EXPECT_THAT(named(judge_gpus(read_gpus(root.path())), "GPUs").value,
              AllOf(HasSubstr("H100"), HasSubstr("--device cuda")));
}

TEST_F(Machine, MemoryThatRanksDoNotFitInIsAProblem) {
  root.write("proc/meminfo",
             "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 2097152 kB\nSwapFree: "
             "1048576 kB\n");
  root.write("proc/self/status", "RssAnon:\t  131072 kB\n");
  root.write("proc/vmstat", "nr_free_pages 7\noom_kill 3\n");
  root.write("proc/sys/vm/overcommit_memory", "2\n");
  root.write("sys/fs/cgroup/job/memory.max", "268435456\n");
  const auto memory = read_memory(root.path());
  EXPECT_EQ(memory.of_a_rank, int64_t{128} << 20);
  EXPECT_EQ(named(judge(memory, 1), "available").mark, Mark::ok);
  const auto all = judge(memory, 2);
  EXPECT_EQ(named(all, "available").mark, Mark::problem);
  EXPECT_THAT(named(all, "available").value, HasSubstr("cgroup"));
  EXPECT_EQ(named(all, "swap").mark, Mark::advice);
  EXPECT_THAT(named(all, "swap").cost, HasSubstr("1.00 GiB"));
  EXPECT_EQ(named(all, "overcommit").mark, Mark::advice);
  EXPECT_THAT(named(all, "kills").cost, HasSubstr("3 processes"));
}

TEST_F(Machine, HugePagesThatAreSwitchedOffAreFound) {
  const std::string folder = "sys/kernel/mm/transparent_hugepage/";
  const auto judged = [&] { return named(judge(read_huge_pages(root.path())), "huge pages"); };
  root.write(folder + "enabled", "always madvise [never]\n");
  root.write(folder + "shmem_enabled", "always within_size advise never [deny] force\n");
  EXPECT_EQ(judged().mark, Mark::advice);
  EXPECT_THAT(judged().change, HasSubstr("enabled to madvise"));
  root.write(folder + "enabled", "always [madvise] never\n");
  EXPECT_THAT(judged().change, HasSubstr("shmem_enabled to advise"));
  root.write(folder + "shmem_enabled", "always within_size advise [never] deny force\n");
  EXPECT_EQ(judged().mark, Mark::ok);
  EXPECT_EQ(judged().value, "madvise, shared never");
  root.write("proc/self/status", "THP_enabled:\t0\n");
  EXPECT_THAT(judged().change, HasSubstr("PR_SET_THP_DISABLE"));
}

TEST_F(Machine, SeveralNodesWantRanksOfTheirOwn) {
  EXPECT_EQ(named(judge(read_nodes(root.path()), 1), "NUMA nodes").mark, Mark::ok);
  root.write("sys/devices/system/node/online", "0-1\n");
  root.write("sys/devices/system/node/node0/cpulist", "0-1\n");
  root.write("sys/devices/system/node/node1/cpulist", "2-3\n");
  const auto line = named(judge(read_nodes(root.path()), 1), "NUMA nodes");
  EXPECT_EQ(line.mark, Mark::advice);
  EXPECT_EQ(line.value, "node 0: 2 cores, node 1: 2 cores");
  EXPECT_THAT(line.change, HasSubstr("2 ranks"));
  root.write("proc/self/status", "Cpus_allowed_list:\t2-3\n");
  EXPECT_EQ(named(judge(read_nodes(root.path()), 1), "NUMA nodes").mark, Mark::ok);
}

constexpr const char* kLimits =
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max file size             unlimited            unlimited            bytes     \n"
    "Max processes             40                   96365                processes \n"
    "Max open files            32                   20000                files     \n"
    "Max locked memory         65536                65536                bytes     \n"
    "Max address space         unlimited            unlimited            bytes     \n";

TEST_F(Machine, LimitsBelowWhatAJobTakesAreProblems) {
  root.write("proc/self/limits", kLimits);
  root.write("proc/sys/kernel/osrelease", "6.1.0-generic\n");
  const auto all = judge(read_limits(root.path()), {.ranks = 8}, 4);
  EXPECT_EQ(named(all, "open files").mark, Mark::problem);
  EXPECT_THAT(named(all, "open files").change, HasSubstr("ulimit -n"));
  EXPECT_EQ(named(all, "processes and threads").mark, Mark::problem);
  EXPECT_EQ(named(all, "locked memory").mark, Mark::ok);  // nothing is locked
  EXPECT_EQ(named(all, "file size").mark, Mark::ok);
  const auto small = judge(read_limits(root.path()), {.ranks = 1}, 4);
  EXPECT_EQ(named(small, "processes and threads").mark, Mark::ok);
  root.write("sys/fs/cgroup/job/pids.max", "12\n");
  root.write("sys/fs/cgroup/job/pids.current", "10\n");
  const auto group =
      named(judge(read_limits(root.path()), {.ranks = 1}, 4), "processes and threads");
  EXPECT_EQ(group.mark, Mark::problem);
  EXPECT_EQ(group.value, "2");
}

TEST_F(Machine, LittleLockedMemoryMattersToOldKernelsAndToInfiniBand) {
  root.write("proc/self/limits", kLimits);
  root.write("proc/sys/kernel/osrelease", "5.10.0\n");
  const auto old = named(judge(read_limits(root.path()), {.ranks = 2}, 1), "locked memory");
  EXPECT_EQ(old.mark, Mark::advice);
  EXPECT_EQ(old.value, "64.0 KiB");
  EXPECT_THAT(old.cost, HasSubstr("8 fit"));
  root.write("proc/sys/kernel/osrelease", "6.1.0\n");
  fs::create_directories(root / "sys/class/infiniband/mlx5_0");
  const auto fabric = named(judge(read_limits(root.path()), {.ranks = 2}, 1), "locked memory");
  EXPECT_EQ(fabric.mark, Mark::advice);
  EXPECT_THAT(fabric.cost, HasSubstr("InfiniBand"));
}

TEST_F(Machine, LimitsOfFilesAndAddressesAreProblems) {
  Limits limits;
  limits.soft = {{"Max file size", 1 << 20}, {"Max address space", 1 << 30}};
  const auto all = judge(limits, {}, 1);
  EXPECT_EQ(named(all, "file size").mark, Mark::problem);
  EXPECT_EQ(named(all, "address space").mark, Mark::problem);
}

TEST_F(Machine, WhatRanksCannotShareIsAProblem) {
  const Sharing sharing{.arena = "no memfd",
                        .passing = "not sent",
                        .watching = "not permitted",
                        .meeting = "owned by another",
                        .folder = "/tmp/x"};
  int problems = 0;
  for (const auto& finding : judge(sharing)) problems += finding.mark == Mark::problem ? 1 : 0;
  EXPECT_EQ(problems, 4);
}

TEST_F(Machine, TryingToShareLeavesNothing) {
  const auto sharing = try_sharing(4);
  EXPECT_THAT(sharing.arena, IsEmpty());
  EXPECT_THAT(sharing.passing, IsEmpty());
  EXPECT_THAT(sharing.watching, IsEmpty());
  EXPECT_THAT(sharing.meeting, IsEmpty());
}

TEST_F(Machine, IoUringThatIsRefusedIsAdviceWithItsReason) {
  root.write("proc/sys/kernel/io_uring_disabled", "2\n");
  auto uring = try_uring(root.path(), 1);  // asks the kernel that there is
  EXPECT_EQ(uring.sysctl, 2);
  EXPECT_EQ(uring.opened == 1, uring.error == 0);
  uring.opened = 0;
  uring.error = EPERM;
  const auto off = named(judge(uring), "io_uring");
  EXPECT_EQ(off.mark, Mark::advice);
  EXPECT_THAT(off.change, HasSubstr("kernel.io_uring_disabled=0"));
  EXPECT_THAT(off.cost, HasSubstr("threads"));
  uring.sysctl = 0;
  EXPECT_THAT(named(judge(uring), "io_uring").change, HasSubstr("seccomp"));
  uring = {.opened = 2, .wanted = 4, .error = ENOMEM};
  EXPECT_THAT(named(judge(uring), "io_uring").value, HasSubstr("after 2 of 4"));
  EXPECT_THAT(named(judge(uring), "io_uring").change, HasSubstr("ulimit -l"));
  uring.opened = 4;
  EXPECT_EQ(named(judge(uring), "io_uring").mark, Mark::ok);
}

TEST_F(Machine, TmpfsAndNetworksAreToldFromDisks) {
  const TemporaryFolder folder;
  const auto path = fs::canonical(folder.path()).string();
  const auto type = [&](const std::string& mounts) {
    root.write("proc/self/mounts", mounts);
    return read_disk(root.path(), path);
  };
  auto disk =
      type("/dev/vda / ext4 rw 0 0\ntmpfs " + path + " tmpfs rw 0 0\nx " + path + "x nfs rw 0 0\n");
  EXPECT_EQ(disk.type, "tmpfs");
  EXPECT_EQ(named(judge(disk, 0), path).mark, Mark::problem);
  EXPECT_THAT(named(judge(disk, 0), path).cost, HasSubstr("memory"));
  disk = type("/dev/vda / ext4 rw 0 0\nserver:/a " + path + " nfs4 rw 0 0\n");
  EXPECT_EQ(named(judge(disk, 0), path).mark, Mark::advice);
  disk = type("/dev/vda / ext4 rw 0 0\n");
  EXPECT_EQ(disk.source, "/dev/vda");
  EXPECT_EQ(named(judge(disk, 0), path).mark, Mark::ok);
}

TEST_F(Machine, FullBufferedAndMissingDisksAreFound) {
  Disk disk{.path = "/d", .type = "ext4", .source = "/dev/sda1"};
  disk.total = int64_t{1} << 40;
  disk.free = int64_t{12} << 20;
  try_disk(disk);  // does not try
  EXPECT_EQ(disk.way, "");
  EXPECT_EQ(disk.failure, "");
  EXPECT_EQ(named(judge(disk, 0), "/d room").mark, Mark::problem);
  EXPECT_THAT(named(judge(disk, 0), "/d room").cost, HasSubstr("1e6 parameters"));
  disk.free = int64_t{8} << 30;
  EXPECT_EQ(named(judge(disk, int64_t{16} << 30), "/d room").mark, Mark::advice);
  EXPECT_EQ(named(judge(disk, int64_t{1} << 30), "/d room").mark, Mark::ok);
  disk.way = "threads, buffered";
  EXPECT_EQ(named(judge(disk, 0), "/d way").mark, Mark::advice);
  disk.way = "io_uring, direct";
  EXPECT_EQ(named(judge(disk, 0), "/d way").mark, Mark::ok);
  const auto missing = read_disk("/", root / "nowhere");
  EXPECT_EQ(judge(missing, 0).front().mark, Mark::problem);
}

TEST_F(Machine, DisksAreTriedAndLeftAsTheyWere) {
  const TemporaryFolder folder;
  auto disk = read_disk("/", folder.path());
  try_disk(disk);
  EXPECT_EQ(disk.failure, "");
  EXPECT_NE(disk.way, "");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_F(Machine, NamesThatMeanLoopbackAreFound) {
  root.write("proc/sys/kernel/hostname", "localhost\n");
  const auto links = read_links(root.path(), variables({}));
  const auto one = named(judge(links, 1), "own name");
  EXPECT_EQ(one.mark, Mark::advice);
  EXPECT_THAT(one.change, HasSubstr("/etc/hosts"));
  EXPECT_EQ(named(judge(links, 2), "own name").mark, Mark::problem);
  Links good;
  good.host = "node1";
  good.addresses = {"10.0.0.7"};
  EXPECT_EQ(named(judge(good, 2), "own name").mark, Mark::ok);
}

TEST_F(Machine, LinksOfSeveralHostsAreComputed) {
  const std::string folder = "sys/class/net/eth0/";
  root.write(folder + "type", "1\n");
  root.write(folder + "operstate", "up\n");
  root.write(folder + "speed", "1000\n");
  root.write(folder + "mtu", "1500\n");
  root.write("sys/class/net/lo/type", "772\n");
  auto links = read_links(root.path(), variables({}));
  ASSERT_EQ(links.interfaces.size(), 1);
  EXPECT_EQ(named(judge(links, 1), "eth0").mark, Mark::ok);
  EXPECT_EQ(named(judge(links, 2), "eth0").mark, Mark::advice);
  EXPECT_THAT(named(judge(links, 2), "eth0").cost, HasSubstr("8.0 s"));
  links.interfaces[0].megabits = 100000;
  EXPECT_EQ(named(judge(links, 2), "eth0").mark, Mark::ok);
}

TEST_F(Machine, InterfacesAndPluginsThatThereAreNotAreProblems) {
  auto links = read_links(root.path(),
                          variables({{"ZERO_INTERFACE", "none7"}, {"ZERO_TRANSPORT", "mpich"}}));
  EXPECT_EQ(named(judge(links, 1), "chosen").mark, Mark::problem);
  EXPECT_THAT(named(judge(links, 1), "chosen").change, HasSubstr("none7"));
  // Only the interface that is chosen is looked at.
  links.interfaces = {{.name = "slow", .state = "up", .megabits = 100, .mtu = 1500}};
  EXPECT_EQ(named(judge(links, 2), "slow").mark, Mark::ok);
  links.chosen = "ZERO_INTERFACE=slow";
  EXPECT_EQ(named(judge(links, 2), "slow").mark, Mark::advice);
  links.plugins = {"openmpi"};
  EXPECT_EQ(named(judge(links, 1), "transport").mark, Mark::problem);
  links.plugins = {"mpich"};
  EXPECT_EQ(named(judge(links, 1), "transport").mark, Mark::ok);
  EXPECT_EQ(named(judge(Links{}, 2), "interfaces").mark, Mark::problem);
}

TEST_F(Machine, ATransportThatNoJobAcceptsIsAProblem) {
  const auto judged = [&](const char* transport) {
    return named(judge(read_links(root.path(), variables({{"ZERO_TRANSPORT", transport}})), 2),
                 "transport");
  };
  EXPECT_EQ(judged("gloo").mark, Mark::ok);
  const auto wrong = judged("nccl");
  EXPECT_EQ(wrong.mark, Mark::problem);
  EXPECT_THAT(wrong.change, HasSubstr("ZERO_TRANSPORT is 'nccl'"));
  EXPECT_THAT(wrong.change, HasSubstr("gloo, openmpi, mpich or mpi"));
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
  for (const char* section : {"cores\n", "\nLibTorch\n", "\nmemory\n", "\nlimits\n", "\nsystem\n",
                              "\ndisks\n", "\nlinks\n"})
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
