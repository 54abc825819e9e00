// Folders that are whole or absent.
#include "zero/checkpoint/whole_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "tests/support/file_calls.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::set<std::string> names(const fs::path& folder) {
  std::set<std::string> all;
  for (const auto& entry : fs::directory_iterator(folder)) all.insert(entry.path().filename());
  return all;
}

void put(const fs::path& folder, const std::string& text) {
  OutputFile file(folder / "file", &fail<DataError>);
  file.write(text.data(), text.size());
  file.commit();
}

void replace(const fs::path& target, const std::string& text) {
  WholeFolder folder(target, &fail<DataError>);
  put(folder.path(), text);
  fs::create_directories(folder.path() / "below");
  put(folder.path() / "below", text);
  folder.commit();
}

using Names = std::set<std::string>;

TEST(WholeFolder, TakesTheNameAndThePlaceOfAnEarlierOne) {
  for (const bool swaps : {true, false}) {
    const TemporaryFolder parent;
    test::FileCalls calls(parent.path());
    calls.refuse_swaps(!swaps);
    const auto target = parent.path() / "made" / "by it" / "folder";
    for (const char* text : {"first", "second", "third"}) {
      replace(target / "", text);
      EXPECT_EQ(names(target.parent_path()), Names{"folder"});
      EXPECT_EQ(names(target), (Names{"below", "file"}));
      EXPECT_EQ(TemporaryFolder::read(target / "file"), text);
      EXPECT_EQ(TemporaryFolder::read(target / "below" / "file"), text);
    }
  }
}

TEST(WholeFolder, LeavesTheEarlierOneUnlessItIsCommitted) {
  const TemporaryFolder parent;
  replace(parent / "folder", "earlier");
  {
    const WholeFolder abandoned(parent / "folder", &fail<DataError>);
    put(abandoned.path(), "later");
    EXPECT_EQ(abandoned.path(), WholeFolder::partial(parent / "folder"));
  }
  EXPECT_EQ(names(parent.path()), Names{"folder"});
  EXPECT_EQ(TemporaryFolder::read(parent / "folder/file"), "earlier");
}

TEST(WholeFolder, RemovesWhatOthersThatWereKilledHaveLeft) {
  const TemporaryFolder parent;
  parent.write("folder/file", "earlier");
  parent.write("folder.partial/half", "");
  parent.write("folder.earlier/file", "of long ago");
  replace(parent / "folder", "later");
  EXPECT_EQ(names(parent.path()), Names{"folder"});
  EXPECT_EQ(names(parent / "folder"), (Names{"below", "file"}));
}

TEST(WholeFolder, PutsBackTheEarlierOneThatWasMovedAside) {
  const TemporaryFolder parent;
  parent.write("folder.earlier/file", "earlier");
  parent.write("folder.partial/half", "");
  WholeFolder::remove_left_overs(parent / "folder");
  EXPECT_EQ(names(parent.path()), Names{"folder"});
  EXPECT_EQ(TemporaryFolder::read(parent / "folder/file"), "earlier");
}

TEST(WholeFolder, OneAtATimeFillsIt) {
  const TemporaryFolder parent;
  const WholeFolder first(parent / "folder", &fail<DataError>);
  put(first.path(), "first");
  EXPECT_THAT([&] { WholeFolder(parent / "folder", &fail<DataError>); },
              ThrowsMessage<DataError>(HasSubstr("Another process is writing")));
  WholeFolder::remove_left_overs(parent / "folder");
  EXPECT_EQ(TemporaryFolder::read(first.path() / "file"), "first");
}

TEST(WholeFolder, AForkedChildLeavesItToItsParent) {
  const TemporaryFolder parent;
  std::optional<WholeFolder> folder(std::in_place, parent / "folder", &fail<DataError>);
  std::optional<OutputFile> file(std::in_place, folder->path() / "file", &fail<DataError>);
  const pid_t child = fork();
  if (child == 0) {
    file.reset();
    folder.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  file->commit();
  folder->commit();
  EXPECT_EQ(names(parent / "folder"), Names{"file"});
}

TEST(WholeFolder, SaysWhatCannotBe) {
  const TemporaryFolder parent;
  parent.write("file", "of the user");
  EXPECT_THAT([&] { WholeFolder(parent / "file", &fail<DataError>); },
              ThrowsMessage<DataError>(HasSubstr("file exists and is not a folder")));
  EXPECT_THAT([&] { WholeFolder(parent / "file/below", &fail<DataError>); },
              ThrowsMessage<DataError>(AllOf(HasSubstr("Cannot make"), HasSubstr("Not a dir"))));
  EXPECT_THAT([] { WholeFolder("..", &fail<DataError>); },
              ThrowsMessage<DataError>(HasSubstr("Name a folder of its own")));
  EXPECT_EQ(TemporaryFolder::read(parent / "file"), "of the user");
}

}  // namespace
}  // namespace zero
