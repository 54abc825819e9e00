// Disks, other programs and users damage states on disk: an error that names it, never wrong
// weights.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>

#include "tests/store/aligned_memory.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/store/folder.h"

namespace zero::store {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kBytes = 16 * kAlignment;

// A store that fails: it does each piece when it is pushed, after `fault` has had a look at it.
class FaultyQueue final : public Queue {
 public:
  /// Returns an errno, or 0 to go on; may change the piece, which is then done as if it were asked
  /// for.
  using Fault = std::function<int(Piece&)>;
  explicit FaultyQueue(Fault fault) : fault_(std::move(fault)) {}
  void push(std::span<const Piece> pieces) override {
    for (Piece piece : pieces) {
      int error = fault_(piece);
      const auto bytes = static_cast<size_t>(piece.bytes);
      if (error == 0) {
        const auto moved = piece.write ? pwrite(piece.file, piece.memory, bytes, piece.offset)
                                       : pread(piece.file, piece.memory, bytes, piece.offset);
        if (moved != piece.bytes) error = EIO;
      }
      if (error != 0) piece.request->fail(error, piece.file, piece.offset);
    }
  }
  void wait(Request&) override {}
  bool done(const Request&) override { return true; }
  std::string_view name() const override { return "faulty"; }

 private:
  Fault fault_;
};

FileOptions faulty(const FaultyQueue::Fault& fault) {
  return {.block_bytes = 4 * kAlignment,
          .queue = [fault](int) { return std::make_unique<FaultyQueue>(fault); }};
}

class StatesOnDisk : public testing::Test {
 protected:
  // Changes the file as another program would.
  void flip_bit(int64_t at) const {
    const int file = open(path_.c_str(), O_RDWR | O_CLOEXEC);
    char byte = 0;
    EXPECT_EQ(pread(file, &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 4);
    EXPECT_EQ(pwrite(file, &byte, 1, at), 1);
    EXPECT_EQ(fsync(file), 0);
    close(file);
  }
  // Matches an error that a page is not as it was written.
  auto names_page(int64_t page) const {
    return ThrowsMessage<StoreError>(HasSubstr(path_ + " holds other bytes at byte " +
                                               std::to_string(page * kAlignment) + " than"));
  }

  TemporaryFolder folder_;
  std::string path_ = (folder_.path() / "states").string();
  Memory written_ = memory(kBytes, 7);
  Memory read_ = memory(kBytes);
};

TEST_F(StatesOnDisk, AFlippedBitIsAnErrorThatNamesThePage) {
  for (const bool uring : {true, false}) {
    File file(path_, kBytes, {.block_bytes = 2 * kAlignment, .uring = uring});
    file.write(0, written_.get(), kBytes).wait();
    flip_bit(5 * kAlignment + 123);
    EXPECT_THAT([&] { file.read(0, read_.get(), kBytes).wait(); }, names_page(5));
    EXPECT_THAT([&] { file.read(5 * kAlignment, read_.get(), kAlignment).wait(); }, names_page(5));
    // The others are as they were, and so is that one when it is written again.
    file.read(6 * kAlignment, read_.get(), 10 * kAlignment).wait();
    file.write(5 * kAlignment, written_.get() + 5 * kAlignment, kAlignment).wait();
    file.read(0, read_.get(), kBytes).wait();
    EXPECT_TRUE(equal(read_, written_, kBytes));
  }
}

TEST_F(StatesOnDisk, AFlippedBitIsNamedInItsFileOfSeveral) {
  const auto other = (folder_.path() / "other").string();
  File file({other, path_}, {1, 1}, kBytes, {.block_bytes = 2 * kAlignment});
  file.write(0, written_.get(), kBytes).wait();
  flip_bit(3 * kAlignment);
  EXPECT_THAT([&] { file.read(0, read_.get(), kBytes).wait(); }, names_page(3));
}

TEST_F(StatesOnDisk, WithoutChecksumsTheDiskIsBelieved) {
  File file(path_, kBytes, {.checksums = false});
  file.write(0, written_.get(), kBytes).wait();
  flip_bit(5 * kAlignment + 123);
  file.read(0, read_.get(), kBytes).wait();
  EXPECT_FALSE(equal(read_, written_, kBytes));
}

TEST_F(StatesOnDisk, AFileTruncatedAndGrownAgainIsNotReadAsZeros) {
  File file(path_, kBytes);
  file.write(0, written_.get(), kBytes).wait();
  ASSERT_EQ(truncate(path_.c_str(), 8 * kAlignment), 0);
  ASSERT_EQ(truncate(path_.c_str(), kBytes), 0);
  EXPECT_THAT([&] { file.read(0, read_.get(), kBytes).wait(); }, names_page(8));
}

TEST_F(StatesOnDisk, ATornWriteIsNoticed) {
  // The disk says that it has written a block, and has written half of it.
  File file(path_, kBytes, faulty([](Piece& piece) {
              if (piece.write && piece.offset == 8 * kAlignment) piece.bytes /= 2;
              return 0;
            }));
  file.write(0, written_.get(), kBytes).wait();
  EXPECT_THAT([&] { file.read(0, read_.get(), kBytes).wait(); }, names_page(10));
}

TEST_F(StatesOnDisk, AWriteThatNeverReachedTheDiskIsNoticed) {
  bool deaf = false;
  File file(path_, kBytes, faulty([&](Piece& piece) {
              if (piece.write && deaf) piece.bytes = 0;
              return 0;
            }));
  file.write(0, written_.get(), kBytes).wait();
  deaf = true;
  const auto later = memory(kBytes, 8);
  file.write(0, later.get(), kBytes).wait();
  EXPECT_THAT([&] { file.read(0, read_.get(), kBytes).wait(); }, names_page(0));
}

TEST_F(StatesOnDisk, AReadErrorNamesFileOffsetAndReason) {
  File file(path_, kBytes, faulty([](Piece& piece) {
              return !piece.write && piece.offset >= 8 * kAlignment ? EIO : 0;
            }));
  file.write(0, written_.get(), kBytes).wait();
  EXPECT_THAT([&] { file.read(0, read_.get(), kBytes).wait(); },
              ThrowsMessage<StoreError>(
                  AllOf(HasSubstr("Cannot read " + path_ + " at byte 32768: Input/output error"),
                        HasSubstr("failing"))));
  file.read(0, read_.get(), 8 * kAlignment).wait();
}

TEST_F(StatesOnDisk, ADiskThatFillsUpIsAnErrorOfTheWrite) {
  // Nothing could be reserved, or the disk promised more than it has.
  bool full = true;
  File file(path_, kBytes, faulty([&](Piece& piece) { return piece.write && full ? ENOSPC : 0; }));
  EXPECT_THAT([&] { file.write(0, written_.get(), kBytes).wait(); },
              ThrowsMessage<StoreError>(
                  AllOf(HasSubstr("Cannot write " + path_ + " at byte 0: No space left on device"),
                        HasSubstr("Free space there"))));
  // The caller knows, and may try again.
  full = false;
  file.write(0, written_.get(), kBytes).wait();
  file.read(0, read_.get(), kBytes).wait();
  EXPECT_TRUE(equal(read_, written_, kBytes));
}

TEST_F(StatesOnDisk, AFailedWriteThatNobodyWaitedForIsAnErrorOfWhatFollows) {
  for (const bool assigned : {false, true}) {
    bool full = true;
    File file(path_, kBytes,
              faulty([&](Piece& piece) { return piece.write && full ? ENOSPC : 0; }));
    if (assigned) {
      auto transfer = file.write(0, written_.get(), kBytes);
      transfer = Transfer();
    } else {
      file.write(0, written_.get(), kBytes);
    }
    full = false;
    const auto says = ThrowsMessage<StoreError>(
        AllOf(HasSubstr("Cannot write " + path_ + " at byte 0: No space left on device"),
              HasSubstr("resume from a checkpoint")));
    EXPECT_THAT([&] { file.read(0, read_.get(), kBytes); }, says);
    EXPECT_THAT([&] { file.write(0, written_.get(), kBytes); }, says);
    EXPECT_THAT([&] { file.read(0, read_.get(), kBytes); }, says);  // for good
  }
}

TEST_F(StatesOnDisk, AReadThatNobodyWaitedForMayFail) {
  File file(path_, kBytes, faulty([](Piece& piece) { return piece.write ? 0 : EIO; }));
  file.read(0, read_.get(), kBytes);
  file.write(0, written_.get(), kBytes).wait();
}

TEST_F(StatesOnDisk, AFullDiskIsNamedWithWhatIsNeededAndThere) {
  struct statvfs disk {};
  ASSERT_EQ(statvfs(folder_.path().c_str(), &disk), 0);
  const auto left = static_cast<int64_t>(disk.f_bavail * disk.f_frsize);
  EXPECT_THAT([&] { File(path_, left + (int64_t{1} << 40)); },
              ThrowsMessage<StoreError>(AllOf(
                  HasSubstr("Cannot reserve "), HasSubstr(path_ + ": No space left on device"),
                  HasSubstr("The disk has "), HasSubstr("Free space there"))));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(StatesOnDisk, ALimitOnFilesIsNamedAndKillsNobody) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THAT(
      [&] { File(path_, 2 << 20); },
      ThrowsMessage<StoreError>(AllOf(HasSubstr("Cannot reserve 2.00 MiB for " + path_),
                                      HasSubstr("at most 1.00 MiB"), HasSubstr("ulimit -f"))));
  { const File allowed(path_, 1 << 20); }
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(StatesOnDisk, AFolderWithoutPermissionIsNamed) {
  fs::permissions(folder_.path(), fs::perms::owner_read | fs::perms::owner_exec);
  // To root everything is permitted.
  constexpr uid_t kNobody = 65534;
  const bool root = geteuid() == 0;
  ASSERT_EQ(seteuid(root ? kNobody : geteuid()), 0);
  EXPECT_THAT(
      [&] { File(path_, 4096); },
      ThrowsMessage<StoreError>(AllOf(HasSubstr(path_ + ": Permission denied"),
                                      HasSubstr("Name a folder that this user may write"))));
  EXPECT_THAT([&] { Folder(folder_.path().string()); },
              ThrowsMessage<StoreError>(
                  AllOf(HasSubstr(folder_.path().string() + ": Permission denied"),
                        HasSubstr("Name an existing folder that this user may write"))));
  ASSERT_EQ(seteuid(root ? 0 : geteuid()), 0);
  fs::permissions(folder_.path(), fs::perms::owner_all);
}

TEST_F(StatesOnDisk, APathThroughAFileIsNamed) {
  const auto file = folder_.write("file", "x").string();
  EXPECT_THAT([&] { Folder below(file); },
              ThrowsMessage<StoreError>(HasSubstr(file + ": Not a directory")));
}

// A run of its own with states in a private folder of `parent`, until it is told to end.
class AnotherRun {
 public:
  explicit AnotherRun(const std::string& parent) {
    int ready[2];
    int end[2];
    if (pipe(ready) != 0 || pipe(end) != 0) std::abort();
    child_ = fork();
    if (child_ == 0) {
      close(end[1]);
      // The child does not use gtest's exit: a failure here is an exit status there.
      _exit(run(parent, ready[1], end[0]));
    }
    close(ready[1]);
    close(end[0]);
    end_ = end[1];
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1) << "the other run did not come up";
    close(ready[0]);
  }
  AnotherRun(const AnotherRun&) = delete;
  AnotherRun& operator=(const AnotherRun&) = delete;
  ~AnotherRun() {
    if (child_ > 0) end();
  }
  /// 0: its states were what it had written.
  int end() {
    close(end_);
    int status = 0;
    waitpid(std::exchange(child_, -1), &status, 0);
    return status;
  }
  void kill() {
    ::kill(child_, SIGKILL);
    end();
  }

 private:
  static int run(const std::string& parent, int ready, int end) {
    try {
      const Folder folder(parent);
      File file(folder.path() + "/states", kBytes);
      const auto written = memory(kBytes, 21);
      file.write(0, written.get(), kBytes).wait();
      if (::write(ready, "x", 1) != 1) return 2;
      auto going_on = file.write(0, written.get(), kBytes);  // a killed run is killed in this
      char byte = 0;
      if (::read(end, &byte, 1) != 0) return 3;
      going_on.wait();
      const auto read = memory(kBytes);
      file.read(0, read.get(), kBytes).wait();
      return equal(read, written, kBytes) ? 0 : 4;
    } catch (const std::exception&) {
      return 5;
    }
  }
  pid_t child_ = -1;
  int end_ = -1;
};

int64_t entries(const fs::path& folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

TEST_F(StatesOnDisk, AKilledRunsFilesAreRemovedByTheNext) {
  AnotherRun(folder_.path().string()).kill();
  EXPECT_EQ(entries(folder_.path()), 1);
  const Folder next(folder_.path().string());
  EXPECT_EQ(entries(folder_.path()), 1);
  EXPECT_EQ(fs::directory_iterator(folder_.path())->path().string(), next.path());
}

TEST_F(StatesOnDisk, TwoRunsWorkInOneFolder) {
  AnotherRun other(folder_.path().string());
  {
    const Folder ours(folder_.path().string());
    EXPECT_EQ(entries(folder_.path()), 2);
    File file(ours.path() + "/states", kBytes);
    file.write(0, written_.get(), kBytes).wait();
    file.read(0, read_.get(), kBytes).wait();
    EXPECT_TRUE(equal(read_, written_, kBytes));
  }
  EXPECT_EQ(entries(folder_.path()), 1);
  EXPECT_EQ(other.end(), 0);
  EXPECT_EQ(entries(folder_.path()), 0);
}

}  // namespace
}  // namespace zero::store
