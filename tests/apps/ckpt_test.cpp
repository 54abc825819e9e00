// `zero ckpt import`, `export`, `diff` and `reshard`, as users start them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/checkpoint/samples.h"
#include "tests/support/run_program.h"

namespace zero::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

Outcome ckpt(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {ZERO_PROGRAM, "ckpt"});
  return run(arguments);
}

TEST(Ckpt, ConvertsFromAndToOtherPrograms) {
  const TemporaryFolder folder;
  const std::string sample = samples() / "ds/z2-bf16";
  const std::string own = folder / "own";
  const auto imported = ckpt({"import", sample, own, "--json"});
  ASSERT_EQ(imported.status, 0) << imported.err;
  const auto report = nlohmann::json::parse(imported.out);
  EXPECT_EQ(report["form"], "DeepSpeed, stage 2 of 2 ranks");
  EXPECT_EQ(report["step"], 3);
  EXPECT_EQ(report["elements"], 212);
  EXPECT_EQ(report["with_states"], 8);
  EXPECT_THAT(report["left_out"].dump(), HasSubstr("mine"));

  EXPECT_EQ(ckpt({"verify", own}).status, 0);
  EXPECT_THAT(ckpt({"diff", sample, own}).out, HasSubstr("are the same: step 3"));
  EXPECT_EQ(ckpt({"reshard", own, folder / "three", "--ranks", "3", "--stage", "1"}).status, 0);
  fs::create_directory(folder / "run");
  fs::rename(folder / "three", folder / "run/checkpoint-3");
  for (const auto* action : {"inspect", "verify"})
    EXPECT_THAT(ckpt({action, folder / "run"}).out, HasSubstr("run/checkpoint-3"));
  EXPECT_THAT(ckpt({"inspect", folder / "run"}).out, HasSubstr("at stage 1 on 3 ranks"));
  fs::rename(folder / "run/checkpoint-3", folder / "three");
  EXPECT_EQ(ckpt({"diff", folder / "three", own}).status, 0);
  EXPECT_EQ(ckpt({"export", own, folder / "dcp", "--to", "dcp"}).status, 0);
  EXPECT_EQ(ckpt({"diff", folder / "dcp", own}).status, 0);
  const auto exported = ckpt({"export", own, folder / "universal", "--to", "deepspeed"});
  EXPECT_THAT(exported.out, HasSubstr("left out: frozen.weight"));

  const auto again = ckpt({"export", own, folder / "dcp", "--to", "hf"});
  EXPECT_EQ(again.status, 1);
  EXPECT_THAT(again.err, HasSubstr("is there. Name a folder that does not exist"));
  const auto differ = ckpt({"diff", own, samples() / "ds/z2-bf16-acc2", "--json"});
  EXPECT_EQ(differ.status, 1);
  EXPECT_FALSE(nlohmann::json::parse(differ.out)["same"]);
  EXPECT_THAT(differ.out, HasSubstr("emb.weight differ in"));
  EXPECT_EQ(ckpt({"diff", own, samples() / "ds/z2-bf16-acc2", "--tolerance", "1"}).status, 0);
  const auto missing = ckpt({"import", folder / "nothing", folder / "out"});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, HasSubstr("does not exist"));
  EXPECT_FALSE(fs::exists(folder / "out"));
}

}  // namespace
}  // namespace zero::test
