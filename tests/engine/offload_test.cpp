// States on disk, through the engine's public interface: the same bits as in memory, bytes read and
// written, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <filesystem>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"
#include "zero/engine/tiers.h"
#include "zero/paging/pager.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::HasSubstr;

void step_on_ones(Engine& engine, nn::SequentialImpl& net) {
  const auto dtype = engine.config().bf16 ? at::kBFloat16 : at::kFloat;
  engine.backward(net.forward(torch::ones({1, 1500}, dtype)).to(at::kFloat).mean());
  engine.step();
}

TEST(EngineOffload, StatesOnDiskGiveTheSameBits) {
  const TemporaryFolder folder;
  const std::vector<Optimizer> optimizers{AdamW{.lr = 1e-2}, Sgd{.lr = 1e-2, .momentum = 0.9},
                                          Sgd{.lr = 1e-2}};
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      for (int ranks = 1; ranks <= 3; ++ranks) {
        for (const auto& optimizer : optimizers) {
          const auto c = config(stage, bf16);
          const auto expected = states_after_training<Net>(c, optimizer, ranks, folder.path());
          for (const int64_t buffers : {1, 4}) {
            auto disk = on_disk(c, folder, buffers);
            disk.offload_optimizer.pipeline_read = buffers > 1;
            disk.offload_optimizer.pipeline_write = buffers > 1;
            disk.aio.use_io_uring = stage % 2 == 0;
            expect_equal(states_after_training<Net>(disk, optimizer, ranks, folder.path()),
                         expected);
          }
        }
      }
    }
  }
  expect_no_left_overs(folder);
}

TEST(EngineOffload, ParametersOnDiskMoveTheBytesOfThePlanAndHoldNoneInMemory) {
  const TemporaryFolder folder;
  struct Form {
    bool bf16, split;
  };
  for (const int ranks : {1, 2}) {
    for (const auto [bf16, split] : {Form{false, false}, Form{true, false}, Form{true, true}}) {
      run_as_threads(ranks, [&, bf16 = bf16, split = split](auto group) {
        auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(1500, 700),
                                                        nn::Linear(700, 1500), nn::Linear(1500, 1));
        auto c = all_on_disk(config(3, bf16), folder);
        c.split_master_weights = split;
        c.max_live_parameters = 0;
        c.prefetch_bucket_size = 0;
        c.offload_optimizer.pipeline_read = false;
        Engine engine(net, AdamW{}, c, group);
        const auto step = [&] { step_on_ones(engine, *net); };
        step();
        step();
        engine.complete_update();
        const auto before = engine.disk();
        const auto sent = group->traffic().count(comm::Collective::all_gather).logical_bytes;
        for (int i = 0; i < 3; ++i) step();
        engine.complete_update();
        const auto after = engine.disk();
        const auto whole = [](int64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
        const auto& layout = engine.layout();
        int64_t bytes = 0;
        int64_t read = 0;
        int64_t written = 0;
        for (int64_t u = 0; u < layout.unit_count(); ++u) {
          const int64_t master = bf16 ? whole(layout.slice_numel(u) * (split ? 2 : 4)) : 0;
          const int64_t states = whole(layout.slice_numel(u) * 4) * 2 + master;
          const int64_t parameters = whole(layout.slice_numel(u) * (bf16 ? 2 : 4));
          bytes += states + parameters;
          const auto& segments = layout.unit(u).segments;
          const bool padding_alone =
              std::none_of(segments.begin(), segments.end(), [&](const auto& segment) {
                return !partition::intersect(segment.range(), layout.slice(u, group->rank()))
                            .empty();
              });
          if (padding_alone) continue;
          written += states + parameters;
          read += states + (bf16 && !split ? 0 : parameters);
        }
        for (const auto& gather : engine.pager()->plan()->gathers)
          read += whole(layout.slice_numel(gather.unit) * (bf16 ? 2 : 4));
        EXPECT_EQ(after.bytes, bytes);
        EXPECT_EQ(after.written - before.written, 3 * written);
        EXPECT_EQ(after.read - before.read, 3 * read);
        EXPECT_EQ(group->traffic().count(comm::Collective::all_gather).logical_bytes - sent,
                  3 * partition::share_sent(engine.pager()->plan()->gathered_bytes, ranks));
        EXPECT_EQ(group->ledger()->usage(Category::parameters).peak, 0);
        EXPECT_EQ(group->ledger()->usage(Category::optimizer).peak, 0);
        EXPECT_EQ(engine.memory_formula().parameters, 0);
      });
    }
  }
}

TEST(EngineOffload, GradientsOnDiskAreWrittenAndReadOnceAndHeldInBucketsAlone) {
  const TemporaryFolder folder;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = all_on_disk(config(3), folder);
    c.offload_optimizer.gradients = true;
    c.max_live_parameters = 0;
    Engine engine(net, AdamW{}, c, group);
    train(engine, *net, 2);
    engine.complete_update();
    const auto before = engine.disk();
    train(engine, *net, 1, 2);
    engine.complete_update();
    const auto after = engine.disk();
    const auto& layout = engine.layout();
    const auto whole = [](int64_t numel) { return (numel * 4 + 4095) / 4096 * 4096; };
    int64_t array = 0;
    int64_t fetched = 0;
    for (int64_t u = 0; u < layout.unit_count(); ++u) array += whole(layout.slice_numel(u));
    for (const auto& gather : engine.pager()->plan()->gathers)
      fetched += whole(layout.slice_numel(gather.unit));
    // Parameters, two moments and gradients: all read by the update, all written once.
    EXPECT_EQ(after.bytes, 4 * array);
    EXPECT_EQ(after.written - before.written, 4 * array);
    EXPECT_EQ(after.read - before.read, 4 * array + fetched);
    EXPECT_EQ(group->ledger()->usage(Category::gradients).peak, 0);
    EXPECT_EQ(engine.memory_formula().total(), 0);
  });
}

TEST(EngineOffload, ADelayedUpdateIsAPlainLoopThatDelaysByOneStep) {
  constexpr int64_t kAfter = 2;
  auto c = config(0);
  c.gradient_clipping = 0.05;
  // The reference: every gradient is taken by hand at the weights before the last update.
  Net visible;
  auto updated = std::make_shared<Net>();
  Engine reference(updated, AdamW{.lr = 1e-2}, c);
  std::vector<std::vector<at::Tensor>> history{weights(reference)};
  std::vector<at::Tensor> expected;
  for (int64_t i = 0; i < 6; ++i) {
    const auto& seen = history[static_cast<size_t>(i > kAfter ? i - 1 : i)];
    auto parameters = visible.named_parameters();
    const auto names = reference.parameter_names();
    for (size_t p = 0; p < names.size(); ++p) {
      const torch::NoGradGuard guard;
      parameters[names[p]].copy_(seen[p]);
    }
    visible.zero_grad();
    const auto loss = loss_of(visible, 0, i);
    loss.backward();
    for (const auto& name : names) reference.set_gradient(name, parameters[name].grad());
    reference.step();
    history.push_back(weights(reference));
    for (auto& tensor : history.back()) tensor = tensor.clone();
    expected.push_back(loss.detach());
  }
  for (const auto& tensor : history.back()) expected.push_back(tensor);
  expected.push_back(reference.optimizer_state("b.weight", "exp_avg"));
  c.offload_optimizer.delayed_update_after = kAfter;
  expect_equal(after_delayed_steps(c, 1), expected);
}

TEST(EngineOffload, ADelayedUpdateIsCompletedBeforeStatesAreReadOrWritten) {
  const TemporaryFolder folder;
  for (const bool there : {false, true}) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto c = config(3);
      if (there) c = all_on_disk(c, folder);
      c.offload_optimizer.delayed_update_after = 1;
      Engine engine(net, AdamW{.lr = 1e-2}, c, group);
      train(engine, *net, 3);
      engine.save((folder.path() / "saved").string());
      const auto saved = weights(engine);
      train(engine, *net, 2, 3);
      const auto straight = weights(engine);
      engine.load((folder.path() / "saved").string());
      expect_equal(weights(engine), saved);
      train(engine, *net, 2, 3);
      expect_equal(weights(engine), straight);
      engine.set_parameter("a.bias", torch::linspace(-1, 1, 33));
      EXPECT_TRUE(torch::equal(engine.parameter("a.bias"), torch::linspace(-1, 1, 33)));
      {
        Gathered scope(engine, {net->c->bias}, Gathered::Access::write);
        const torch::NoGradGuard guard;
        net->c->bias.fill_(0.25);
      }
      EXPECT_EQ(engine.parameter("c.bias").item<float>(), 0.25F);
    });
  }
}

// A write of the user's while a delayed update is under way would be lost, or undo the update: it
// is refused, once, and the update stays as it is.
TEST(EngineOffload, AWriteDuringADelayedUpdateIsRefused) {
  for (const auto& c : replicated_and_sharded()) {
    SCOPED_TRACE(c.dump());
    const auto run = [&](int ranks, bool writes) {
      return of_rank_zero(ranks, [&](auto group) {
        auto net = std::make_shared<Net>();
        net->c->bias.set_requires_grad(false);
        auto delayed = c;
        delayed.gradient_accumulation_steps = 2;
        delayed.offload_optimizer.delayed_update_after = 1;
        Engine engine(net, AdamW{.lr = 1e-2}, delayed, group);
        train(engine, *net, 2);
        for (int64_t i = 4; i < 6; ++i) {
          engine.backward(loss_of(*net, group->rank(), i));
          if (i == 4) engine.step();
        }
        const torch::NoGradGuard guard;
        net->c->bias.fill_(0.75);  // frozen: nothing updates it
        if (writes) {
          net->a->bias.add_(1);
          EXPECT_THROW(engine.step(), Error);
          EXPECT_THAT(([&] { engine.save("anywhere"); }),
                      testing::ThrowsMessage<Error>(HasSubstr("2 of 2 micro-batches")));
        }
        EXPECT_TRUE(engine.step().updated);
        EXPECT_EQ(engine.parameter("c.bias").template item<float>(), 0.75F);
        const torch::AutoGradMode again(true);
        train(engine, *net, 1, 3);
        return weights(engine);
      });
    };
    for (int ranks = 1; ranks <= 2; ++ranks) expect_equal(run(ranks, true), run(ranks, false));
  }
}

TEST(EngineOffload, BuffersDoNotGrowWithTheSteps) {
  const TemporaryFolder folder;
  run_as_threads(2, [&](auto group) {
    // Slices of many sizes, the first and the last far larger than the others.
    auto net = std::make_shared<nn::SequentialImpl>(
        nn::Linear(64, 1024), nn::Linear(1024, 40), nn::Linear(40, 90), nn::Linear(90, 60),
        nn::Linear(60, 30), nn::Linear(30, 1024), nn::Linear(1024, 64));
    auto c = all_on_disk(config(3), folder);
    c.unit_bytes = 16 << 10;
    c.max_live_parameters = 40'000;
    c.prefetch_bucket_size = 10'000;
    Engine engine(net, AdamW{}, c, group);
    int64_t after_three = 0;
    for (int64_t i = 0; i < 12; ++i) {
      engine.backward(net->forward(torch::ones({1, 64})).mean());
      engine.step();
      const auto peak = group->ledger()->usage(Category::offload_buffers).peak;
      if (i == 2) after_three = peak;
      EXPECT_TRUE(i < 3 || peak == after_three) << peak << " bytes after step " << i;
    }
  });
}

TEST(EngineOffload, NonsenseIsRefused) {
  const TemporaryFolder folder;
  auto c = all_on_disk(config(2), folder);
  EXPECT_THROW(c.validate(), ConfigError);
  c.stage = 3;
  c.validate();
  c.offload_optimizer.ratio = 1.5;
  EXPECT_THROW(c.validate(), ConfigError);
}

TEST(EngineOffload, StripesOverFoldersAndKeepsAPartInMemoryWithTheSameBits) {
  const TemporaryFolder first;
  const TemporaryFolder second;
  for (const bool bf16 : {false, true}) {
    auto c = config(3, bf16);
    c.gradient_clipping = 0.05;
    const auto expected = after_accumulation(c, 2);
    auto disk = all_on_disk(c, first);
    disk.offload_param.nvme_path = second.path().string() + "," + first.path().string();
    EXPECT_EQ(disk.nvme_folders(), (std::vector<std::string>{second.path(), first.path()}));
    for (const double ratio : {0.0, 0.5, 1.0}) {
      disk.offload_optimizer.ratio = ratio;
      expect_equal(after_accumulation(disk, 2), expected);
    }
  }
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = on_disk(config(1), first);
    c.offload_optimizer.ratio = 0.5;
    const Engine engine(net, AdamW{}, c, group);
    const auto there = engine.memory_formula().optimizer;
    EXPECT_GT(there, 0);
    EXPECT_EQ(there, group->ledger()->usage(Category::optimizer).current);
    EXPECT_NEAR(static_cast<double>(there),
                static_cast<double>(engine.layout().numel()) / 2 * 8 * 0.5, 1500);
  });
  expect_no_left_overs(first);
  expect_no_left_overs(second);
}

TEST(EngineOffload, ABudgetChoosesTheFewestBytesOnDisk) {
  constexpr int64_t kGiB = 1 << 30;
  Config c;
  c.stage = 3;
  c.bf16 = true;
  c.offload_optimizer.nvme_path = "/local";
  // States of a rank: 2 of parameters, 2 of gradients, 12 GiB of the optimizer.
  const StepSize size{.parameters = 4 * kGiB, .largest_parameter = 1 << 20, .ranks = 4};
  const auto chosen = [&](int64_t budget) {
    c.memory_budget = budget;
    return choose_tiers(c, size);
  };
  EXPECT_EQ(chosen(0).reason, "");
  EXPECT_EQ(chosen(17 * kGiB).config.offload_optimizer.device, OffloadDevice::none);
  const auto part = chosen(10 * kGiB).config;
  EXPECT_EQ(part.offload_optimizer.device, OffloadDevice::nvme);
  EXPECT_NEAR(part.offload_optimizer.ratio, 0.55, 1e-9);  // 6.1 of 12 GiB, in twentieths
  EXPECT_FALSE(part.offload_optimizer.gradients);
  const auto more = chosen(3 * kGiB).config;
  EXPECT_NEAR(more.offload_optimizer.ratio, 0.95, 1e-9);  // beside 2 GiB of parameters
  EXPECT_TRUE(more.offload_optimizer.gradients);
  EXPECT_EQ(more.offload_param.device, OffloadDevice::none);
  const auto all = chosen(kGiB);
  EXPECT_EQ(all.config.offload_param.device, OffloadDevice::nvme);
  EXPECT_EQ(all.config.offload_param.nvme_path, "/local");
  EXPECT_NEAR(all.config.offload_optimizer.ratio, 0.95, 1e-9);
  EXPECT_THAT(all.reason,
              HasSubstr("95 % of the optimizer's, the gradients and the parameters go to disk"));
  all.config.validate();
  // Hosts that keep all parameters keep them in memory.
  c.hpz_partition_size = 2;
  const auto kept = chosen(kGiB);
  EXPECT_EQ(kept.config.offload_param.device, OffloadDevice::none);
  EXPECT_THAT(kept.reason, HasSubstr("without zero_hpz_partition_size the parameters would"));
  c.hpz_partition_size = 1;
  // Updates beside backward keep no gradients, but a second copy of parameters in memory.
  c.update_in_backward = true;
  c.gradient_clipping = 0;
  const auto beside = chosen(5 * kGiB).config;
  EXPECT_NEAR(beside.offload_optimizer.ratio, 0.95, 1e-9);
  EXPECT_FALSE(beside.offload_optimizer.gradients);
  EXPECT_EQ(beside.offload_param.device, OffloadDevice::none);
  EXPECT_EQ(chosen(3 * kGiB).config.offload_param.device, OffloadDevice::nvme);
  // At stage 2 that copy is of the rank's own part alone: 8 GiB and 2 stay beside 3 of 12.
  c.stage = 2;
  const auto own_part = chosen(13 * kGiB).config;
  EXPECT_NEAR(own_part.offload_optimizer.ratio, 0.8, 1e-9);
  c.stage = 3;
  c.update_in_backward = false;
  // The settings that were asked for are not changed.
  for (const auto device : {OffloadDevice::cpu, OffloadDevice::nvme}) {
    c.offload_optimizer.device = device;
    EXPECT_EQ(chosen(kGiB).config.offload_optimizer.device, device);
    EXPECT_EQ(chosen(kGiB).config.offload_param.device, OffloadDevice::none);
  }
  c.offload_optimizer.device = OffloadDevice::none;
  c.offload_param.device = OffloadDevice::cpu;
  EXPECT_EQ(chosen(kGiB).config.offload_optimizer.device, OffloadDevice::none);
}

TEST(EngineOffload, ABudgetKnowsTheFactoredStates) {
  constexpr int64_t kGiB = 1 << 30;
  Config c;
  c.stage = 3;
  c.bf16 = true;
  c.optimizer.emplace(Adafactor{});
  // A rank has 2 GiB of parameters, 2 of gradients, 4 of master weights.
  StepSize size{.parameters = 4 * kGiB, .ranks = 4};
  const auto optimizer = [&] { return predicted_states(c, size).optimizer; };
  EXPECT_EQ(optimizer(), 8.0 * kGiB) << "none may be a matrix";
  size.matrix_elements = 3 * kGiB;
  size.factored_numel = 1000;
  EXPECT_EQ(optimizer(), 5.0 * kGiB + 4000);
  size.matrix_elements = 4 * kGiB;
  EXPECT_EQ(optimizer(), 4.0 * kGiB + 4000);
  c.offload_optimizer.nvme_path = "/local";
  c.memory_budget = 9 * kGiB;
  EXPECT_EQ(choose_tiers(c, size).config.offload_optimizer.device, OffloadDevice::none);
  c.optimizer.emplace(Apollo{});
  EXPECT_EQ(optimizer(), 4.0 * kGiB + 1000) << "a quarter on each rank";
  size.matrix_elements = 2 * kGiB;
  EXPECT_EQ(optimizer(), 8.0 * kGiB + 1000) << "half of the elements are AdamW's";
  size.matrix_elements = 4 * kGiB;
  c.optimizer.emplace(Adafactor{.factored = false});
  EXPECT_EQ(optimizer(), 8.0 * kGiB);
  EXPECT_EQ(choose_tiers(c, size).config.offload_optimizer.device, OffloadDevice::nvme);
}

TEST(EngineOffload, GatheredParametersTakeHalfOfWhatTheHostHasLeft) {
  constexpr int64_t kGiB = 1 << 30;
  Config c;
  c.stage = 3;
  c.bf16 = true;
  c.offload_optimizer.device = c.offload_param.device = OffloadDevice::nvme;
  c.offload_optimizer.nvme_path = c.offload_param.nvme_path = "/local";
  c.offload_optimizer.gradients = true;
  StepSize size{.parameters = 4 * kGiB, .ranks = 4, .activations = 2 * kGiB};
  const auto chosen = [&](int64_t available) {
    size.available = available;
    return choose_tiers(c, size);
  };
  EXPECT_EQ(chosen(INT64_MAX).config.max_live_parameters, c.max_live_parameters);
  EXPECT_EQ(chosen(7 * kGiB).reason, "");
  const auto less = chosen(4 * kGiB);  // 2 GiB beside the activations, less the buffers
  EXPECT_NEAR(static_cast<double>(less.config.max_live_parameters), 0.5 * kGiB, 0.05 * kGiB);
  EXPECT_THAT(less.reason, HasSubstr("--live-parameters"));
  EXPECT_EQ(chosen(kGiB).config.max_live_parameters, 0);
  // A budget bounds them by what the first step leaves, and parameters in memory are not gathered
  // from a disk.
  c.memory_budget = 3 * kGiB;
  EXPECT_EQ(chosen(kGiB).config.max_live_parameters, c.max_live_parameters);
  c.memory_budget = 0;
  c.offload_param.device = OffloadDevice::none;
  EXPECT_EQ(chosen(kGiB).config.max_live_parameters, c.max_live_parameters);
}

TEST(EngineOffload, AnEngineUnderABudgetPutsStatesOnDiskWithTheSameBits) {
  const TemporaryFolder folder;
  auto c = config(3);
  const auto expected = after_accumulation(c, 2);
  c.offload_optimizer.nvme_path = folder.path().string();
  c.memory_budget = int64_t{1} << 20;  // less than the staging buffers
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    const Engine engine(net, AdamW{}, c, group);
    EXPECT_EQ(engine.config().offload_param.device, OffloadDevice::nvme);
    EXPECT_EQ(engine.memory_formula().total(), 0);
  });
  c.memory_budget = int64_t{1} << 30;
  expect_equal(after_accumulation(c, 2), expected);
}

TEST(EngineOffload, ReadsTheSectionsOfDeepSpeed) {
  const auto c = Config::parse(R"({"zero_optimization": {"stage": 3,
      "offload_param": {"device": "nvme", "nvme_path": "/local", "buffer_count": 7,
                        "buffer_size": 1e8, "max_in_cpu": 1e9, "pin_memory": true},
      "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}})",
                               1);
  EXPECT_EQ(c.offload_param.device, OffloadDevice::nvme);
  EXPECT_EQ(c.offload_param.nvme_path, "/local");
  EXPECT_EQ(c.offload_param.buffer_count, 7);
  EXPECT_EQ(c.offload_param.max_in_cpu, 1'000'000'000);
  EXPECT_EQ(Config::parse(c.dump(), 1), c);
}

TEST(EngineOffload, AModelThatCannotFitIsRefusedBeforeItIsBuilt) {
  run_as_threads(2, [&](auto group) {
    auto c = config(2, true);
    check_fits(1000, c, *group);
    try {
      check_fits(int64_t{1} << 50, c, *group);
      ADD_FAILURE() << "a model of a million billions was accepted";
    } catch (const OutOfMemory& error) {
      EXPECT_THAT(error.what(), HasSubstr("at stage 3"));
      EXPECT_THAT(error.what(), HasSubstr("--offload-param nvme"));
    }
  });
}

TEST(EngineOffload, ReadsAndWritesEachStateOnceAStepAndHoldsNoneInMemory) {
  const TemporaryFolder folder;
  for (const bool ahead : {false, true}) {
    run_as_threads(2, [&](auto group) {
      const bool bf16 = ahead;
      // Units of several blocks, and of one.
      auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(1500, 1500), nn::Linear(1500, 40),
                                                      nn::Linear(40, 1));
      auto c = on_disk(config(2, bf16), folder);
      c.offload_optimizer.pipeline_read = ahead;
      Engine engine(net, AdamW{}, c, group);
      const auto step = [&] { step_on_ones(engine, *net); };
      step();
      const auto before = engine.disk();
      for (int i = 0; i < 3; ++i) step();
      const auto after = engine.disk();
      int64_t states = 0;
      for (int64_t u = 0; u < engine.layout().unit_count(); ++u)
        states += ((engine.layout().slice_numel(u) * 4 + 4095) / 4096 * 4096) * (bf16 ? 3 : 2);
      EXPECT_EQ(after.bytes, states);
      EXPECT_EQ(after.written - before.written, 3 * states);
      // Up to two blocks of those read ahead are of the step that has not begun.
      const int64_t blocks = ahead ? 2 * 3 * (4 << 20) : 0;
      EXPECT_LE(std::abs(after.read - before.read - 3 * states), blocks);
      EXPECT_EQ(group->ledger()->usage(Category::optimizer).peak, 0);
      EXPECT_EQ(engine.memory_formula().optimizer, 0);
      EXPECT_GT(group->ledger()->usage(Category::offload_buffers).peak, 0);
    });
  }
}

TEST(EngineOffload, AFolderThatCannotBeUsedIsAnErrorOnEveryRank) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto c = config(1);
    c.offload_optimizer = {.device = OffloadDevice::nvme, .nvme_path = "/nowhere/at/all"};
    EXPECT_THROW(Engine(net, AdamW{}, c, group), StoreError);
  });
  auto c = config(1);
  c.offload_optimizer.device = OffloadDevice::nvme;
  EXPECT_THROW(c.validate(), ConfigError);
}

}  // namespace
}  // namespace zero
