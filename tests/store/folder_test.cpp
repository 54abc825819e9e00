#include "zero/store/folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace zero::store {
namespace {

namespace fs = std::filesystem;

int64_t entries_of(const fs::path& folder) {
  return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

TEST(Folder, IsPrivateAndGoesWithItsFiles) {
  TemporaryFolder parent;
  {
    const Folder first(parent.path().string());
    const Folder second(parent.path().string());
    EXPECT_NE(first.path(), second.path());
    std::ofstream(fs::path(first.path()) / "states") << "x";
    EXPECT_EQ(entries_of(parent.path()), 2);
  }
  EXPECT_EQ(entries_of(parent.path()), 0);
}

TEST(Folder, RemovesWhatAKilledRunLeftAndNothingElse) {
  TemporaryFolder parent;
  std::ofstream(parent.path() / "the user's") << "x";
  const Folder running(parent.path().string());
  const pid_t child = fork();
  if (child == 0) {
    new Folder(parent.path().string());
    _exit(0);  // as if killed: no destructor
  }
  waitpid(child, nullptr, 0);
  EXPECT_EQ(entries_of(parent.path()), 3);
  const Folder next(parent.path().string());
  EXPECT_EQ(entries_of(parent.path()), 3);  // the user's, `running` and `next`
  EXPECT_TRUE(fs::exists(running.path()));
  EXPECT_TRUE(fs::exists(parent.path() / "the user's"));
}

TEST(Folder, NamesAFolderThatIsNotThere) {
  EXPECT_THAT(
      [] { Folder folder("/nowhere/at/all"); },
      testing::ThrowsMessage<StoreError>(testing::AllOf(
          testing::HasSubstr("/nowhere/at/all"), testing::HasSubstr("No such file or directory"))));
}

}  // namespace
}  // namespace zero::store
