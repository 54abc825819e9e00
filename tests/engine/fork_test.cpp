// A child that is forked without exec leaves what its parent has alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/run_program.h"

namespace zero {
namespace {

using ::testing::HasSubstr;

class Fork : public ::testing::TestWithParam<const char*> {};

TEST_P(Fork, OfAChildThatExitsChangesNothingForItsParent) {
  const test::TemporaryFolder folder;
  const auto train = [&](const char* how) {
    // The child leaves memory to its parent and does not free it: no leak.
    const char* options = std::getenv("ASAN_OPTIONS");
    const auto no_leaks = std::string(options == nullptr ? "" : options) + ":detect_leaks=0";
    test::Program program({ZERO_PROGRAM, "launch", "-n", "2", "--", FORK_PROGRAM,
                           folder.path().string(), GetParam(), how},
                          {{"ASAN_OPTIONS", no_leaks}});
    return program.wait(std::chrono::seconds(60));
  };
  const auto expected = train("stay");
  ASSERT_EQ(expected.status, 0) << expected.err;
  ASSERT_THAT(expected.out, HasSubstr("weights"));
  const auto outcome = train("fork");
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  // The ranks speak in any order, and say the same.
  const auto line = expected.out.substr(expected.out.find("weights"));
  const auto said = line.substr(0, line.find('\n'));
  EXPECT_THAT(outcome.out, HasSubstr("[0] " + said));
  EXPECT_THAT(outcome.out, HasSubstr("[1] " + said));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

INSTANTIATE_TEST_SUITE_P(EngineTiers, Fork, ::testing::Values("memory", "window", "disk"),
                         [](const auto& of) { return std::string(of.param); });

}  // namespace
}  // namespace zero
