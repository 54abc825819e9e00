#include "zero/store/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/store/aligned_memory.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace zero::store {
namespace {

using testing::HasSubstr;

// Every way of doing the same.
class FileWays : public testing::TestWithParam<FileOptions> {
 protected:
  TemporaryFolder folder_;
  std::string path_ = (folder_.path() / "states").string();
};

TEST_P(FileWays, GivesBackWhatWasWritten) {
  constexpr int64_t kBytes = 1 << 20;
  File file(path_, kBytes, GetParam());
  const auto written = memory(kBytes, 7);
  // The parts are uneven, all under way at once, and the last comes first.
  std::vector<Transfer> transfers;
  const std::vector<int64_t> bounds{0, 4096, 12288, 12288, 300 * 1024, kBytes};
  for (size_t i = bounds.size() - 1; i > 0; --i) {
    transfers.push_back(
        file.write(bounds[i - 1], written.get() + bounds[i - 1], bounds[i] - bounds[i - 1]));
  }
  for (auto& transfer : transfers) transfer.wait();
  const auto read = memory(kBytes);
  auto whole = file.read(0, read.get(), kBytes);
  whole.wait();
  EXPECT_TRUE(whole.done());
  EXPECT_EQ(std::memcmp(read.get(), written.get(), kBytes), 0);
  EXPECT_EQ(file.counts().read, kBytes);
  EXPECT_EQ(file.counts().written, kBytes);
  auto part = file.read(8192, read.get(), 4096);
  part.wait();
  EXPECT_EQ(std::memcmp(read.get(), written.get() + 8192, 4096), 0);
}

TEST_P(FileWays, ReadsZerosWhereNothingWasWritten) {
  File file(path_, 100'000, GetParam());
  EXPECT_EQ(file.bytes(), 102'400);
  const auto read = memory(file.bytes(), 3);
  file.read(0, read.get(), file.bytes()).wait();
  for (int64_t i = 0; i < file.bytes(); ++i) ASSERT_EQ(read.get()[i], std::byte{0});
}

TEST_P(FileWays, RemovesTheFileAtTheEnd) {
  {
    File file(path_, 4096, GetParam());
    EXPECT_TRUE(std::filesystem::exists(path_));
  }
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_P(FileWays, WaitsForTransfersThatNobodyWaitedFor) {
  const auto written = memory(1 << 20, 5);
  File file(path_, 1 << 20, GetParam());
  for (int i = 0; i < 20; ++i) file.write(0, written.get(), 1 << 20);
  auto late = file.write(0, written.get(), 1 << 20);
  late = Transfer();
  const auto read = memory(1 << 20);
  file.read(0, read.get(), 1 << 20).wait();
  EXPECT_EQ(std::memcmp(read.get(), written.get(), 1 << 20), 0);
}

TEST_P(FileWays, SeveralThreadsTransferAtOnce) {
  constexpr int64_t kPart = 1 << 16;
  constexpr int kThreads = 3;
  File file(path_, kThreads * kPart, GetParam());
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&file, t] {
      const auto read = memory(kPart);
      for (uint32_t round = 1; round <= 20; ++round) {
        const auto written = memory(kPart, round * kThreads + static_cast<uint32_t>(t));
        file.write(t * kPart, written.get(), kPart).wait();
        file.read(t * kPart, read.get(), kPart).wait();
        EXPECT_TRUE(equal(read, written, kPart));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(file.counts().written, 20 * kThreads * kPart);
}

TEST_P(FileWays, AnotherThreadMayWait) {
  constexpr int64_t kBytes = 1 << 20;
  File file(path_, kBytes, GetParam());
  const auto written = memory(kBytes, 11);
  const auto read = memory(kBytes);
  auto writing = file.write(0, written.get(), kBytes);
  std::thread([&] {
    writing.wait();
    file.read(0, read.get(), kBytes).wait();
  }).join();
  EXPECT_TRUE(equal(read, written, kBytes));
}

TEST_P(FileWays, NamesFileOffsetAndReasonOfATruncatedFile) {
  File file(path_, 1 << 20, GetParam());
  ASSERT_EQ(truncate(path_.c_str(), 512 * 1024), 0);
  const auto read = memory(1 << 20);
  auto transfer = file.read(0, read.get(), 1 << 20);
  try {
    transfer.wait();
    ADD_FAILURE() << "the end was not noticed";
  } catch (const StoreError& error) {
    EXPECT_THAT(error.what(), HasSubstr(path_));
    EXPECT_THAT(error.what(), HasSubstr("at byte 524288"));
    EXPECT_THAT(error.what(), HasSubstr("truncated"));
  }
  transfer.wait();  // said once
}

TEST_P(FileWays, NamesTheSystemsReason) {
  File file(path_, 1 << 20, GetParam());
  // A page that may not be touched stands for a failing device.
  void* forbidden = mmap(nullptr, 65536, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto transfer = file.read(4096, forbidden, 65536);
  try {
    transfer.wait();
    ADD_FAILURE() << "the error was not noticed";
  } catch (const StoreError& error) {
    EXPECT_THAT(error.what(), HasSubstr("Cannot read " + path_ + " at byte 4096: Bad address"));
  }
  munmap(forbidden, 65536);
}

std::vector<FileOptions> ways() {
  std::vector<FileOptions> all;
  for (const bool uring : {true, false}) {
    for (const bool direct : {true, false}) {
      for (const int depth : {1, 3, 64}) {
        all.push_back(
            {.block_bytes = 16384, .queue_depth = depth, .uring = uring, .direct = direct});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, FileWays, testing::ValuesIn(ways()), [](const auto& info) {
  return std::string(info.param.uring ? "uring" : "threads") +
         (info.param.direct ? "Direct" : "Buffered") + std::to_string(info.param.queue_depth);
});

// tmpfs has direct transfers since Linux 6.6; it is there on every machine that runs this.
TEST(File, WorksOnAFileSystemWithOrWithoutDirectTransfers) {
  const auto path = "/dev/shm/libzero-file-test-" + std::to_string(getpid());
  const int direct = open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
  if (direct >= 0) close(direct);
  TemporaryFolder folder;
  // Alone, and striped with a disk that has what it may not have.
  const std::vector<std::vector<std::string>> places{{path},
                                                     {path, (folder.path() / "states").string()}};
  for (const auto& paths : places) {
    for (const bool uring : {true, false}) {
      File file(paths, {}, 65536, {.block_bytes = 8192, .uring = uring});
      EXPECT_EQ(file.files().front()->direct(), direct >= 0);
      const auto written = memory(65536, 9);
      file.write(0, written.get(), 65536).wait();
      const auto read = memory(65536);
      file.read(0, read.get(), 65536).wait();
      EXPECT_EQ(std::memcmp(read.get(), written.get(), 65536), 0);
    }
    EXPECT_FALSE(std::filesystem::exists(path));
  }
}

TEST(File, RefusesWhatCannotBeMade) {
  const auto refused = [](const std::string& path, int64_t bytes, const std::string& says) {
    try {
      File file(path, bytes);
      ADD_FAILURE() << path << " was made";
    } catch (const StoreError& error) {
      EXPECT_THAT(error.what(), HasSubstr(path));
      EXPECT_THAT(error.what(), HasSubstr(says));
    }
  };
  TemporaryFolder folder;
  refused((folder.path() / "absent" / "states").string(), 4096, "Make the folder first");
  refused(folder.path().string(), 4096, "directory");
  const auto large = (folder.path() / "states").string();
  refused(large, int64_t{1} << 50, "Cannot reserve 1.00 PiB");
  EXPECT_FALSE(std::filesystem::exists(large));
}

TEST(File, KeepsAThousandthInChecksums) {
  TemporaryFolder folder;
  const auto path = (folder.path() / "states").string();
  EXPECT_EQ(File(path, 1 << 20).checksum_bytes(), 1024);
  EXPECT_EQ(File(path, 1 << 20, {.checksums = false}).checksum_bytes(), 0);
}

TEST(File, RefusesNonsenseByName) {
  TemporaryFolder folder;
  const auto path = (folder.path() / "states").string();
  EXPECT_THAT([&] { File file(path, 4096, {.block_bytes = 1000}); },
              testing::ThrowsMessage<ConfigError>(HasSubstr("aio.block_size is 1000")));
  EXPECT_THAT([&] { File file(path, 4096, {.queue_depth = 0}); },
              testing::ThrowsMessage<ConfigError>(HasSubstr("aio.queue_depth is 0")));
}

}  // namespace
}  // namespace zero::store
