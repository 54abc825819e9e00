// Layer-major accumulation, ranks as threads: the sums of stages 0 and 1 to the bit, one gather
// forward and one backward, one reduction.
#include "zero/train/layer_major.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <string>

#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/base/timeline.h"
#include "zero/comm/group.h"
#include "zero/models/recompute/activation_store.h"
#include "zero/paging/pager.h"

namespace zero {
namespace {

namespace nn = torch::nn;
using comm::run_as_threads;
using testing::HasSubstr;

at::Tensor values(at::IntArrayRef sizes, double phase) {
  return torch::sin(torch::arange(c10::multiply_integers(sizes)).pow(2) * 0.37 + phase)
      .mul(0.5)
      .view(sizes);
}

// x + dropout(tanh(x W + b)) V a block, a projection before and behind; `tied`: by the same weight.
// Ranks are threads here and share LibTorch's generator, so that each has one of its own.
struct Net : nn::Module {
  Net(int rank, bool tied, double keep)
      : keep(keep), generator(at::detail::createCPUGenerator(17 + rank)) {
    first = register_parameter("first", values({13, 12}, 0.5));
    for (int i = 0; i < 3; ++i) {
      const auto name = std::to_string(i);
      const double phase = i * 1.3;
      w.push_back(register_parameter("w" + name, values({12, 30}, phase)));
      b.push_back(register_parameter("b" + name, values({30}, phase + 1)));
      v.push_back(register_parameter("v" + name, values({30, 12}, phase + 2)));
    }
    last = tied ? first : register_parameter("last", values({13, 12}, 0.9));
  }
  at::Tensor block(size_t i, const at::Tensor& x) {
    auto y = torch::tanh(torch::addmm(b[i], x, w[i]));
    if (keep < 1) y = y * torch::empty_like(y).bernoulli_(keep, generator);
    return x + torch::mm(y, v[i]);
  }
  at::Tensor loss(const at::Tensor& x) {
    return (torch::mm(x, last.t()).to(at::kFloat) - 0.3).pow(2).mean();
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::mm(x, first);
    for (size_t i = 0; i < w.size(); ++i) y = block(i, y);
    return loss(y);
  }
  // Returns the model as layers. The projection before them is a layer where it is to be summed in
  // order.
  LayerSequence layers(const std::vector<at::Tensor>& x) {
    LayerSequence sequence;
    sequence.inputs = [x] {
      std::vector<std::vector<at::Tensor>> inputs;
      for (const auto& one : x) inputs.push_back({one});
      return inputs;
    };
    sequence.layers.emplace_back([this](const std::vector<at::Tensor>& y) {
      return std::vector<at::Tensor>{torch::mm(y[0], first)};
    });
    for (size_t i = 0; i < w.size(); ++i) {
      sequence.layers.emplace_back([this, i](const std::vector<at::Tensor>& y) {
        return std::vector<at::Tensor>{block(i, y[0])};
      });
    }
    if (last.is_same(first)) sequence.shared = {first};
    sequence.loss = [this](const std::vector<at::Tensor>& y, int64_t) { return loss(y[0]); };
    return sequence;
  }
  std::vector<at::Tensor> w, b, v;
  at::Tensor first, last;
  double keep;
  at::Generator generator;
};

struct Settings {
  int stage = 3;
  bool bf16 = false;
  int64_t micro_batches = 3;
  bool tied = false;
  double keep = 1;
};

Config configuration(const Settings& settings, bool layer_major) {
  Config c;
  c.stage = settings.stage;
  c.bf16 = settings.bf16;
  c.gradient_accumulation_steps = settings.micro_batches;
  c.layer_major_accumulation = layer_major;
  c.unit_bytes = settings.bf16 ? 1700 : 3400;  // not a whole number of layers
  return c;
}

std::vector<at::Tensor> batches(const Settings& settings, int rank, int64_t step) {
  std::vector<at::Tensor> x;
  for (int64_t i = 0; i < settings.micro_batches; ++i) {
    x.push_back(values({5, 13}, 0.1 + rank * 1.7 + static_cast<double>(10 * step + i))
                    .to(settings.bf16 ? at::kBFloat16 : at::kFloat));
  }
  return x;
}

// One step; the losses of its micro-batches.
std::vector<at::Tensor> step(Engine& engine, Net& net, const Settings& settings, int64_t index,
                             const std::shared_ptr<ActivationStore>& store = nullptr) {
  const auto x = batches(settings, engine.group().rank(), index);
  std::vector<at::Tensor> losses;
  if (engine.config().layer_major_accumulation) {
    losses = backward_layer_major(engine, net.layers(x),
                                  {.store = store, .generators = {net.generator}});
    EXPECT_TRUE(engine.step().updated);
    return losses;
  }
  for (const auto& one : x) {
    auto loss = net.forward(one);
    engine.backward(loss);
    engine.step();
    losses.push_back(loss.detach());
  }
  return losses;
}

// The weights and losses after three steps.
std::vector<at::Tensor> train(const Settings& settings, const Config& c, int ranks,
                              const std::function<std::shared_ptr<ActivationStore>()>& store = {}) {
  std::vector<at::Tensor> result;
  run_as_threads(ranks, [&](auto group) {
    auto net = std::make_shared<Net>(group->rank(), settings.tied, settings.keep);
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    const auto kept = store ? store() : nullptr;
    std::vector<at::Tensor> mine;
    for (int64_t i = 0; i < 3; ++i) {
      auto losses = step(engine, *net, settings, i, kept);
      mine.insert(mine.end(), losses.begin(), losses.end());
    }
    for (const auto& name : engine.parameter_names()) mine.push_back(engine.parameter(name));
    if (group->rank() == 0) result = mine;
  });
  return result;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "value " << i;
}

TEST(LayerMajor, AddsUpAsStagesZeroAndOneDoToTheBit) {
  for (const bool bf16 : {false, true}) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      for (const int64_t k : {1, 3}) {
        Settings settings{.stage = 0, .bf16 = bf16, .micro_batches = k};
        const auto expected = train(settings, configuration(settings, false), ranks);
        for (settings.stage = 0; settings.stage <= 3; ++settings.stage) {
          SCOPED_TRACE(testing::Message() << "bf16 " << bf16 << ", ranks " << ranks << ", k " << k
                                          << ", stage " << settings.stage);
          expect_equal(train(settings, configuration(settings, true), ranks), expected);
        }
      }
    }
  }
}

TEST(LayerMajor, ATiedWeightDiffersByRoundingAlone) {
  for (const bool bf16 : {false, true}) {
    Settings settings{.stage = 0, .bf16 = bf16, .tied = true};
    const auto expected = train(settings, configuration(settings, false), 2);
    for (settings.stage = 0; settings.stage <= 3; ++settings.stage) {
      const auto got = train(settings, configuration(settings, true), 2);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i) {
        // AdamW's first steps are as large for a tiny gradient as for a large one.
        EXPECT_TRUE(torch::allclose(got[i], expected[i], 1e-3, bf16 ? 2e-2 : 1e-5))
            << (got[i] - expected[i]).abs().max();
      }
    }
  }
}

TEST(LayerMajor, DrawsDropoutAgainAsItWas) {
  // One micro-batch draws in the order of a plain pass.
  Settings settings{.micro_batches = 1, .keep = 0.7};
  expect_equal(train(settings, configuration(settings, true), 2),
               train(settings, configuration(settings, false), 2));
  // Several: the same at every stage, wherever the inputs of layers are kept.
  settings = {.stage = 1, .keep = 0.7};
  const auto expected = train(settings, configuration(settings, true), 2);
  settings.stage = 3;
  const TemporaryFolder folder;
  expect_equal(train(settings, configuration(settings, true), 2), expected);
  expect_equal(train(settings, configuration(settings, true), 2,
                     [] { return std::make_shared<ContiguousActivations>(); }),
               expected);
  std::vector<std::shared_ptr<DiskActivations>> stores;
  std::mutex mutex;
  expect_equal(train(settings, configuration(settings, true), 2,
                     [&] {
                       const std::lock_guard lock(mutex);
                       stores.push_back(std::make_shared<DiskActivations>(
                           DiskActivationOptions{.folder = folder.path().string()}));
                       return stores.back();
                     }),
               expected);
  for (const auto& store : stores) EXPECT_EQ(store->late_reads(), 0);
}

TEST(LayerMajor, MovesThreePsiAStepWhateverTheNumberOfMicroBatches) {
  for (const bool tied : {false, true}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {2, 5}) {
        const Settings settings{.bf16 = bf16, .micro_batches = k, .tied = tied};
        run_as_threads(2, [&](auto group) {
          auto net = std::make_shared<Net>(group->rank(), tied, 1.0);
          auto c = configuration(settings, true);
          c.one_sided_gather = false;
          // Room for what one layer uses: its units, and the one that it shares with the next.
          c.max_live_parameters = 2600;
          Engine engine(net, AdamW{}, c, group);
          step(engine, *net, settings, 0);
          group->traffic().reset();
          step(engine, *net, settings, 1);
          const auto formula = engine.traffic_formula();
          const auto gathered = group->traffic().count(comm::Collective::all_gather).logical_bytes;
          EXPECT_LE(gathered, formula.all_gather);
          EXPECT_EQ(group->traffic().count(comm::Collective::reduce_scatter).logical_bytes,
                    formula.reduce_scatter);
          int64_t numel = 0;
          for (const auto& unit : engine.layout().units()) numel += unit.numel;
          EXPECT_EQ(formula.all_gather, 2 * numel * (bf16 ? 2 : 4) / 2);
          EXPECT_EQ(formula.reduce_scatter, numel * 4 / 2);
        });
      }
    }
  }
}

TEST(LayerMajor, ReadsParametersFromDiskTwiceAndWritesGradientsOnce) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    const Settings settings{.bf16 = bf16, .micro_batches = 4};
    auto c = configuration(settings, true);
    const auto expected = train(settings, c, 2);
    c.offload_param = {.device = OffloadDevice::nvme, .nvme_path = folder.path().string()};
    c.offload_optimizer.device = OffloadDevice::nvme;
    c.offload_optimizer.nvme_path = folder.path().string();
    c.offload_optimizer.gradients = true;
    expect_equal(train(settings, c, 2), expected);
    c.max_live_parameters = 2600;
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>(group->rank(), false, 1.0);
      Engine engine(net, AdamW{}, c, group);
      for (int64_t i = 0; i < 2; ++i) step(engine, *net, settings, i);
      engine.complete_update();
      const auto before = engine.disk();
      step(engine, *net, settings, 2);
      engine.complete_update();
      EXPECT_LE(engine.disk().read - before.read, engine.traffic_formula().disk_read);
      EXPECT_EQ(engine.disk().written - before.written, engine.traffic_formula().disk_written);
    });
  }
}

TEST(LayerMajor, CountsAllThatTheModelComputesAsForward) {
  const Settings settings;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>(group->rank(), false, 1.0);
    Engine engine(net, AdamW{}, configuration(settings, true), group);
    auto& timeline = *group->accounts().timeline;
    auto model = net->layers(batches(settings, group->rank(), 0));
    model.inputs = [&timeline, inputs = model.inputs] {
      const Timeline::Scope operation(timeline, Activity::operation, "inputs");
      return inputs();
    };
    model.loss = [&timeline, loss = model.loss](const std::vector<at::Tensor>& y, int64_t i) {
      const Timeline::Scope operation(timeline, Activity::operation, "loss");
      return loss(y, i);
    };
    timeline.start();
    backward_layer_major(engine, model);
    timeline.stop();
    engine.step();
    const auto spans = timeline.spans();
    int64_t computed = 0;
    for (const auto& of : spans) {
      if (of.activity != Activity::operation) continue;
      ++computed;
      EXPECT_TRUE(std::any_of(spans.begin(), spans.end(), [&](const Span& phase) {
        return phase.activity == Activity::forward && phase.begin <= of.begin &&
               of.end <= phase.end;
      })) << of.label();
    }
    EXPECT_EQ(computed, 1 + settings.micro_batches);
  });
}

TEST(LayerMajor, RefusesWhatMakesNoSenseAndGoesOn) {
  const auto error_of = [](const auto& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const Settings settings;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>(group->rank(), false, 1.0);
    {
      Engine engine(net, AdamW{}, configuration(settings, false), group);
      EXPECT_THAT(error_of([&] { engine.accumulate(1, [](const auto&) {}); }),
                  HasSubstr("layer_major_accumulation"));
    }
    net = std::make_shared<Net>(group->rank(), false, 1.0);
    Engine engine(net, AdamW{}, configuration(settings, true), group);
    const auto two_steps = [&] {
      auto x = batches(settings, group->rank(), 0);
      x.push_back(x.front());
      return backward_layer_major(engine, net->layers(x));
    };
    EXPECT_THAT(error_of(two_steps), HasSubstr("4 micro-batches; this step has 3 left"));
    auto model = net->layers(batches(settings, group->rank(), 0));
    model.loss = [](const std::vector<at::Tensor>& y, int64_t) { return y[0]; };
    EXPECT_THAT(error_of([&] { backward_layer_major(engine, model); }),
                HasSubstr("micro-batch 0 has 60 elements"));
    step(engine, *net, settings, 0);
    EXPECT_EQ(engine.steps(), 1);
  });
}

}  // namespace
}  // namespace zero
