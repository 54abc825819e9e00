// `zero train` with its linear layers in tiles, ranks as processes.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/apps/train_run.h"
#include "zero/checkpoint/safetensors.h"

namespace zero::test {
namespace {

using ::testing::HasSubstr;

// A model whose largest parameter is a linear layer's, 96 x 384.
constexpr int64_t kLargest = 96 * 384;
constexpr int64_t kTile = kLargest / 4;
constexpr int64_t kEmbedding = 256 * 96;

std::string wide_model(const TrainFolder& folder) {
  std::string file = folder / "wide.json";
  write_file(file,
             R"({"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 2, "n_positions": 64,
                 "vocab_size": 256, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0})");
  return file;
}

TEST(TrainTiled, EqualsWholeLayersToRoundingAndGathersLess) {
  const TrainFolder folder;
  const auto train = [&](const std::string& name, int64_t max_elements) {
    // One unit at a time, copied from the ranks that own it.
    const Json config{{"zero_optimization",
                       {{"stage", 3},
                        {"unit_bytes", 1024},
                        {"stage3_max_live_parameters", 0},
                        {"stage3_prefetch_bucket_size", 0}}},
                      {"one_sided_gather", false},
                      {"tiling", {{"max_elements", max_elements}}}};
    write_file(folder / (name + ".json"), config.dump());
    const auto outcome = folder.train(
        {"--config", folder / (name + ".json"), "--model", wide_model(folder), "--lr", "1e-3"},
        name);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return folder.event("memory", name)["per_rank"][0]["gathered_units"]["peak"].get<int64_t>();
  };
  EXPECT_EQ(train("whole", 0), (kLargest + 384) * 4) << "the weight, and its bias beside it";
  EXPECT_EQ(train("tiled", kTile), kEmbedding * 4) << "the embedding stays whole";

  const auto whole = folder.losses("whole");
  const auto tiled = folder.losses("tiled");
  ASSERT_EQ(whole.size(), tiled.size());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(tiled[i], whole[i], 1e-4 * whole[i]) << i;

  // The file has Hugging Face's names and shapes all the same.
  const SafetensorsReader expected(folder.out("whole") / "model.safetensors");
  const SafetensorsReader written(folder.out("tiled") / "model.safetensors");
  EXPECT_EQ(written.tensors(), expected.tensors());
  for (const auto& tensor : expected.tensors()) {
    EXPECT_TRUE(at::allclose(written.read(tensor.name), expected.read(tensor.name), 1e-2, 1e-3))
        << tensor.name;
  }
  EXPECT_EQ(folder.event("config", "tiled")["engine"]["tiling"]["max_elements"], kTile);
  EXPECT_FALSE(folder.event("config", "whole")["engine"].contains("tiling"));
}

TEST(TrainTiled, ResumesAndIsAnOptionOfTheProgram) {
  const TrainFolder folder;
  const auto tile = std::to_string(700);  // not whole rows of the 1024 and 4096 elements
  const auto train = [&](const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> options{"--stage", "3", "--dtype", "bf16", "--tile-elements", tile};
    options.insert(options.end(), more.begin(), more.end());
    const auto outcome = folder.train(options, name);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  };
  train("through", {});
  train("halves", {"--steps", "3", "--save-every", "3"});
  train("halves", {"--resume"});
  EXPECT_TRUE(folder.weights("halves") == folder.weights("through"));
  EXPECT_THAT(folder.train({"--tile-elements", "-1"}, "wrong").err, HasSubstr("--tile-elements"));
}

}  // namespace
}  // namespace zero::test
