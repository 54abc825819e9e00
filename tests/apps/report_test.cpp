// `zero report` as a user runs it, on runs of `zero train`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/apps/train_run.h"

namespace zero::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Outcome report(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {ZERO_PROGRAM, "report"});
  return run(arguments);
}

TEST(ReportProgram, ShowsARunWithItsPlanAndItsOrigins) {
  const TrainFolder folder;
  write_file(folder / "ds.json", R"({"gradient_clipping": 0.5})");
  const auto trained =
      folder.train({"--config", folder / "ds.json", "--stage", "3", "--save-every", "3"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  const auto outcome = report({folder.out().string()});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("6 steps"));
  const auto page = read_file(folder.out() / "report.html");
  for (const auto* says :
       {"finished after step 6", "plan: activations", "rank 1: optimizer", "A checkpoint of ",
        "<td>gradient_clipping</td><td>0.5</td><td>file</td>",
        "<td>zero_optimization.stage</td><td>3</td><td>command line</td>", "reduce_scatter"})
    EXPECT_THAT(page, HasSubstr(says));
  EXPECT_THAT(page, Not(HasSubstr("There is no plan")));
  // A run that goes on has the options of its checkpoint.
  const auto resumed =
      run({ZERO_PROGRAM, "train", "--resume", "--out", folder.out(), "--steps", "8"});
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  const auto two =
      report({folder.out().string(), folder.out().string(), "--out", folder / "two.html"});
  ASSERT_EQ(two.status, 0) << two.err;
  EXPECT_EQ(report({folder.out().string(), "--watch"}).status, 0);  // it has ended
  const auto again = read_file(folder.out() / "report.html");
  for (const auto* says : {"finished after step 8", "The run went on from the checkpoint of step 6",
                           "<td>gradient_clipping</td><td>0.5</td><td>checkpoint</td>",
                           "<td>train.steps</td><td>8</td><td>command line</td>"})
    EXPECT_THAT(again, HasSubstr(says));
  EXPECT_THAT(again, Not(HasSubstr("http-equiv='refresh'")));
}

TEST(ReportProgram, NamesWhatItCannotUse) {
  const TemporaryFolder folder;
  const auto no_run = report({folder.path().string()});
  EXPECT_EQ(no_run.status, 2);
  EXPECT_THAT(no_run.err, HasSubstr("holds no log.jsonl"));
  const auto log = folder.write("log.jsonl", "");
  const auto empty = report({folder.path().string()});
  EXPECT_EQ(empty.status, 1);
  EXPECT_THAT(empty.err, HasSubstr("is empty"));
  const auto over = report({folder.path().string(), "--out", log});
  EXPECT_EQ(over.status, 2);
  EXPECT_THAT(over.err, HasSubstr("is no report"));
  EXPECT_FALSE(std::filesystem::exists(folder / "report.html"));
  EXPECT_EQ(report({"a", "b", "c"}).status, 2);
}

}  // namespace
}  // namespace zero::test
