// Updates that run beside the next forward pass, through the engine's public interface: the same
// bits as in `step`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::HasSubstr;

TEST(UpdateInForward, GivesTheSameBits) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      for (const bool gradients : {false, true}) {
        SCOPED_TRACE(testing::Message() << "bf16 " << bf16 << ", ranks " << ranks
                                        << ", gradients on disk " << gradients);
        auto c = config(3, bf16);
        c.gradient_clipping = 0.01;
        const auto expected =
            states_after_training<Net>(c, AdamW{.lr = 1e-2}, ranks, folder.path());
        for (const bool in_forward : {false, true}) {
          auto disk = all_on_disk(c, folder);
          disk.update_in_forward = in_forward;
          disk.offload_optimizer.gradients = gradients;
          disk.max_live_parameters = 0;
          expect_equal(states_after_training<Net>(disk, AdamW{.lr = 1e-2}, ranks, folder.path()),
                       expected);
        }
      }
    }
  }
}

// Ends with updates under way, and leaves nothing behind.
TEST(UpdateInForward, AnEngineMayEndBeforeItsUpdates) {
  const TemporaryFolder folder;
  for (const bool in_backward : {false, true}) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(600, 500), nn::Linear(500, 600));
      auto c = all_on_disk(config(3), folder);
      c.update_in_backward = in_backward;
      Engine engine(net, AdamW{}, c, group);
      engine.backward(net->forward(torch::ones({2, 600})).mean());
      EXPECT_TRUE(engine.step().updated);
    });
  }
  expect_no_left_overs(folder);
}

// An error of an update that `step` left under way comes from the next call that needs it.
TEST(UpdateInForward, AFileThatIsCutOffMeanwhileIsAnErrorOfTheNextPass) {
  const TemporaryFolder folder;
  auto net = std::make_shared<Net>();
  Engine engine(net, AdamW{}, all_on_disk(config(3), folder), comm::single());
  train(engine, *net, 1);
  engine.complete_update();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (entry.is_regular_file() && entry.path().filename() == "states")
      std::filesystem::resize_file(entry.path(), 0);
  }
  std::string message;
  try {
    train(engine, *net, 2, 1);
    engine.complete_update();
  } catch (const StoreError& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("the file ends there"));
}

}  // namespace
}  // namespace zero
