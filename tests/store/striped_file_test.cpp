#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/store/aligned_memory.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/store/speed.h"

namespace zero::store {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kBlock = 4 * kAlignment;
constexpr int64_t kFileBytes = 101 * kAlignment;

class StripedFile : public testing::TestWithParam<bool> {
 protected:
  FileOptions options_{.block_bytes = kBlock, .queue_depth = 3, .uring = GetParam()};
  TemporaryFolder folder_;
  std::vector<std::string> paths_{(folder_.path() / "a").string(), (folder_.path() / "b").string(),
                                  (folder_.path() / "c").string()};
};

INSTANTIATE_TEST_SUITE_P(All, StripedFile, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "uring" : "threads");
});

TEST_P(StripedFile, GivesBackWhatWasWritten) {
  File file(paths_, {1, 2, 5}, kFileBytes, options_);
  const auto written = memory(kFileBytes, 3);
  // Parts that begin and end within blocks.
  std::vector<Transfer> transfers;
  for (int64_t at = 0; at < kFileBytes; at += 7 * kAlignment) {
    const auto size = std::min(7 * kAlignment, kFileBytes - at);
    transfers.push_back(file.write(at, written.get() + at, size));
  }
  for (auto& transfer : transfers) transfer.wait();
  const auto read = memory(kFileBytes);
  file.read(0, read.get(), kFileBytes).wait();
  EXPECT_TRUE(equal(read, written, kFileBytes));
  const auto part = memory(9 * kAlignment);
  file.read(6 * kAlignment, part.get(), 9 * kAlignment).wait();
  EXPECT_EQ(std::memcmp(part.get(), written.get() + 6 * kAlignment, 9 * kAlignment), 0);
}

TEST_P(StripedFile, ReservesAndCountsOnEachDiskItsShare) {
  const std::vector<double> shares{1, 2, 5};
  File file(paths_, shares, kFileBytes, options_);
  const auto written = memory(kFileBytes, 4);
  file.write(0, written.get(), kFileBytes).wait();
  file.read(0, written.get(), kFileBytes).wait();
  ASSERT_EQ(file.files().size(), 3u);
  int64_t sum = 0;
  for (size_t i = 0; i < 3; ++i) {
    const auto& part = *file.files()[i];
    EXPECT_EQ(part.path(), paths_[i]);
    EXPECT_EQ(static_cast<int64_t>(fs::file_size(paths_[i])), part.bytes());
    EXPECT_EQ(part.counts().written, part.bytes());
    EXPECT_EQ(part.counts().read, part.bytes());
    EXPECT_NEAR(static_cast<double>(part.bytes()), shares[i] / 8 * kFileBytes, kBlock);
    sum += part.bytes();
  }
  EXPECT_EQ(sum, kFileBytes);
  EXPECT_EQ(file.counts().written, kFileBytes);
  EXPECT_EQ(file.counts().read, kFileBytes);
}

TEST_P(StripedFile, EqualSharesWhereNoneAreGiven) {
  File file(paths_, {}, 6 * kBlock, options_);
  for (const auto& part : file.files()) EXPECT_EQ(part->bytes(), 2 * kBlock);
}

TEST_P(StripedFile, RemovesAllItsFiles) {
  { File file(paths_, {}, kFileBytes, options_); }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_P(StripedFile, NamesTheFileThatWasTruncated) {
  File file(paths_, {1, 1, 1}, 30 * kBlock, options_);
  ASSERT_EQ(truncate(paths_[1].c_str(), 2 * kBlock + kAlignment), 0);
  const auto read = memory(30 * kBlock);
  auto transfer = file.read(0, read.get(), 30 * kBlock);
  EXPECT_THAT([&] { transfer.wait(); },
              ThrowsMessage<StoreError>(HasSubstr("Cannot read " + paths_[1] + " at byte " +
                                                  std::to_string(2 * kBlock + kAlignment) +
                                                  ": the file ends there")));
}

TEST_P(StripedFile, LeavesNothingWhereOneCannotBeMade) {
  paths_[2] = (folder_.path() / "absent" / "c").string();
  EXPECT_THAT([&] { File(paths_, {}, kFileBytes, options_); },
              ThrowsMessage<StoreError>(HasSubstr(paths_[2])));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_P(StripedFile, RefusesNonsenseByName) {
  const auto refused = [&](const std::vector<std::string>& paths, const std::vector<double>& shares,
                           const std::string& says) {
    EXPECT_THAT([&] { File(paths, shares, kFileBytes, options_); },
                ThrowsMessage<ConfigError>(HasSubstr(says)));
  };
  refused({}, {}, "No file");
  refused(paths_, {1, 2}, "3 files have 2 shares");
  refused(paths_, {1, -2, 1}, "The share of " + paths_[1] + " is -2");
  refused(paths_, {1, 1, NAN}, "The share of " + paths_[2] + " is nan");
  refused({paths_[0], paths_[1], paths_[0]}, {}, paths_[0] + " is named twice");
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST(MeasureSpeeds, OfEachFolderAndLeavesNothing) {
  TemporaryFolder folder;
  const auto path = folder.path().string();
  const auto speeds = measure_speeds({path, path}, 1 << 20);
  ASSERT_EQ(speeds.size(), 2u);
  for (const double speed : speeds) EXPECT_GT(speed, 0);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_THAT(
      [&] {
        measure_speeds({path, "/nowhere"}, 1 << 20);
      },
      ThrowsMessage<StoreError>(HasSubstr("/nowhere")));
}

}  // namespace
}  // namespace zero::store
