// Recomputation and tiled layers under the engine, ranks as threads: the same bits at every stage,
// what the pager sees, gradients that arrive from two passes at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <mutex>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/models/layers/linear.h"
#include "zero/models/layers/tiled_linear.h"
#include "zero/models/recompute/activation_store.h"
#include "zero/models/recompute/recompute.h"
#include "zero/paging/pager.h"

namespace zero {
namespace {

namespace nn = torch::nn;
using comm::run_as_threads;

// The square makes every row another one: with k alone a product of matrices vanishes.
at::Tensor values(at::IntArrayRef sizes, double phase) {
  return torch::sin(torch::arange(c10::multiply_integers(sizes)).pow(2) * 0.37 + phase)
      .mul(0.5)
      .view(sizes);
}

enum class Mode { plain, recomputed, nested, stored };

// x + dropout(tanh(x W + b)) V a block. Ranks are threads here and share LibTorch's generator, so
// that each has one of its own for dropout.
struct Net : nn::Module {
  explicit Net(int rank) : generator(at::detail::createCPUGenerator(17 + rank)) {
    for (int i = 0; i < kBlocks; ++i) {
      const auto name = std::to_string(i);
      const double phase = i * 1.3;
      w.push_back(register_parameter("w" + name, values({12, 30}, phase)));
      b.push_back(register_parameter("b" + name, values({30}, phase + 1)));
      v.push_back(register_parameter("v" + name, values({30, 12}, phase + 2)));
    }
    first = register_parameter("first", values({7, 12}, 0.5));
  }
  at::Tensor block(size_t i, const at::Tensor& x) {
    auto y = torch::tanh(zero::linear(x, w[i], b[i], WeightLayout::in_out));
    y = y * torch::empty_like(y).bernoulli_(0.8, generator);
    return x + torch::mm(y, v[i]);
  }
  at::Tensor forward(const at::Tensor& x, Mode mode) {
    auto y = torch::mm(x, first);
    for (size_t i = 0; i < kBlocks; ++i) {
      const RecomputeOptions options{.store = mode == Mode::stored ? store : nullptr,
                                     .generators = {generator}};
      const auto once = [this, i](const at::Tensor& z) { return block(i, z); };
      if (mode == Mode::plain) {
        y = block(i, y);
      } else if (mode == Mode::nested) {
        y = zero::recompute([=](const at::Tensor& z) { return zero::recompute(once, z, options); },
                            y, options);
      } else {
        y = zero::recompute(once, y, options);
      }
    }
    return y;
  }
  static constexpr int kBlocks = 4;
  at::Generator generator;
  std::shared_ptr<ActivationStore> store = std::make_shared<ContiguousActivations>();
  at::Tensor first;
  std::vector<at::Tensor> w, b, v;
};

Config config(int stage, bool bf16, int64_t accumulate) {
  Config result;
  result.stage = stage;
  result.bf16 = bf16;
  result.gradient_accumulation_steps = accumulate;
  result.unit_bytes = 1500;
  result.gradient_clipping = 0.5;
  return result;
}

struct TrainRun {
  int stage = 0;
  int ranks = 2;
  bool bf16 = false;
  int64_t accumulate = 1;
  Mode mode = Mode::plain;
};

// The losses of all ranks and the final weights.
std::vector<at::Tensor> train(const TrainRun& run) {
  std::mutex mutex;
  std::vector<at::Tensor> losses(static_cast<size_t>(run.ranks));
  std::vector<at::Tensor> weights;
  run_as_threads(run.ranks, [&](auto group) {
    auto net = std::make_shared<Net>(group->rank());
    const auto c = config(run.stage, run.bf16, run.accumulate);
    Engine engine(net, AdamW{.lr = 0.01}, c, group);
    const auto dtype = net->first.scalar_type();
    std::vector<at::Tensor> mine;
    for (int64_t i = 0; i < 4 * run.accumulate; ++i) {
      const auto x = values({5, 7}, group->rank() * 1.7 + static_cast<double>(i)).to(dtype);
      const auto loss = net->forward(x, run.mode).to(at::kFloat).pow(2).mean();
      engine.backward(loss);
      engine.step();
      mine.push_back(loss.detach());
    }
    std::vector<at::Tensor> all;
    for (const auto& name : engine.parameter_names()) all.push_back(engine.parameter(name));
    const std::lock_guard lock(mutex);
    losses[static_cast<size_t>(group->rank())] = torch::stack(mine);
    if (group->rank() == 0) weights = all;
  });
  losses.insert(losses.end(), weights.begin(), weights.end());
  return losses;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

class EngineRecompute : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stage, EngineRecompute, testing::Values(0, 1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(EngineRecompute, GivesTheSameBitsWithDropout) {
  for (const int ranks : {1, 2}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        TrainRun run{.stage = GetParam(), .ranks = ranks, .bf16 = bf16, .accumulate = k};
        const auto reference = train(run);
        for (const auto mode : {Mode::recomputed, Mode::nested, Mode::stored}) {
          SCOPED_TRACE(testing::Message() << ranks << " ranks, bf16 " << bf16 << ", k " << k
                                          << ", mode " << static_cast<int>(mode));
          run.mode = mode;
          expect_equal(train(run), reference);
        }
      }
    }
  }
}

// Every parameter is used in recomputed functions alone: without gradients in forward.
struct Chain : nn::Module {
  Chain() {
    for (int i = 0; i < 4; ++i)
      w.push_back(register_parameter("w" + std::to_string(i), values({16, 16}, i * 0.9)));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& weight : w)
      x = zero::recompute([weight](const at::Tensor& y) { return torch::mm(y, weight).tanh(); }, x);
    return x;
  }
  std::vector<at::Tensor> w;
};

TEST(EngineRecomputePaging, EveryTouchOfAStepIsInItsTraceAndThePlanIsFollowed) {
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Chain>();
    Config c;
    c.stage = 3;
    c.unit_bytes = 16 * 16 * 4;
    c.max_live_parameters = 16 * 16;
    c.one_sided_gather = false;
    Engine engine(net, AdamW{}, c, group);
    auto& pager = *engine.pager();
    const auto x = values({3, 16}, 0.1).requires_grad_();
    for (int step = 0; step < 4; ++step) {
      const auto before = pager.counts();
      const auto loss = net->forward(x).mean();
      EXPECT_EQ(pager.following(), step > 0);
      engine.backward(loss);
      EXPECT_EQ(pager.following(), step > 0);
      const auto after = pager.counts();
      engine.step();
      // In forward, in the second run and in backward.
      EXPECT_EQ(after.touches - before.touches, 4 * 3);
      ASSERT_NE(pager.plan(), nullptr);
      EXPECT_EQ(pager.plan()->trace.touches().size(), 4U * 3);
      const torch::NoGradGuard no_grad;
      net->forward(x);  // evaluation is not of the step
    }
  });
}

// A parameter is used late outside, in a recomputed function, and early outside: its first gradient
// waits in its place for the last while the one of the function arrives.
struct Shared : nn::Module {
  Shared()
      : w(register_parameter("w", values({12, 12}, 0.3))),
        u(register_parameter("u", values({12, 12}, 1.3))) {}
  at::Tensor use(const at::Tensor& x) { return torch::tanh(zero::linear(x, w, {})); }
  at::Tensor forward(at::Tensor x, bool recompute) {
    const auto function = [this](const at::Tensor& y) { return zero::linear(use(y), u, {}); };
    x = use(x);
    x = recompute ? zero::recompute(function, x) : function(x);
    x = recompute ? zero::recompute(function, x) : function(x);
    return use(x);
  }
  at::Tensor w, u;
};

TEST(EngineRecomputeGradients, OfAParameterThatIsUsedInsideAndOutsideAreRight) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int64_t unit_bytes : {12 * 12 * 4, 1 << 20}) {
      for (const int64_t k : {1, 2}) {
        run_as_threads(2, [&](auto group) {
          auto net = std::make_shared<Shared>();
          Config c;
          c.stage = stage;
          c.unit_bytes = unit_bytes;
          c.gradient_accumulation_steps = k;
          Engine engine(net, Sgd{.lr = 0.1}, c, group);
          for (int step = 0; step < 3; ++step) {
            // LibTorch's own gradient of the mean over ranks and micro-batches.
            Shared reference;
            {
              const torch::NoGradGuard no_grad;
              for (const auto* name : {"w", "u"})
                reference.named_parameters()[name].copy_(engine.parameter(name));
            }
            const auto input = [&](int rank, int64_t i) {
              return values({5, 12}, rank * 1.7 + static_cast<double>(i) + step * 0.3);
            };
            for (int rank = 0; rank < 2; ++rank) {
              for (int64_t i = 0; i < k; ++i)
                (reference.forward(input(rank, i), false).pow(2).mean() /
                 static_cast<double>(2 * k))
                    .backward();
            }
            for (int64_t i = 0; i < k; ++i) {
              engine.backward(net->forward(input(group->rank(), i), true).pow(2).mean());
              if (i + 1 < k) engine.step();
            }
            for (const auto* name : {"w", "u"}) {
              const auto expected = reference.named_parameters()[name].grad();
              EXPECT_TRUE(torch::abs(expected).max().gt(1e-2).all().equal(torch::tensor(true)));
              EXPECT_TRUE(torch::allclose(engine.gradient(name), expected, 1e-4, 1e-6))
                  << name << ", stage " << stage << ", k " << k << ", step " << step;
            }
            engine.step();
          }
        });
      }
    }
  }
}

TEST(EngineTiledLinear, APeakOfGatheredUnitsIsATile) {
  const auto peak = [](int64_t out_splits) {
    int64_t bytes = 0;
    run_as_threads(2, [&](auto group) {
      // Ranks share the generator: values that do not need it.
      auto net = std::make_shared<TiledLinearImpl>(
          TiledLinearOptions{64, 128, 1, out_splits, /*bias=*/false});
      net->load(values({128, 64}, 0.2));
      Config c;
      c.stage = 3;
      c.unit_bytes = 1024;  // at most a tile
      c.max_live_parameters = 0;
      c.prefetch_bucket_size = 0;
      c.one_sided_gather = false;
      Engine engine(net, AdamW{}, c, group);
      const auto x = values({4, 64}, 0.4).requires_grad_();
      group->ledger()->reset_peaks();
      for (int step = 0; step < 3; ++step) {
        engine.backward(net->forward(x).pow(2).mean());
        engine.step();
      }
      if (group->rank() == 0) bytes = group->ledger()->usage(Category::gathered_units).peak;
    });
    return bytes;
  };
  const int64_t whole = peak(1);
  EXPECT_EQ(whole, 128 * 64 * 4);
  for (const int64_t tiles : {2, 4, 8, 16}) EXPECT_EQ(peak(tiles), whole / tiles) << tiles;
}

TEST(EngineTiledLinear, TrainsAsTheWholeLayerDoes) {
  const auto weights = [](int64_t max_elements) {
    at::Tensor result;
    run_as_threads(2, [&](auto group) {
      auto net =
          std::make_shared<nn::SequentialImpl>(nn::Linear(20, 36), nn::Tanh(), nn::Linear(36, 4));
      {
        const torch::NoGradGuard no_grad;
        double phase = 0;
        for (auto& p : net->parameters()) p.copy_(values(p.sizes(), phase += 0.7));
      }
      tile_linears(*net, max_elements);
      Config c;
      c.stage = 3;
      c.unit_bytes = 1024;
      Engine engine(net, AdamW{.lr = 0.01}, c, group);
      for (int step = 0; step < 5; ++step) {
        const auto x = values({6, 20}, group->rank() + step * 0.2);
        engine.backward(net->forward(x).pow(2).mean());
        engine.step();
      }
      std::vector<at::Tensor> first;
      for (const auto& name : engine.parameter_names()) {
        if (name.starts_with("0.weight")) first.push_back(engine.parameter(name));
      }
      if (group->rank() == 0) result = torch::cat(first);
    });
    return result;
  };
  const auto whole = weights(1 << 20);
  EXPECT_EQ(whole.sizes(), (std::vector<int64_t>{36, 20}));
  EXPECT_TRUE(torch::allclose(weights(200), whole, 1e-4, 1e-5));
}

}  // namespace
}  // namespace zero
