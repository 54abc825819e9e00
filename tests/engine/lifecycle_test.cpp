// Programs do these things with a model while an engine has it: replace the engine, convert, freeze
// and add parameters, tie them, go backward through another engine's model, keep buffers. Each
// works, or is an error that names the parameter and the remedy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "tests/engine/net.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/gathered.h"
#include "zero/zero.h"

namespace zero {
namespace {

using comm::Collective;
using comm::run_as_threads;
using testing::AllOf;
using testing::HasSubstr;

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  const torch::NoGradGuard guard;
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors) all.push_back(tensor.detach().clone());
  return all;
}

// Runs `body` at each stage on `ranks` ranks.
void at_every_stage(int ranks,
                    const std::function<void(int stage, std::shared_ptr<comm::Group>)>& body) {
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    run_as_threads(ranks, [&](auto group) { body(stage, group); },
                   {.timeout = std::chrono::seconds(20)});
  }
}

// --- Frozen parameters that are set.

TEST(LifecycleFrozen, AValueThatIsSetIsThatOfTheModelOnEveryRank) {
  const TemporaryFolder folder;
  at_every_stage(3, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    net->b->weight.set_requires_grad(false);
    net->a->bias.set_requires_grad(false);
    Engine engine(net, AdamW{}, config(stage), group);
    const auto path = (folder.path() / std::to_string(stage)).string();
    const auto original = engine.parameter("b.weight").clone();
    engine.save(path);
    engine.save_full(path + ".safetensors");
    const auto value = torch::arange(29 * 33).view({29, 33}).to(at::kFloat) * 0.01;
    engine.set_parameter("b.weight", value);
    EXPECT_TRUE(torch::equal(net->b->weight.detach().clone(), value)) << "set_parameter";
    engine.load(path);
    EXPECT_TRUE(torch::equal(net->b->weight.detach().clone(), original)) << "load";
    engine.set_parameter("b.weight", value);
    engine.load_full(path + ".safetensors");
    EXPECT_TRUE(torch::equal(net->b->weight.detach().clone(), original)) << "load_full";
    engine.set_parameter("b.weight", value);
    train(engine, *net, 1);
    EXPECT_TRUE(torch::equal(net->b->weight.detach().clone(), value)) << "after a step";
  });
}

// --- Another engine on the same model.

TEST(LifecycleReplaced, ANewEngineTakesTheModelOverWhereParametersAreReplicated) {
  for (int stage = 0; stage <= 2; ++stage) {
    for (const bool bf16 : {false, true}) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        auto engine = std::make_unique<Engine>(net, Sgd{.lr = 0.1}, config(stage, bf16), group);
        train(*engine, *net, 2);
        const auto before = copies(net->parameters());
        engine = std::make_unique<Engine>(net, AdamW{.lr = 1e-2}, config(stage, bf16), group);
        expect_equal(copies(net->parameters()), before);
        // As on a model that was never an engine's.
        auto fresh = std::make_shared<Net>();
        {
          const torch::NoGradGuard guard;
          for (size_t i = 0; i < before.size(); ++i) fresh->parameters()[i].copy_(before[i]);
        }
        Engine reference(fresh, AdamW{.lr = 1e-2}, config(stage, bf16), group);
        train(*engine, *net, 3);
        train(reference, *fresh, 3);
        expect_equal(weights(*engine), weights(reference));
      });
    }
  }
}

TEST(LifecycleReplaced, TheFormerOneCanOnlyBeDestroyedInAnyOrder) {
  for (const bool former_first : {false, true}) {
    for (int stage = 0; stage <= 2; ++stage) {
      run_as_threads(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        auto former = std::make_unique<Engine>(net, AdamW{}, config(stage), group);
        auto latter = std::make_unique<Engine>(net, AdamW{}, config(stage), group);
        EXPECT_THAT(message_of<Error>([&] { former->backward(loss_of(*net, 0, 0)); }),
                    HasSubstr("taken over by another Engine"));
        EXPECT_THAT(message_of<Error>([&] { former->parameter("a.weight"); }),
                    HasSubstr("taken over by another Engine"));
        train(*latter, *net, 1);
        (former_first ? former : latter).reset();
        former.reset();
        latter.reset();
        loss_of(*net, 0, 0).backward();  // the model is the user's again
        EXPECT_TRUE(net->a->weight.grad().defined());
      });
    }
  }
}

TEST(LifecycleReplaced, AtStageThreeItIsAnErrorAndTheFormerOneGoesOn) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto engine = std::make_unique<Engine>(net, AdamW{}, config(3), group);
    train(*engine, *net, 1);
    for (int stage = 0; stage <= 3; ++stage) {
      EXPECT_THAT(message_of<ConfigError>([&] {
                    engine = std::make_unique<Engine>(net, AdamW{}, config(stage), group);
                  }),
                  AllOf(HasSubstr("'a.weight'"), HasSubstr("Engine::save_full")));
    }
    train(*engine, *net, 1, 1);
    EXPECT_EQ(engine->steps(), 2);
    engine.reset();
    EXPECT_THAT(message_of<ConfigError>([&] { Engine again(net, AdamW{}, config(0), group); }),
                AllOf(HasSubstr("'a.weight' has no values"), HasSubstr("set_data")));
    for (auto& p : net->parameters()) p.set_data(torch::zeros(p.sizes()));
    Engine again(net, AdamW{}, config(3), group);
    train(again, *net, 1);
  });
}

TEST(LifecycleReplaced, InPartItIsAnErrorAndTheFormerOneGoesOn) {
  at_every_stage(2, [](int stage, auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(stage), group);
    EXPECT_THAT(message_of<ConfigError>([&] { Engine part(net->a, AdamW{}, config(0), group); }),
                AllOf(HasSubstr("'weight'"),
                      HasSubstr(stage < 3 ? "'b.weight', which this model does not have" : "")));
    train(engine, *net, 1);
    EXPECT_EQ(engine.steps(), 1);
  });
}

TEST(LifecycleReplaced, AnUpdateUnderWayIsCompletedBefore) {
  for (int stage = 0; stage <= 2; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto c = config(stage);
      c.offload_optimizer.delayed_update_after = 1;
      const auto run = [&](bool replace) {
        auto net = std::make_shared<Net>();
        auto engine = std::make_unique<Engine>(net, AdamW{.lr = 1e-2}, c, group);
        train(*engine, *net, 3);
        if (replace) {
          engine = std::make_unique<Engine>(net, AdamW{.lr = 1e-2}, c, group);
        } else {
          engine->complete_update();
        }
        return copies(net->parameters());
      };
      expect_equal(run(true), run(false));
    });
  }
}

TEST(LifecycleReplaced, AScopeMayOutliveItsEngineButNotAnother) {
  at_every_stage(2, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    auto engine = std::make_unique<Engine>(net, AdamW{}, config(stage), group);
    const auto value = torch::full({29}, 0.5);
    auto scope = std::make_unique<Gathered>(*engine, net->parameters(), Gathered::Access::write);
    EXPECT_THAT(message_of<Error>([&] { Engine another(net, AdamW{}, config(stage), group); }),
                HasSubstr(stage == 3 ? "still lives" : "zero::Gathered scope"));
    {
      const torch::NoGradGuard guard;
      net->b->bias.copy_(value);
    }
    engine.reset();
    EXPECT_TRUE(torch::equal(net->b->bias.detach().clone(), value));
    scope->close();
    if (stage < 3) {
      EXPECT_TRUE(torch::equal(net->b->bias.detach(), value));
    } else {
      EXPECT_THAT(message_of<std::exception>([&] { net->b->bias.sum(); }),
                  HasSubstr("no longer exists"));
    }
  });
}

TEST(LifecycleReplaced, AModelWhoseScopeIsOpenIsRefusedAlsoWhenItsEngineHasGone) {
  run_as_threads(1, [&](auto group) {
    auto net = std::make_shared<Net>();
    auto engine = std::make_unique<Engine>(net, AdamW{}, config(0), group);
    auto scope = std::make_unique<Gathered>(*engine, net->parameters());
    engine.reset();
    EXPECT_THAT(message_of<ConfigError>([&] { Engine another(net, AdamW{}, config(0), group); }),
                AllOf(HasSubstr("'a.weight'"), HasSubstr("zero::Gathered")));
    scope.reset();
    Engine another(net, AdamW{}, config(0), group);
    train(another, *net, 1);
    EXPECT_EQ(another.steps(), 1);
  });
}

// --- Constructors that fail.

TEST(LifecycleConstructor, WhereItFailsTheModelIsAsItWas) {
  int refused = 0;
  int made = 0;
  for (int stage = 0; stage <= 3; ++stage) {
    for (int64_t bytes = 8 << 10; bytes <= 128 << 10; bytes += 6 << 10) {
      auto net = std::make_shared<Net>();
      const auto before = copies(net->parameters());
      auto c = config(stage);
      c.device_memory = bytes;
      // On one rank it is this that makes stage 3.
      if (stage == 3) c.offload_param.device = OffloadDevice::cpu;
      c.offload_optimizer.delayed_update_after = 1;
      try {
        const Engine engine(net, AdamW{}, c);
        ++made;
      } catch (const OutOfMemory&) {
        ++refused;
        expect_equal(copies(net->parameters()), before);
        c.device_memory = 0;
        Engine engine(net, AdamW{}, c);
        train(engine, *net, 1);
      }
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(made, 0);
}

TEST(LifecycleConstructor, NoModelNoGroupAndInferenceModeAreRefused) {
  const auto message = [](const auto& model, std::shared_ptr<comm::Group> group) {
    return message_of<ConfigError>([&] { Engine(model, Sgd{}, {}, std::move(group)); });
  };
  EXPECT_THAT(message(std::shared_ptr<Net>(), comm::single()), HasSubstr("The model is null"));
  EXPECT_THAT(message(torch::nn::Linear(nullptr), comm::single()), HasSubstr("The model is null"));
  EXPECT_THAT(message(std::make_shared<Net>(), nullptr), HasSubstr("a null group"));
  const auto outside = std::make_shared<Net>();
  std::shared_ptr<Net> within;
  {
    const c10::InferenceMode inference;
    EXPECT_THAT(message(outside, comm::single()), HasSubstr("under c10::InferenceMode"));
    within = std::make_shared<Net>();
  }
  EXPECT_THAT(message(within, comm::single()), HasSubstr("was made under c10::InferenceMode"));
}

TEST(LifecycleConstructor, HalfWithoutAScaledLossIsRefusedByName) {
  nn::Linear net(3, 4);
  net->weight.set_data(net->weight.to(at::kHalf));
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(net, AdamW{}, config(0)); }),
              AllOf(HasSubstr("'weight'"), HasSubstr("Half"), HasSubstr("fp16.enabled")));
}

// --- Changes behind the engine.

TEST(LifecycleChanged, AReplacedStorageIsAnErrorThatNamesTheParameter) {
  at_every_stage(2, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(stage), group);
    train(engine, *net, 1);
    net->b->bias.set_data(torch::ones({29}));
    const auto loss = loss_of(*net, 0, 0);
    EXPECT_THAT(message_of<Error>([&] { engine.backward(loss); }),
                AllOf(HasSubstr("'b.bias'"), HasSubstr("was replaced"), HasSubstr("new Engine")));
    EXPECT_THAT(message_of<Error>([&] { engine.step(); }), HasSubstr("'b.bias'"));
  });
}

TEST(LifecycleChanged, AConvertedModelIsAnErrorBeforeAnythingIsLost) {
  for (int stage = 0; stage <= 2; ++stage) {
    auto net = std::make_shared<Net>();
    auto engine = std::make_unique<Engine>(net, AdamW{}, config(stage));
    train(*engine, *net, 1);
    net->to(at::kFloat);  // which changes nothing
    train(*engine, *net, 1, 1);
    net->to(at::kBFloat16);
    EXPECT_THAT(message_of<Error>([&] { engine->backward(loss_of(*net, 0, 0)); }),
                HasSubstr("'a.weight' was replaced"));
    // The remedy that it names.
    engine = std::make_unique<Engine>(net, AdamW{.lr = 1e-1}, config(stage));
    const auto before = copies(net->parameters());
    train(*engine, *net, 1, 2);
    EXPECT_FALSE(torch::equal(net->a->weight.detach(), before[0]));
  }
}

TEST(LifecycleChanged, AParameterThatIsUnfrozenLaterIsAnError) {
  at_every_stage(2, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    net->b->weight.set_requires_grad(false);
    Engine engine(net, AdamW{}, config(stage), group);
    train(engine, *net, 1);
    net->b->weight.set_requires_grad(true);
    const auto loss = loss_of(*net, 0, 0);
    EXPECT_THAT(message_of<Error>([&] { engine.backward(loss); }),
                AllOf(HasSubstr("'b.weight'"), HasSubstr("frozen"), HasSubstr("new Engine")));
    net->b->weight.set_requires_grad(false);
    train(engine, *net, 1, 1);
  });
}

TEST(LifecycleChanged, AParameterThatIsFrozenLaterStaysAsItIs) {
  std::mutex mutex;
  std::vector<at::Tensor> expected;
  at_every_stage(2, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2, .weight_decay = 0.1}, config(stage), group);
    train(engine, *net, 1);
    const auto memory = engine.memory_formula().total();
    const auto weight = engine.parameter("b.weight");
    const auto moment = engine.optimizer_state("b.weight", "exp_avg");
    net->b->weight.set_requires_grad(false);
    train(engine, *net, 2, 1);
    EXPECT_EQ(engine.memory_formula().total(), memory);
    EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), weight));
    EXPECT_TRUE(torch::equal(engine.optimizer_state("b.weight", "exp_avg"), moment));
    net->b->weight.set_requires_grad(true);
    train(engine, *net, 1, 3);
    EXPECT_FALSE(torch::equal(engine.parameter("b.weight"), weight));
    const auto now = weights(engine);
    const std::lock_guard lock(mutex);
    if (expected.empty()) expected = copies(now);
    expect_equal(now, expected);
  });
}

TEST(LifecycleChanged, AParameterThatIsAddedLaterIsAnError) {
  at_every_stage(2, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(stage), group);
    train(engine, *net, 1);
    net->register_parameter("late", torch::ones({3}));
    engine.backward(loss_of(*net, group->rank(), 0));
    EXPECT_THAT(message_of<Error>([&] { engine.step(); }),
                AllOf(HasSubstr("'late'"), HasSubstr("Construct a new Engine")));
  });
  // A module that is gone cannot be asked.
  auto net = std::make_shared<Net>();
  Engine engine(net, AdamW{}, config(0));
  engine.backward(loss_of(*net, 0, 0));
  net.reset();
  EXPECT_TRUE(engine.step().updated);
}

// --- Ties.

// The same weight in two layers: as one tensor, or as two of one storage.
struct Pair : nn::Module {
  explicit Pair(bool one_tensor)
      : one(register_parameter("one", torch::sin(torch::arange(121.0)).mul(0.3).view({11, 11}))),
        two(register_parameter("two", one_tensor ? one : one.detach().clone())),
        other(register_parameter("other", torch::cos(torch::arange(11.0)))) {
    if (!one_tensor) two.set_data(one);
  }
  at::Tensor loss(int rank, int64_t step) {
    const auto x = torch::cos(torch::arange(44.0) + rank + static_cast<double>(step))
                       .view({4, 11})
                       .to(one.scalar_type());
    return (torch::mm(torch::tanh(torch::mm(x, one) + other), two)).to(at::kFloat).pow(2).mean();
  }
  at::Tensor one, two, other;
};

TEST(LifecycleTies, TensorsOfOneStorageStayOneParameter) {
  for (const bool bf16 : {false, true}) {
    at_every_stage(2, [&](int stage, auto group) {
      const auto run = [&](bool one_tensor) {
        auto net = std::make_shared<Pair>(one_tensor);
        auto c = config(stage, bf16, 2);
        c.unit_bytes = 256;
        Engine engine(net, AdamW{.lr = 1e-2}, c, group);
        EXPECT_EQ(engine.parameter_count(), 121 + 11);
        for (int64_t i = 0; i < 6; ++i) {
          engine.backward(net->loss(group->rank(), i));
          engine.step();
        }
        {
          const torch::NoGradGuard guard;
          EXPECT_TRUE(torch::equal(net->one, net->two));
          net->two.mul_(0.5);  // by either of its tensors
        }
        engine.backward(net->loss(group->rank(), 6));
        engine.step();
        engine.backward(net->loss(group->rank(), 7));
        engine.step();
        return weights(engine);
      };
      SCOPED_TRACE("stage " + std::to_string(stage) + (bf16 ? " bf16" : ""));
      expect_equal(run(false), run(true));
    });
  }
}

TEST(LifecycleTies, TensorsThatOverlapOtherwiseAreRefusedByName) {
  const auto refused = [](const at::Tensor& one, const at::Tensor& two) {
    nn::Module module;
    module.register_parameter("one", torch::zeros({1})).set_data(one);
    module.register_parameter("two", torch::zeros({1})).set_data(two);
    return message_of<ConfigError>([&] { Engine engine(module, AdamW{}, config(0)); });
  };
  const auto memory = torch::ones({4, 6});
  EXPECT_THAT(refused(memory, memory.t()), AllOf(HasSubstr("'one'"), HasSubstr("'two'")));
  EXPECT_THAT(refused(memory.narrow(0, 0, 3), memory.narrow(0, 2, 2)), HasSubstr("overlap"));
  EXPECT_THAT(refused(memory.narrow(1, 0, 3), memory.narrow(1, 2, 2)), HasSubstr("overlap"));
  EXPECT_EQ(refused(memory.narrow(0, 0, 2), memory.narrow(0, 2, 2)), "nothing was thrown");
  EXPECT_EQ(refused(memory.narrow(1, 0, 3), memory.narrow(1, 3, 3)), "nothing was thrown");
}

// --- Files.

struct Matrix : nn::Module {
  explicit Matrix(at::IntArrayRef sizes)
      : weight(register_parameter("weight", torch::arange(24.0).view(sizes).to(at::kFloat))) {}
  at::Tensor weight;
};

TEST(LifecycleFiles, ASaveOfOtherShapesIsRefusedThoughItHasAsManyElements) {
  const TemporaryFolder folder;
  at_every_stage(2, [&](int stage, auto group) {
    const auto path = (folder.path() / std::to_string(stage)).string();
    auto saved = std::make_shared<Matrix>(at::IntArrayRef{4, 6});
    Engine(saved, AdamW{}, config(stage), group).save(path);
    auto other = std::make_shared<Matrix>(at::IntArrayRef{6, 4});
    Engine engine(other, AdamW{}, config(stage), group);
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(path); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("[4,6]"), HasSubstr("[6,4]")));
    // The same shape, but the elements lie otherwise.
    auto columns = std::make_shared<Matrix>(at::IntArrayRef{4, 6});
    columns->weight.set_data(columns->weight.detach().t().contiguous().t());
    Engine by_columns(columns, AdamW{}, config(stage), group);
    EXPECT_THAT(message_of<CheckpointError>([&] { by_columns.load(path); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("strides")));
  });
}

TEST(LifecycleFiles, WeightsAloneBeginATraining) {
  const TemporaryFolder folder;
  at_every_stage(2, [&](int stage, auto group) {
    for (const bool bf16 : {false, true}) {
      const auto full = (folder.path() / "full").string();
      const auto plain = (folder.path() / "plain").string();
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage, bf16), group);
      train(engine, *net, 2);
      engine.save_full(full);
      const auto trained = weights(engine);
      if (group->rank() == 0) {
        std::vector<TensorInfo> infos;
        const auto names = engine.parameter_names();
        for (size_t i = 0; i < names.size(); ++i)
          infos.push_back({names[i], at::kFloat, trained[i].sizes().vec()});
        infos.push_back({"unknown", at::kFloat, {2}});
        SafetensorsWriter writer(plain, infos);
        for (size_t i = 0; i < names.size(); ++i) writer.write(names[i], trained[i]);
        writer.write("unknown", torch::zeros({2}));
        writer.commit();
      }
      group->barrier();
      std::vector<std::vector<at::Tensor>> results;
      for (const auto& file : {full, plain}) {
        train(engine, *net, 1, 7);  // something else
        engine.load_weights(file);
        EXPECT_EQ(engine.steps(), 0);
        expect_equal(weights(engine), trained);
        EXPECT_EQ(engine.optimizer_state("a.weight", "exp_avg").abs().max().template item<float>(),
                  0);
        train(engine, *net, 2);
        results.push_back(weights(engine));
      }
      // As an engine that begins with these weights.
      auto fresh = std::make_shared<Net>();
      {
        const torch::NoGradGuard guard;
        for (size_t i = 0; i < trained.size(); ++i) fresh->parameters()[i].copy_(trained[i]);
      }
      Engine reference(fresh, AdamW{.lr = 1e-2}, config(stage, bf16), group);
      train(reference, *fresh, 2);
      for (const auto& result : results) expect_equal(result, weights(reference));
      group->barrier();
      auto other = std::make_shared<Matrix>(at::IntArrayRef{4, 6});
      Engine of_another(other, AdamW{}, config(stage), group);
      EXPECT_THAT(message_of<CheckpointError>([&] { of_another.load_weights(full); }),
                  HasSubstr("'weight'"));
    }
  });
}

TEST(LifecycleStates, OneParameterIsReadWithoutGatheringTheModel) {
  at_every_stage(2, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(stage), group);
    train(engine, *net, 1);
    int64_t largest = 0;
    for (const auto& unit : engine.layout().units()) largest = std::max(largest, unit.bytes());
    ASSERT_GE(engine.layout().unit_count(), 3);
    group->traffic().reset();
    engine.parameter("a.weight");
    EXPECT_LE(group->traffic().count(Collective::all_gather).logical_bytes, largest / 2);
  });
}

// --- Steps and gradients.

TEST(LifecycleStep, ARefusedStepMayBeMadeAgain) {
  for (const int64_t k : {1, 3}) {
    run_as_threads(2, [&](auto group) {
      const auto run = [&](bool refuse) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, config(3, false, k), group);
        for (int64_t i = 0; i < 2 * k; ++i) {
          engine.backward(loss_of(*net, group->rank(), i));
          if (refuse && i % k == k - 1) {
            Gathered scope(engine, {net->b->weight});
            EXPECT_THAT(message_of<Error>([&] { engine.step(); }), HasSubstr("zero::Gathered"));
          }
          EXPECT_EQ(engine.step().updated, i % k == k - 1);
        }
        EXPECT_EQ(engine.steps(), 2);
        return weights(engine);
      };
      expect_equal(run(true), run(false));
    });
  }
}

TEST(LifecycleStep, AWriteOnOneRankDuringADelayedUpdateIsAnErrorOnAll) {
  for (int stage = 0; stage <= 2; ++stage) {
    run_as_threads(2,
                   [&](auto group) {
                     auto net = std::make_shared<Net>();
                     auto c = config(stage);
                     c.offload_optimizer.delayed_update_after = 1;
                     Engine engine(net, AdamW{}, c, group);
                     train(engine, *net, 3);
                     if (group->rank() == 1) {
                       const torch::NoGradGuard guard;
                       net->b->weight.fill_(1);
                     }
                     engine.backward(loss_of(*net, group->rank(), 3));
                     EXPECT_THAT(message_of<Error>([&] { engine.step(); }),
                                 AllOf(HasSubstr("'b.weight' was written on rank 1")));
                   },
                   {.timeout = std::chrono::seconds(20)});
  }
}

TEST(LifecycleStep, AWriteThatIsNotTheSameOnAllRanksIsAnErrorThatTellsTheRemedy) {
  at_every_stage(3, [](int stage, auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
    train(engine, *net, 1);
    const auto fill = [](const at::Tensor& parameter, double value) {
      const torch::NoGradGuard guard;
      parameter.fill_(value);
    };
    if (group->rank() == 1) fill(net->b->weight, 0.5);
    const auto told = AllOf(HasSubstr("b.weight on rank 1"), HasSubstr("modifier_rank"));
    EXPECT_THAT(message_of<Error>([&] { engine.parameter("a.weight"); }), told);
    engine.backward(loss_of(*net, 0, 1));
    EXPECT_THAT(message_of<Error>([&] { engine.step(); }), told);
    { const Gathered scope(engine, {net->b->weight}, Gathered::Access::write, 0); }
    EXPECT_TRUE(engine.step().updated);
    fill(net->b->weight, 0.25);  // by all
    EXPECT_TRUE(torch::equal(engine.parameter("b.weight"), torch::full({29, 33}, 0.25)));
    {
      Gathered scope(engine, {net->b->weight}, Gathered::Access::write);
      fill(net->b->weight, group->rank() == 2 ? 1 : 2);
      EXPECT_THAT(message_of<Error>([&] { scope.close(); }), HasSubstr("b.weight on rank 2"));
    }
    { const Gathered scope(engine, {net->b->weight}, Gathered::Access::write, 0); }
    // Rates, too.
    engine.set_lr(group->rank() == 2 ? 0.1 : 0.2);
    engine.backward(loss_of(*net, 0, 2));
    EXPECT_THAT(message_of<Error>([&] { engine.step(); }),
                AllOf(HasSubstr("rank 2 has another learning rate"), HasSubstr("mean over ranks")));
    engine.set_lr(0.1);
    EXPECT_TRUE(engine.step().updated);
  });
}

TEST(LifecycleStep, AValueByNameThatIsNotTheSameOnAllRanksIsAnErrorAndChangesNothing) {
  at_every_stage(3, [](int stage, auto group) {
    const auto run = [&](bool refused) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
      train(engine, *net, 1);
      engine.backward(loss_of(*net, group->rank(), 1));
      // One rank gives other values, or another shape.
      for (const bool shape : {false, true}) {
        if (!refused) break;
        const auto value = shape ? torch::ones({29, group->rank() == 2 ? 32 : 33})
                                 : torch::full({29, 33}, group->rank() == 1 ? 2.0 : 1.0);
        const auto told = AllOf(HasSubstr(shape ? "b.weight on rank 2" : "b.weight on rank 1"),
                                HasSubstr("Group::broadcast"));
        EXPECT_THAT(message_of<Error>([&] { engine.set_parameter("b.weight", value); }), told);
        EXPECT_THAT(message_of<Error>([&] { engine.set_gradient("b.weight", value); }), told);
        EXPECT_THAT(
            message_of<Error>([&] { engine.set_optimizer_state("b.weight", "exp_avg", value); }),
            told);
      }
      EXPECT_TRUE(engine.step().updated);
      if (refused) {
        EXPECT_THAT(message_of<Error>([&] { engine.set_parameter_steps("a.bias", group->rank()); }),
                    HasSubstr("a.bias on ranks"));
      }
      train(engine, *net, 1, 2);
      return weights(engine);
    };
    expect_equal(run(true), run(false));
  });
}

TEST(LifecycleStep, WaitsForThreadsThatReadParameters) {
  run_as_threads(2, [](auto group) {
    auto net = std::make_shared<Net>();
    auto c = config(3);
    c.max_live_parameters = 0;
    Engine engine(net, Sgd{.lr = 0.1}, c, group);
    engine.set_parameter("b.weight", torch::ones({29, 33}));
    std::atomic<bool> stop = false;
    std::atomic<int> torn = 0;
    std::thread reader([&] {
      const torch::NoGradGuard guard;
      while (!stop) {
        const Gathered scope(engine, {net->b->weight});
        const auto first = net->b->weight.detach().clone();
        if (!torch::equal(first, net->b->weight)) ++torn;
        if (!first.eq(first[0][0]).all().item<bool>()) ++torn;
      }
    });
    for (int step = 0; step < 50; ++step) {
      engine.backward(net->b->weight.sum() * 0.01);  // one gradient for all elements
      EXPECT_TRUE(engine.step().updated);
    }
    stop = true;
    reader.join();
    EXPECT_EQ(torn, 0);
  });
}

TEST(LifecycleGradients, ZeroGradDropsThoseOfTheStepSoFar) {
  at_every_stage(2, [&](int stage, auto group) {
    for (const bool bf16 : {false, true}) {
      const auto run = [&](bool drop) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, config(stage, bf16, 2), group);
        train(engine, *net, 1);
        for (int i = 0; drop && i < 3; ++i) {
          engine.backward(loss_of(*net, group->rank(), 40 + i));
          if (i > 0) engine.backward(loss_of(*net, group->rank(), 50 + i));
          if (i > 0) engine.step();
          engine.zero_grad();
          EXPECT_FALSE(engine.gradient("a.weight").defined());
          engine.zero_grad();
        }
        train(engine, *net, 1, 1);
        EXPECT_EQ(engine.steps(), 2);
        return weights(engine);
      };
      expect_equal(run(true), run(false));
    }
  });
}

// A generator whose loss goes through the discriminator, which is another engine's.
TEST(LifecycleGradients, ThoseOfAnotherEnginesPassAreNoneOfThisOnes) {
  at_every_stage(2, [&](int stage, auto group) {
    const auto run = [&](bool adversarial) {
      auto generator = std::make_shared<nn::LinearImpl>(7, 7);
      auto net = std::make_shared<Net>();
      Engine of_generator(generator, AdamW{.lr = 1e-2}, config(stage), group);
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
      for (int64_t i = 0; i < 3; ++i) {
        train(engine, *net, 1, i);
        if (!adversarial) continue;
        const auto ledger = group->ledger();
        const auto buckets = ledger->usage(Category::gradient_buckets).current;
        const auto gradients = ledger->usage(Category::gradients).current;
        of_generator.backward(
            net->forward(generator->forward(input(group->rank(), i, at::kFloat))).mean());
        for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
        // The generator's own: its one unit in a bucket, and its slice.
        const auto own = of_generator.layout().unit(0).bytes();
        EXPECT_LE(ledger->usage(Category::gradient_buckets).current - buckets, 2 * own);
        EXPECT_LE(ledger->usage(Category::gradients).current - gradients, own);
        of_generator.step();
        EXPECT_EQ(of_generator.steps(), i + 1);
      }
      return weights(engine);
    };
    expect_equal(run(true), run(false));
  });
}

TEST(LifecycleGradients, AStepWithoutABackwardOfTheEngineSaysSo) {
  at_every_stage(2, [&](int stage, auto group) {
    auto generator = std::make_shared<nn::LinearImpl>(7, 7);
    auto net = std::make_shared<Net>();
    Engine of_generator(generator, AdamW{.lr = 1e-2}, config(stage), group);
    Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
    of_generator.backward(
        net->forward(generator->forward(input(group->rank(), 0, at::kFloat))).mean());
    EXPECT_THAT(message_of<Error>([&] { engine.step(); }), HasSubstr("engine.backward(loss)"));
    engine.zero_grad();
    train(engine, *net, 1);
    EXPECT_EQ(engine.steps(), 1);
  });
}

// --- Groups.

TEST(LifecycleGroups, AreChosenByAPredicate) {
  at_every_stage(2, [&](int stage, auto group) {
    auto net = std::make_shared<Net>();
    const auto vectors = [](std::string_view, const at::Tensor& p) { return p.dim() < 2; };
    const std::vector<ParameterGroup> groups{{{}, Sgd{.lr = 0.0}, vectors},
                                             {{"b.bias"}, Sgd{.lr = 0.1}},
                                             {.optimizer = AdamW{.lr = 1e-2}, .rest = true}};
    Engine engine(net, groups, config(stage), group);
    const auto before = weights(engine);
    train(engine, *net, 1);
    const auto after = weights(engine);
    const auto names = engine.parameter_names();
    for (size_t i = 0; i < names.size(); ++i) {
      const bool kept = names[i] == "a.bias" || names[i] == "c.bias";
      EXPECT_EQ(torch::equal(before[i], after[i]), kept) << names[i];
    }
  });
  const auto any = [](std::string_view, const at::Tensor&) { return true; };
  auto net = std::make_shared<Net>();
  EXPECT_THAT(message_of<ConfigError>([&] {
                Engine engine(net, std::vector<ParameterGroup>{{{}, Sgd{}, any}, {{}, Sgd{}, any}},
                              config(0));
              }),
              HasSubstr("'a.weight' matches groups 0 and 1"));
}

// --- Buffers.

struct Normed : nn::Module {
  Normed()
      : linear(register_module("linear", nn::Linear(7, 5))),
        norm(register_module("norm", nn::BatchNorm1d(5))) {
    const torch::NoGradGuard guard;
    for (auto& p : linear->parameters())
      p.copy_(torch::sin(torch::arange(p.numel()) * 0.7).view(p.sizes()));
  }
  at::Tensor loss(int rank, int64_t step) {
    return norm(linear(input(rank, step, linear->weight.scalar_type())))
        .to(at::kFloat)
        .sub(0.3)
        .pow(4)
        .mean();
  }
  nn::Linear linear;
  nn::BatchNorm1d norm;
};

void train(Engine& engine, Normed& net, int64_t steps, int64_t first) {
  for (int64_t i = first; i < first + steps; ++i) {
    engine.backward(net.loss(engine.group().rank(), i));
    engine.step();
  }
}

TEST(LifecycleBuffers, EachRankResumesWithItsOwn) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    at_every_stage(2, [&](int stage, auto group) {
      const auto path = (folder.path() / (std::to_string(stage) + (bf16 ? "b" : "f"))).string();
      auto net = std::make_shared<Normed>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage, bf16), group);
      EXPECT_EQ(net->norm->running_var.scalar_type(), at::kFloat) << "buffers keep their dtype";
      train(engine, *net, 2, 0);
      engine.save(path);
      train(engine, *net, 2, 2);
      const auto expected = copies(net->buffers());
      const auto expected_weights = weights(engine);
      auto again = std::make_shared<Normed>();
      Engine resumed(again, AdamW{.lr = 1e-2}, config(stage, bf16), group);
      resumed.load(path);
      train(resumed, *again, 2, 2);
      expect_equal(copies(again->buffers()), expected);
      expect_equal(weights(resumed), expected_weights);
    });
  }
}

TEST(LifecycleBuffers, FollowThePolicy) {
  at_every_stage(2, [&](int stage, auto group) {
    for (const auto policy :
         {BufferPolicy::per_rank, BufferPolicy::rank_0, BufferPolicy::average}) {
      auto net = std::make_shared<Normed>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
      EXPECT_EQ(engine.buffer_policy(), BufferPolicy::per_rank);
      engine.set_buffer_policy(policy);
      engine.backward(net->loss(group->rank(), 0));
      const auto own = net->norm->running_mean.clone();
      engine.step();
      auto both = torch::empty({10});
      group->all_gather(both, own).wait();
      const auto expected = policy == BufferPolicy::per_rank ? own
                            : policy == BufferPolicy::rank_0 ? both.narrow(0, 0, 5)
                                                             : both.view({2, 5}).mean(0);
      EXPECT_FALSE(torch::equal(both.narrow(0, 0, 5), both.narrow(0, 5, 5)));
      EXPECT_TRUE(torch::allclose(net->norm->running_mean, expected, 1e-6, 1e-7));
      EXPECT_EQ(net->norm->num_batches_tracked.template item<int64_t>(), 1);
    }
  });
}

TEST(LifecycleBuffers, MayBeExpandedAndComplex) {
  const TemporaryFolder folder;
  at_every_stage(2, [&](int stage, auto group) {
    const auto path = (folder.path() / std::to_string(stage)).string();
    const auto value = [](double v) { return torch::full({3, 1}, v); };
    auto net = std::make_shared<Net>();
    const double mine = group->rank() + 1.0;
    auto expanded = net->register_buffer("expanded", value(mine).expand({3, 4}));
    auto turns = net->register_buffer("turns", torch::complex(value(mine), value(2 * mine)));
    Engine engine(net, AdamW{}, config(stage), group);
    const auto expect = [&](double v) {
      EXPECT_TRUE(torch::equal(expanded, value(v).expand({3, 4})));
      EXPECT_TRUE(torch::equal(turns, torch::complex(value(v), value(2 * v))));
    };
    expect(1);
    engine.save(path);
    engine.save_full(path + ".full");
    const auto spoil = [&] {
      expanded.narrow(1, 0, 1).fill_(9);
      turns.fill_(9);
    };
    spoil();
    engine.load(path);
    expect(1);
    spoil();
    engine.load_full(path + ".full");
    expect(1);
  });
}

}  // namespace
}  // namespace zero
