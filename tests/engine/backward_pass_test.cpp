// Passes that the program begins by itself, with LibTorch's loss.backward(): as those of
// Engine::backward, bit for bit, in the programs that people write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <stdexcept>

#include "tests/engine/net.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/zero.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::HasSubstr;
using Backward = std::function<void(Engine&, const at::Tensor& loss)>;

const Backward kMarked = [](Engine& engine, const at::Tensor& loss) { engine.backward(loss); };
const Backward kOwn = [](Engine&, const at::Tensor& loss) { loss.backward(); };
const Backward kScaled = [](Engine& engine, const at::Tensor& loss) {
  engine.scale(loss).backward();
};

struct Outcome {
  std::vector<double> norms;
  std::vector<at::Tensor> weights;
  int64_t sent = 0;
};

// Three steps; of each micro-batch two losses go backward, one after the other.
Outcome run(const Config& config, const std::shared_ptr<comm::Group>& group,
            const Backward& backward) {
  auto net = std::make_shared<Net>();
  Engine engine(net, AdamW{.lr = 1e-2}, config, group);
  Outcome outcome;
  const int passes = config.update_in_backward ? 1 : 2;
  for (int64_t i = 0; i < 3 * config.gradient_accumulation_steps; ++i) {
    for (int pass = 0; pass < passes; ++pass) {
      EXPECT_EQ(engine.passed(), pass > 0);
      backward(engine, loss_of(*net, group->rank(), 2 * i + pass));
    }
    EXPECT_TRUE(engine.passed());
    const auto result = engine.step();
    EXPECT_EQ(engine.micro_batches(), (i + 1) % config.gradient_accumulation_steps);
    if (result.boundary) outcome.norms.push_back(result.grad_norm);
    for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
  }
  outcome.weights = weights(engine);
  return outcome;
}

void expect_equal_runs(const Config& config, const Backward& backward) {
  run_as_threads(2, [&](auto group) {
    const auto expected = run(config, group, kMarked);
    const auto got = run(config, group, backward);
    EXPECT_EQ(got.norms, expected.norms);
    EXPECT_GT(got.norms.at(0), 0);
    expect_equal(got.weights, expected.weights);
  });
}

TEST(BackwardPass, LibTorchsOwnGivesTheSameBits) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t micro_batches : {1, 3}) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << ", bf16 " << bf16 << ", "
                                        << micro_batches << " micro-batches");
        expect_equal_runs(config(stage, bf16, micro_batches), kOwn);
      }
    }
  }
}

TEST(BackwardPass, AScaledLossGivesTheSameBits) {
  for (int stage = 0; stage <= 3; ++stage) {
    auto settings = config(stage);
    settings.fp16 = true;
    settings.loss_scaling.initial_power = 10;
    expect_equal_runs(settings, kScaled);
    expect_equal_runs(config(stage), kScaled);
  }
}

TEST(BackwardPass, AnUnscaledLossInFp16IsRefused) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto settings = config(stage);
      settings.fp16 = true;
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{}, settings, group);
      const auto refused = [&] { loss_of(*net, group->rank(), 0).backward(); };
      EXPECT_THAT(message_of<Error>(refused), HasSubstr("engine.scale(loss).backward()"));
      engine.scale(loss_of(*net, group->rank(), 0)).backward();
      EXPECT_THAT(message_of<Error>(refused), HasSubstr("engine.scale(loss).backward()"));
      train(engine, *net, 1);
    });
  }
}

TEST(BackwardPass, ScaledLossesGoBackwardInAnyOrderAndTwice) {
  run_as_threads(2, [&](auto group) {
    auto settings = config(2);
    settings.fp16 = true;
    settings.loss_scaling.initial_power = 10;
    const auto trained = [&](bool own) {
      auto net = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, settings, group);
      const auto first = loss_of(*net, group->rank(), 0);
      const auto second = loss_of(*net, group->rank(), 1);
      if (own) {
        const auto a = engine.scale(first);
        const auto b = engine.scale(second);
        a.backward({}, /*retain_graph=*/true);
        a.backward();
        b.backward();
      } else {
        for (const auto& loss : {loss_of(*net, group->rank(), 0), first, second})
          engine.backward(loss);
      }
      engine.step();
      return weights(engine);
    };
    expect_equal(trained(true), trained(false));
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, settings, group);
    const auto loss = loss_of(*net, group->rank(), 0);
    (void)engine.scale(loss).detach();
    EXPECT_THAT(message_of<Error>([&] { loss.backward(); }), HasSubstr("engine.scale"));
  });
}

TEST(BackwardPass, ARefusedOneLeavesNothingForTheNext) {
  auto settings = config(0);
  settings.fp16 = true;
  settings.loss_scaling.initial_power = 4;
  const auto gradient = [&](bool refused) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, settings);
    if (refused) {
      EXPECT_THROW(loss_of(*net, 0, 7).backward(), Error);
    }
    engine.zero_grad();
    engine.scale(loss_of(*net, 0, 0)).backward();
    std::vector<at::Tensor> all;
    for (const auto& name : engine.parameter_names()) all.push_back(engine.gradient(name));
    return all;
  };
  expect_equal(gradient(true), gradient(false));
}

TEST(BackwardPass, OneOfTheEngineInsideItIsRefused) {
  auto net = std::make_shared<Net>();
  Engine engine(net, AdamW{}, config(0));
  auto hidden = torch::tanh(net->a(input(0, 0, at::kFloat)));
  hidden.register_hook([&](const at::Tensor&) {
    const torch::AutoGradMode on(true);
    engine.backward(loss_of(*net, 0, 1));
  });
  const auto loss = net->c(torch::tanh(net->b(hidden))).mean();
  EXPECT_THAT(message_of<Error>([&] { loss.backward(); }), HasSubstr("inside a backward pass"));
  train(engine, *net, 1);
}

TEST(BackwardPass, OneThatThrowsTakesTheStepsGradientsWithIt) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      const auto trained = [&](bool fails) {
        auto net = std::make_shared<Net>();
        Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
        if (fails) {
          // The last of three layers has its gradients by then.
          auto hidden = torch::tanh(net->a(input(group->rank(), 9, at::kFloat)));
          hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("a bad hook"); });
          const auto loss = net->c(torch::tanh(net->b(hidden))).mean();
          EXPECT_THROW(loss.backward(), std::exception);
        }
        for (int64_t i = 0; i < 2; ++i) {
          loss_of(*net, group->rank(), i).backward();
          engine.step();
        }
        return weights(engine);
      };
      expect_equal(trained(true), trained(false));
    });
  }
}

// As PyTorch has it: what the generator's pass brings to the discriminator adds up until it is
// dropped.
TEST(BackwardPass, GoesToEveryEngineThatItBringsGradientsTo) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      const auto trained = [&](bool own) {
        auto generator = std::make_shared<nn::LinearImpl>(7, 7);
        {
          const torch::NoGradGuard guard;
          generator->weight.copy_(torch::eye(7) * 0.5);
          generator->bias.zero_();
        }
        auto net = std::make_shared<Net>();
        Engine of_generator(generator, AdamW{.lr = 1e-2}, config(stage), group);
        Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
        const auto backward = own ? kOwn : kMarked;
        for (int64_t i = 0; i < 3; ++i) {
          backward(engine, loss_of(*net, group->rank(), i));
          engine.step();
          const auto fake = generator->forward(input(group->rank(), i, at::kFloat));
          backward(of_generator, net->forward(fake).mean());
          if (own) {
            EXPECT_GT(engine.group_norms().at(0), 0);
          }
          of_generator.step();
          engine.zero_grad();
        }
        auto all = weights(engine);
        for (const auto& each : weights(of_generator)) all.push_back(each);
        return all;
      };
      expect_equal(trained(true), trained(false));
    });
  }
}

TEST(BackwardPass, AGradientIsThereBetweenItAndTheStep) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      const auto gradient = [&](const Backward& backward) {
        auto net = std::make_shared<Net>();
        Engine engine(net, Sgd{.lr = 1e-2}, config(stage), group);
        backward(engine, loss_of(*net, group->rank(), 0));
        return engine.gradient("b.weight");
      };
      expect_equal({gradient(kOwn)}, {gradient(kMarked)});
    });
  }
}

TEST(BackwardPass, TakesWhatAHookThatWasSetSinceLeaves) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, Sgd{.lr = 1e-2}, config(2), group);
    struct Counts final : torch::autograd::PostAccumulateGradHook {
      explicit Counts(int& calls) : calls(calls) {}
      void operator()(const torch::autograd::Variable&) override { ++calls; }
      int& calls;
    };
    int calls = 0;
    for (const auto& p : net->parameters())
      torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<Counts>(calls));
    engine.rehook();
    loss_of(*net, group->rank(), 0).backward();
    EXPECT_EQ(calls, 6);
    for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
    EXPECT_GT(engine.step().grad_norm, 0);
  });
}

TEST(BackwardPass, MayOutliveItsEngine) {
  auto net = std::make_shared<Net>();
  auto engine = std::make_unique<Engine>(net, Sgd{.lr = 1e-2}, config(0));
  auto hidden = torch::tanh(net->a(input(0, 0, at::kFloat)));
  hidden.register_hook([&](const at::Tensor&) { engine.reset(); });
  net->c(torch::tanh(net->b(hidden))).mean().backward();
  EXPECT_TRUE(net->a->weight.grad().defined()) << "of a pass that is nobody's by then";
}

// The states of a save, taken over by hand.
// The program's hook is set before the engine takes the model, and ends it.
TEST(BackwardPass, AHookMayEndTheEngine) {
  for (const bool own : {false, true}) {
    auto net = std::make_shared<Net>();
    std::unique_ptr<Engine> engine;
    struct Ends final : torch::autograd::PostAccumulateGradHook {
      explicit Ends(std::unique_ptr<Engine>& engine) : engine(engine) {}
      void operator()(const torch::autograd::Variable&) override { engine.reset(); }
      std::unique_ptr<Engine>& engine;
    };
    torch::autograd::impl::set_post_acc_grad_hooks(net->b->weight, std::make_unique<Ends>(engine));
    engine = std::make_unique<Engine>(net, Sgd{.lr = 1e-2}, config(0));
    const auto loss = loss_of(*net, 0, 0);
    if (own) {
      loss.backward();
    } else {
      engine->backward(loss);
    }
    EXPECT_EQ(engine, nullptr);
  }
}

TEST(BackwardPass, StatesAndStepsBySettingThemGoOnWithTheSameBits) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto other = std::make_shared<Net>();
      Engine engine(net, AdamW{.lr = 1e-2}, config(stage), group);
      Engine taking(other, AdamW{.lr = 1e-2}, config(3 - stage), group);
      train(engine, *net, 3);
      for (const auto& name : engine.parameter_names()) {
        taking.set_parameter(name, engine.parameter(name));
        for (const char* state : {"exp_avg", "exp_avg_sq"})
          taking.set_optimizer_state(name, state, engine.optimizer_state(name, state));
        EXPECT_EQ(engine.parameter_steps(name), 3);
        taking.set_parameter_steps(name, 3);
      }
      EXPECT_EQ(taking.steps(), 3);
      train(engine, *net, 2, 3);
      train(taking, *other, 2, 3);
      expect_equal(weights(taking), weights(engine));
    });
  }
  Engine engine(std::make_shared<Net>(), Sgd{}, config(0));
  EXPECT_THAT(message_of<ConfigError>([&] { engine.set_parameter_steps("a.weight", -1); }),
              HasSubstr("-1"));
}

TEST(BackwardPass, TheLargestNormMayBeSet) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_as_threads(2, [&](auto group) {
      const auto trained = [&](double in_config, double set) {
        auto settings = config(stage);
        settings.gradient_clipping = in_config;
        auto net = std::make_shared<Net>();
        Engine engine(net, Sgd{.lr = 1e-2}, settings, group);
        if (set >= 0) engine.set_gradient_clipping(set);
        train(engine, *net, 2);
        return weights(engine);
      };
      expect_equal(trained(0, 0.01), trained(0.01, -1));
      expect_equal(trained(0.01, 0), trained(0, -1));
      EXPECT_FALSE(torch::equal(trained(0, -1)[0], trained(0.01, -1)[0]));
    });
  }
  Engine engine(std::make_shared<Net>(), Sgd{}, config(0));
  EXPECT_THAT(message_of<ConfigError>([&] { engine.set_gradient_clipping(-1); }), HasSubstr("-1"));
  auto in_backward = config(2);
  in_backward.update_in_backward = true;
  auto net = std::make_shared<Net>();
  Engine updating(net, Sgd{}, in_backward);
  EXPECT_THAT(message_of<ConfigError>([&] { updating.set_gradient_clipping(1); }),
              HasSubstr("update_in_backward"));
}

}  // namespace
}  // namespace zero
