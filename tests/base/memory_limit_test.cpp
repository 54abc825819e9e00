#include "zero/base/memory_limit.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_folder.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

void write(const fs::path& file, const std::string& text) {
  fs::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

constexpr const char* kMachine =
    "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  4194304 kB\n";

TEST(MemoryLimit, IsTheMachinesWhereNoGroupSetsLess) {
  const TemporaryFolder root;
  write(root.path() / "proc/meminfo", kMachine);
  write(root.path() / "proc/self/cgroup", "0::/\n");
  write(root.path() / "sys/fs/cgroup/memory.max", "max\n");
  const auto limit = available_memory(root.path());
  EXPECT_EQ(limit.available, int64_t{4} << 30);
  EXPECT_EQ(limit.reason, "the machine's memory, 8.00 GiB");
}

TEST(MemoryLimit, IsTheLeastOfTheGroupsAboveTheProcess) {
  const TemporaryFolder root;
  write(root.path() / "proc/meminfo", kMachine);
  write(root.path() / "proc/self/cgroup", "0::/jobs/mine\n");
  write(root.path() / "sys/fs/cgroup/jobs/memory.max", "1073741824\n");
  write(root.path() / "sys/fs/cgroup/jobs/memory.stat", "anon 1048576\nfile 999999999\nshmem 0\n");
  write(root.path() / "sys/fs/cgroup/jobs/mine/memory.max", "2147483648\n");
  const auto limit = available_memory(root.path());
  EXPECT_EQ(limit.available, (int64_t{1} << 30) - (1 << 20));
  EXPECT_EQ(limit.reason, "a memory cgroup's limit of 1.00 GiB, of which 1.00 MiB are used");
}

TEST(MemoryLimit, KnowsGroupsOfTheFirstVersionAndContainers) {
  const TemporaryFolder root;
  write(root.path() / "proc/meminfo", kMachine);
  write(root.path() / "proc/self/cgroup", "5:cpu:/other\n4:memory:/outside/the/container\n0::/\n");
  write(root.path() / "sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912\n");
  write(root.path() / "sys/fs/cgroup/memory/memory.stat",
        "cache 5\ntotal_rss 4096\ntotal_shmem 8192\n");
  EXPECT_EQ(available_memory(root.path()).available, (int64_t{512} << 20) - 12288);
}

// Two containers on one machine share a pod's limit, and each has a limit of its own.
TEST(MemoryLimit, SaysOfEachLimitWhoseItIs) {
  const TemporaryFolder root;
  write(root.path() / "proc/meminfo", kMachine);
  write(root.path() / "proc/sys/kernel/random/boot_id", "of-this-boot\n");
  const auto groups = root.path() / "sys/fs/cgroup";
  write(groups / "pod/memory.max", "1073741824\n");
  for (const char* name : {"first", "second"})
    write(groups / "pod" / name / "memory.max", "536870912\n");
  const auto limits_of = [&](const std::string& group) {
    write(root.path() / "proc/self/cgroup", "0::" + group + "\n");
    return memory_limits(root.path());
  };
  const auto first = limits_of("/pod/first");
  const auto second = limits_of("/pod/second");
  ASSERT_EQ(first.size(), 3U);
  ASSERT_EQ(second.size(), 3U);
  EXPECT_EQ(first[0].reason, "the machine's memory, 8.00 GiB");
  EXPECT_EQ(first[0].id, second[0].id);
  EXPECT_EQ(first[1].available, int64_t{1} << 29) << "the tightest";
  EXPECT_NE(first[1].id, second[1].id);
  EXPECT_EQ(first[2].available, int64_t{1} << 30);
  EXPECT_EQ(first[2].id, second[2].id);
  EXPECT_NE(first[0].id, first[2].id);
}

TEST(MemoryLimit, CountsWhatTheKernelKilled) {
  const TemporaryFolder root;
  EXPECT_EQ(kills_for_memory(root.path()), 0);
  write(root.path() / "proc/vmstat", "nr_free_pages 5\noom_kill 3\n");
  EXPECT_EQ(kills_for_memory(root.path()), 3);
}

TEST(MemoryLimit, OfThisProcessIsSomething) { EXPECT_GT(available_memory().available, 1 << 20); }

}  // namespace
}  // namespace zero
