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
#include "tests/engine/worlds.h"
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

struct Read {
  std::vector<double> norms;
  std::vector<at::Tensor> weights;  // and all else that was read
  std::vector<int64_t> sums;        // bytes of gradients that the rank holds after each step
  int64_t formula = 0;
  int64_t peak = 0;  // the most such bytes
};

// Trains, and reads the parameters after each step in another way: an evaluation, by name, in a
// scope, in a save that is loaded, and in the next pass.
Read read_after_steps(World world, const Config& c, const TemporaryFolder& folder, int block = 0) {
  return train_in(world, block, [&](const std::shared_ptr<comm::Group>& group) {
    auto model = std::make_shared<Uneven>();
    Engine engine(model, AdamW{.lr = 1e-2}, c, group);
    Read read;
    const auto gradients = [&] { return group->ledger()->usage(Category::gradients).current; };
    const auto train = [&](int64_t step) {
      for (int64_t i = 0; i < c.gradient_accumulation_steps; ++i) {
        engine.backward(model->loss(group->rank(), 10 * step + i, true));
        const auto result = engine.step();
        if (result.boundary) read.norms.push_back(result.grad_norm);
      }
      read.sums.push_back(gradients());
    };
    const auto evaluate = [&] {
      const torch::NoGradGuard guard;
      read.weights.push_back(model->loss(0, 5, true).clone());
      EXPECT_EQ(gradients(), 0);
    };
    train(0);
    evaluate();
    train(1);
    EXPECT_EQ(engine.parameter_steps("net.b.weight"), 2);
    read.weights.push_back(engine.optimizer_state("net.b.weight", "exp_avg"));
    train(2);
    {
      const Gathered scope(engine, {model->net->b->weight});
      read.weights.push_back(model->net->b->weight.detach().to(at::kFloat, false, true));
    }
    train(3);
    engine.set_parameter("extra.bias", torch::linspace(-1, 1, 7));
    train(4);
    engine.save((folder.path() / "save").string());
    train(5);
    train(6);
    for (auto& weight : weights(engine)) read.weights.push_back(weight);
    train(7);
    engine.load((folder.path() / "save").string());  // drops the updates of that step
    EXPECT_EQ(gradients(), 0);
    read.peak = group->ledger()->usage(Category::gradients).peak;
    train(5);
    train(6);
    expect_equal(weights(engine),
                 {read.weights.end() - engine.parameter_names().size(), read.weights.end()});
    read.formula = engine.memory_formula().gradients;
    return read;
  });
}

TEST(UpdateInForward, UpdatesUnitsInMemoryAsTheyAreGatheredBetweenHosts) {
  const TemporaryFolder folder;
  for (const auto world : {kTwoByOne, kTwoByTwo}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        SCOPED_TRACE(testing::Message() << world.hosts << " x " << world.ranks_a_host << ", bf16 "
                                        << bf16 << ", k " << k);
        auto c = clipped(3, bf16, k);
        const auto expect_same = [&](const Read& read, const Read& expected, bool waits) {
          EXPECT_EQ(read.norms, expected.norms);
          expect_equal(read.weights, expected.weights);
          EXPECT_EQ(read.peak, read.formula);
          EXPECT_EQ(read.sums, std::vector<int64_t>(10, waits ? read.formula : 0));
        };
        const auto waiting = read_after_steps(world, c, folder);
        EXPECT_GT(waiting.formula, 0);
        const auto on_one_host = read_after_steps({1, world.hosts * world.ranks_a_host}, c, folder,
                                                  world.ranks_a_host > 1 ? world.ranks_a_host : 0);
        c.update_in_forward = false;
        const auto in_step = read_after_steps(world, c, folder);
        expect_same(waiting, in_step, true);
        expect_same(in_step, on_one_host, false);
        expect_same(on_one_host, in_step, false);
      }
    }
  }
}

// Some units wait in memory, and others are on a disk, with their parameters or without.
TEST(UpdateInForward, LeavesUnitsInMemoryBesideThoseOnADisk) {
  const TemporaryFolder folder;
  const auto c = clipped(3, true);
  const auto expected = outcome_of({1, 2}, c);
  for (auto disk : {on_disk(c, folder), all_on_disk(c, folder, 400)}) {
    disk.offload_optimizer.ratio = 0.5;
    expect_same(outcome_of(kTwoByOne, disk), expected);
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
