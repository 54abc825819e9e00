// All ranks name the same rank, micro-batch and layer, at every stage. Ranks are threads.
#include "zero/engine/step_watch.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/engine/net.h"
#include "zero/comm/group.h"
#include "zero/models/recompute/recompute.h"

namespace zero {
namespace {

using comm::run_as_threads;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int kRanks = 2;
constexpr int64_t kMicroBatches = 2;

// The identity, whose backward divides by zero.
struct Divides : torch::autograd::Function<Divides> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {(gradients[0] * 0).div_(0)};
  }
};

// Five layers h.0 to h.4; `after` is what becomes of the output of h.`where`.
struct Layers : nn::Module {
  Layers() {
    const torch::NoGradGuard guard;
    for (int i = 0; i < 5; ++i) {
      h->push_back(nn::Linear(6, 6));
      for (auto& p : h[static_cast<size_t>(i)]->parameters())
        p.copy_(torch::sin(torch::arange(p.numel()) * 0.7 + i).mul(0.4).view(p.sizes()));
    }
    register_module("h", h);
  }
  at::Tensor loss(const at::Tensor& input) {
    auto x = input;
    for (size_t i = 0; i < 5; ++i) {
      const auto layer = [this, i](const at::Tensor& y) {
        auto z = h->ptr<nn::LinearImpl>(i)->forward(torch::tanh(y));
        return i == where && after ? after(z) : z;
      };
      x = recomputes ? recompute(layer, x) : layer(x);
    }
    return x.pow(2).mean();
  }
  nn::ModuleList h;
  std::function<at::Tensor(const at::Tensor&)> after;
  bool recomputes = false;
  size_t where = 3;
};

struct Scene {
  Config config;
  bool recomputes = false;
  int rank = 1;
  int64_t micro_batch = 2;
  std::function<at::Tensor(const at::Tensor&)> after;
  std::function<void(Layers&)> prepare = [](Layers&) {};
};

// Returns what the ranks agree on.
std::string agreed(const Scene& scene) {
  std::mutex mutex;
  std::set<std::string> texts;
  run_as_threads(kRanks, [&](auto group) {
    auto model = std::make_shared<Layers>();
    model->recomputes = scene.recomputes;
    Engine engine(model, AdamW{.lr = 1e-3}, scene.config, group);
    if (group->rank() == scene.rank) scene.prepare(*model);
    std::string text;
    {
      StepWatch watch(engine, named_tensors(model));
      for (int step = 0; step < 2; ++step) {  // the first is well
        watch.begin_step();
        for (int64_t i = 1; i <= kMicroBatches; ++i) {
          const bool here = step == 1 && group->rank() == scene.rank && i == scene.micro_batch;
          model->after = here ? scene.after : nullptr;
          watch.begin_micro_batch(i);
          const auto loss = model->loss(torch::cos(torch::arange(12) + group->rank()).view({2, 6}));
          engine.backward(loss);
          watch.add_loss(i, loss.template item<double>());
          if (i < kMicroBatches) engine.step();
        }
        text = watch.agree();
        if (step == 0) {
          EXPECT_EQ(text, "");
        }
        if (text.empty()) text = watch.check_sums();
        const auto result = engine.step();
        EXPECT_TRUE(result.boundary);
        EXPECT_EQ(result.updated, text.empty());
      }
    }
    // The engine's own look at no inputs.
    const auto left = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    EXPECT_FALSE(left.has_value() && left->needs_inputs_);
    const std::lock_guard lock(mutex);
    texts.insert(text);
  });
  EXPECT_EQ(texts.size(), 1u) << "the ranks do not agree";
  return *texts.begin();
}

class StepWatchAt : public testing::TestWithParam<int> {
 protected:
  Scene scene(std::function<at::Tensor(const at::Tensor&)> after) const {
    return {.config = config(GetParam(), false, kMicroBatches), .after = std::move(after)};
  }
};
INSTANTIATE_TEST_SUITE_P(Stage, StepWatchAt, testing::Values(0, 1, 2, 3),
                         [](const auto& p) { return "Stage" + std::to_string(p.param); });

TEST_P(StepWatchAt, ANaNOfOneRanksBackward) {
  auto bad = scene([](const at::Tensor& x) { return Divides::apply(x); });
  for (const bool recomputes : {false, true}) {
    bad.recomputes = recomputes;
    EXPECT_THAT(agreed(bad), AllOf(StartsWith("First on rank 1, micro-batch 2, backward: "),
                                   HasSubstr("aten::div_ in zero::Divides"), HasSubstr(" h.3."),
                                   HasSubstr("12 NaN and 0 infinite of 12")));
  }
}

TEST_P(StepWatchAt, ANaNOfOneRanksForward) {
  auto bad = scene([](const at::Tensor& x) { return torch::log(x - 10); });
  bad.rank = 0;
  bad.micro_batch = 1;
  EXPECT_THAT(agreed(bad), AllOf(StartsWith("First on rank 0, micro-batch 1, forward: aten::log"),
                                 HasSubstr("after parameter h.3.")));
}

TEST_P(StepWatchAt, AHookOfAnActivation) {
  EXPECT_THAT(agreed(scene([](const at::Tensor& x) {
                x.register_hook([](const at::Tensor& g) { return g * NAN; });
                return x;
              })),
              AllOf(StartsWith("First on rank 1, micro-batch 2, backward: aten::mul"),
                    HasSubstr(" in a hook at AddmmBackward"), HasSubstr(" h.3.")));
}

TEST_P(StepWatchAt, AHookOfAParameter) {
  auto bad = scene({});
  bad.prepare = [](Layers& model) {
    auto calls = std::make_shared<int>(0);
    model.h->ptr<nn::LinearImpl>(3)->weight.register_hook([calls](const at::Tensor& g) {
      return ++*calls == 4 ? g * NAN : g;  // the second micro-batch of the second step
    });
  };
  EXPECT_THAT(agreed(bad), AllOf(StartsWith("First on rank 1, micro-batch 2, backward: aten::mul"),
                                 HasSubstr("of parameter h.3.weight")));
}

TEST_P(StepWatchAt, AnInfiniteLoss) {
  auto bad = scene([](const at::Tensor& x) { return x.abs().mul(1e30); });
  bad.prepare = [](Layers& model) { model.where = 4; };
  EXPECT_THAT(
      agreed(bad),
      AllOf(StartsWith("First on rank 1, micro-batch 2, forward: aten::pow after parameter h.4."),
            HasSubstr("0 NaN"), HasSubstr("The first NaN: backward")));
}

TEST_P(StepWatchAt, ASumThatOverflowsWhereEveryRanksGradientIsFinite) {
  auto bad = scene({});
  bad.config.gradient_accumulation_steps = kMicroBatches;
  bad.rank = -1;
  std::mutex mutex;
  std::set<std::string> texts;
  run_as_threads(kRanks, [&](auto group) {
    auto model = std::make_shared<Layers>();
    Engine engine(model, AdamW{.lr = 1e-3}, bad.config, group);
    // 3e38 is a number of fp32; the sum of four is not.
    model->h->ptr<nn::LinearImpl>(3)->bias.register_hook(
        [](const at::Tensor& g) { return torch::full_like(g, 3e38 / 2); });
    StepWatch watch(engine, named_tensors(model));
    for (int64_t i = 1; i <= kMicroBatches; ++i) {
      watch.begin_micro_batch(i);
      const auto loss = model->loss(torch::ones({2, 6}));
      engine.backward(loss);
      watch.add_loss(i, loss.template item<double>());
      if (i < kMicroBatches) engine.step();
    }
    EXPECT_EQ(watch.agree(), "");
    auto text = watch.check_sums();
    EXPECT_FALSE(engine.step().updated);
    const std::lock_guard lock(mutex);
    texts.insert(std::move(text));
  });
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_THAT(*texts.begin(), AllOf(HasSubstr("that of parameter h.3.bias has 0 NaN and 6 infinite "
                                              "of 6 elements"),
                                    HasSubstr("The sum overflowed.")));
}

// Between hosts units are gathered by copies, and given back between their uses.
Config tight() {
  auto result = config(3);
  result.unit_bytes = 200;
  result.max_live_parameters = 0;
  return result;
}

TEST(StepWatchOnHosts, ADamagedParameterIsNamed) {
  std::mutex mutex;
  std::set<std::string> texts;
  comm::run_as_hosts(2, 1, [&](auto group) {
    auto model = std::make_shared<Layers>();
    Engine engine(model, AdamW{.lr = 1e-3}, tight(), group);
    auto weight = engine.parameter("h.2.weight");
    engine.set_parameter("h.2.weight", weight.fill_(NAN));
    StepWatch watch(engine, named_tensors(model));
    watch.begin_micro_batch(1);
    const auto loss = model->loss(torch::ones({2, 6}));
    engine.backward(loss);
    watch.add_loss(1, loss.template item<double>());
    const auto text = watch.agree();
    engine.zero_grad();
    const std::lock_guard lock(mutex);
    texts.insert(text);
  });
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_THAT(
      *texts.begin(),
      AllOf(StartsWith("First on rank 0, micro-batch 1, forward: aten::addmm"), HasSubstr(" h.2."),
            HasSubstr("Parameter h.2.weight has 36 NaN and 0 infinite")));
}

TEST(StepWatchOnHosts, AWatchGathersNothing) {
  const auto counts = [](bool watches) {
    std::vector<int64_t> calls(2);
    comm::run_as_hosts(2, 1, [&](auto group) {
      auto model = std::make_shared<Layers>();
      Engine engine(model, AdamW{.lr = 1e-3}, tight(), group);
      std::optional<StepWatch> watch;
      if (watches) watch.emplace(engine, named_tensors(model));
      for (int step = 0; step < 3; ++step) {
        if (watch) watch->begin_micro_batch(1);
        engine.backward(model->loss(torch::ones({2, 6})));
        engine.step();
      }
      calls[static_cast<size_t>(group->rank())] =
          group->traffic().count(comm::Collective::all_gather).calls;
    });
    return calls;
  };
  const auto without = counts(false);
  EXPECT_GT(without[0], 0);
  EXPECT_EQ(counts(true), without);
}

}  // namespace
}  // namespace zero
