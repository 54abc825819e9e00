// Each of tests/config/files that loads trains.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/config/settings.h"
#include "zero/train/trainer.h"

namespace zero::train {
namespace {

constexpr int kRanks = 2;

std::vector<std::string> files() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(ZERO_SOURCE) /
                                                               "tests/config/files"))
    names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<Settings> load(const std::string& name) {
  try {
    return Settings::load(
        std::filesystem::path(ZERO_SOURCE) / "tests/config/files" / (name + ".json"), kRanks);
  } catch (const ConfigError&) {
    return std::nullopt;  // config_test says why
  }
}

class EachFile : public testing::TestWithParam<std::string> {};

TEST_P(EachFile, Trains) {
  auto settings = load(GetParam());
  if (!settings) return;
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "a line to learn, number " + std::to_string(i % 10) + "\n";
  folder.write("text.txt", text);
  folder.write("tiny.json", R"({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2,
      "n_positions": 16, "vocab_size": 256})");
  // Fills in what the file leaves to the run, and the places of its folders.
  auto& program = settings->program;
  program.model = (folder / "tiny.json").string();
  program.data = {(folder / "text.txt").string()};
  program.out = (folder / "run").string();
  program.seq = 8;
  program.steps = 40;
  program.eval_tokens = 0;
  program.sample_tokens = 0;
  program.threads = 1;
  program.tensorboard.output_path = (folder / "events").string();
  program.csv_monitor.output_path = (folder / "csv").string();
  auto& engine = settings->engine;
  for (auto* path : {&engine.offload_optimizer.nvme_path, &engine.offload_param.nvme_path}) {
    if (!path->empty()) *path = folder.path().string();
  }
  auto& recompute = settings->model.activation_checkpointing;
  if (!recompute.nvme_path.empty()) recompute.nvme_path = folder.path().string();

  comm::run_as_threads(kRanks, [&](std::shared_ptr<comm::Group> group) {
    Trainer trainer(*settings, group);
    const auto name = trainer.engine().parameter_names().back();
    const auto before = trainer.engine().parameter(name).clone();
    // A dynamic loss scale finds its height first.
    int64_t updates = 0;
    for (int step = 0; step < 40 && updates < 4; ++step) {
      const auto report = trainer.train_step();
      EXPECT_TRUE(std::isfinite(report.loss));
      EXPECT_TRUE(settings->engine.scales_loss() || !report.skipped);
      updates += report.skipped ? 0 : 1;
    }
    EXPECT_EQ(updates, 4);
    EXPECT_EQ(trainer.engine().steps(), 4);
    trainer.engine().complete_update();
    EXPECT_FALSE(trainer.engine().parameter(name).equal(before)) << "a warm-up begins with rates "
                                                                    "of 0";
  });
}

INSTANTIATE_TEST_SUITE_P(Files, EachFile, testing::ValuesIn(files()),
                         [](const auto& info) { return info.param; });

TEST(Files, ThatTrainAreMany) {
  const auto all = files();
  EXPECT_GE(std::count_if(all.begin(), all.end(), [](const auto& name) { return load(name); }), 60);
}

}  // namespace
}  // namespace zero::train
