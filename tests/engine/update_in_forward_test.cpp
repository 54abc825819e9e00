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
#include "zero/engine/gathered.h"

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

// Parameters that stay in memory are updated in the step; the optimizer may be anywhere.
TEST(UpdateInForward, GoesWithEveryTierAndWithUpdatesInBackward) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    const auto c = config(3, bf16);
    const auto expected = states_after_training<Net>(c, AdamW{.lr = 1e-2}, 2, folder.path());
    for (const auto optimizer : {OffloadDevice::none, OffloadDevice::cpu, OffloadDevice::nvme}) {
      for (const int64_t kept : {0, 300}) {
        for (const bool in_backward : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << "bf16 " << bf16 << ", optimizer " << static_cast<int>(optimizer)
                       << ", kept " << kept << ", in backward " << in_backward);
          auto disk = all_on_disk(c, folder);
          disk.offload_optimizer.device = optimizer;
          disk.offload_param.max_in_cpu = kept;
          disk.update_in_backward = in_backward;
          // A unit that is written by name between backward and step would be refused: no write.
          if (in_backward) {
            expect_equal(weights_after(disk, 2, 4), weights_after(c, 2, 4));
          } else {
            expect_equal(states_after_training<Net>(disk, AdamW{.lr = 1e-2}, 2, folder.path()),
                         expected);
          }
        }
      }
    }
  }
}

TEST(UpdateInForward, MicroBatchesAddUpAsBefore) {
  const TemporaryFolder folder;
  for (const bool gradients : {false, true}) {
    auto c = config(3, true, 2);
    c.gradient_clipping = 0.01;
    auto disk = all_on_disk(c, folder);
    disk.offload_optimizer.gradients = gradients;
    expect_equal(after_accumulation(disk, 2), after_accumulation(c, 2));
  }
}

// A pass between two steps that uses a part of the model, or none of it with gradients, completes
// what it uses; the rest is complete before gradients change.
TEST(UpdateInForward, PartsThatTheNextPassDoesNotUseAreUpdatedToo) {
  const TemporaryFolder folder;
  for (const bool in_backward : {false, true}) {
    const auto run = [&](const Config& c) {
      return of_rank_zero(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, c, group);
        std::vector<at::Tensor> seen;
        train(engine, *net, 2);
        {
          const torch::NoGradGuard guard;
          seen.push_back(loss_of(*net, group->rank(), 9));
        }
        train_without_a(engine, *net);
        train(engine, *net, 1, 2);
        {
          const Gathered scope(engine, net->b->parameters(), Gathered::Access::read);
          seen.push_back(net->b->weight.detach().to(at::kFloat).clone());
        }
        for (auto& tensor : weights(engine)) seen.push_back(tensor);
        return seen;
      });
    };
    auto disk = all_on_disk(config(3), folder);
    disk.update_in_backward = in_backward;
    expect_equal(run(disk), run(config(3)));
  }
}

// The same where all micro-batches of a step are one pass: what they do not use is complete before
// its gradients, zeros, are reduced.
TEST(UpdateInForward, PartsThatLayerMajorPassesDoNotUseAreUpdatedToo) {
  const TemporaryFolder folder;
  const auto run = [&](const Config& c) {
    return of_rank_zero(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, c, group);
      for (int64_t i = 0; i < 6; ++i) {
        engine.accumulate(2, [&](const auto& layer_done) {
          for (int64_t j = 0; j < 2; ++j) {
            const auto x = input(group->rank(), 2 * i + j, net->c->weight.scalar_type());
            const auto y = i % 2 == 0 ? net->forward(x) : net->a(x);
            y.to(at::kFloat).pow(2).mean().backward();
          }
          layer_done();
        });
        engine.step();
      }
      return weights(engine);
    });
  };
  auto c = config(3, true, 2);
  c.layer_major_accumulation = true;
  auto disk = all_on_disk(c, folder);
  const auto expected = run(c);
  expect_equal(run(disk), expected);
  disk.offload_optimizer.gradients = true;
  expect_equal(run(disk), expected);
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
