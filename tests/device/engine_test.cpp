// The engine on devices: losses and weights are the CPU's, bit for bit, under every schedule of the
// device; no wait is missing, and the host waits once a step.
#include "zero/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/device/allocators.h"
#include "tests/device/backend.h"
#include "tests/device/models.h"
#include "tests/device/testing.h"
#include "tests/engine/net.h"
#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/device/memory.h"
#include "zero/engine/gathered.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/recompute/recompute.h"
#include "zero/optim/operators.h"
#include "zero/optim/sweeps.h"
#include "zero/paging/simulation.h"

namespace zero::simulated {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

enum class Kind { gpt, mlp, convolution, lstm, gru, recomputed, own_gpt, turns };

struct Setting {
  int stage = 3;
  int ranks = 2;
  bool bf16 = false;
  int64_t accumulate = 1;
  double clip = 1.0;
  Optimizer optimizer = AdamW{.lr = 1e-2};
  int64_t live = 6000;            // parameters
  Tier states = Tier::device;     // of the optimizer; at stage 3 of the parameters too
  bool keeps_parameters = false;  // on the device, at stage 3 too
  bool delayed = false;
  bool in_backward = false;
  bool eight_bit = false;
  bool bf16_states = false;
  bool bf16_masters = false;  // and gradients
  bool gradients_on_disk = false;
  bool split = false;        // master weights
  bool fp16 = false;         // with a loss scale that the first steps overflow
  bool layer_major = false;  // one pass of all micro-batches
  Kind kind = Kind::gpt;
  bool freezes = false;
  int64_t shards = 0;  // mics_shard_size
  int64_t steps = 3;
  int64_t unit_bytes = 8000;
  // In so many steps the norm of each parameter is read before the update, later of half of them.
  int64_t norms = 0;
  std::optional<PrefetchSpeeds> speeds{};
  int hosts = 1;              // with an equal part of the ranks each
  bool through_host = false;  // the hosts' memory carries the tensors
  bool kept = false;          // each host keeps all parameters
  bool quantised = false;     // between hosts: weights and gradients, with feedback
  bool packed = false;        // between hosts: exponents
};

std::string describe(const Setting& s) {
  return "stage " + std::to_string(s.stage) + ", " + std::to_string(s.ranks) + " ranks, " +
         (s.bf16 ? "bf16" : "fp32") + ", " + std::to_string(s.accumulate) +
         " micro-batches, model " + std::to_string(static_cast<int>(s.kind)) +
         (s.states == Tier::host   ? ", states on the host"
          : s.states == Tier::disk ? ", states on a disk"
                                   : "") +
         (s.keeps_parameters ? " without parameters" : "") + (s.delayed ? ", delayed" : "") +
         (s.in_backward ? ", in backward" : "") + (s.eight_bit ? ", 8 bits" : "") +
         (s.bf16_states ? ", bf16 states" : "") + (s.bf16_masters ? ", bf16 masters" : "") +
         (s.gradients_on_disk ? ", gradients on a disk" : "") + (s.split ? ", split" : "") +
         (s.hosts > 1 ? ", " + std::to_string(s.hosts) + " hosts" : "") +
         (s.through_host ? ", through the host" : "") + (s.kept ? ", kept" : "") +
         (s.quantised ? ", quantised" : "") + (s.packed ? ", packed" : "") + ", " +
         std::string(optim::name(s.optimizer));
}

Config config_of(const Setting& s) {
  Config config;
  config.stage = s.stage;
  config.bf16 = s.bf16;
  config.gradient_accumulation_steps = s.accumulate;
  config.gradient_clipping = s.clip;
  config.unit_bytes = s.unit_bytes;
  config.max_live_parameters = s.live;
  config.prefetch_bucket_size = s.live / 2;
  config.one_sided_gather = false;  // as a device gathers
  if (s.shards > 0) config.mics_shard_size = s.shards;
  if (s.speeds) config.prefetch_speeds = *s.speeds;
  if (s.states != Tier::device) {
    static const TemporaryFolder files;
    const auto at = s.states == Tier::host ? OffloadDevice::cpu : OffloadDevice::nvme;
    config.offload_optimizer.device = at;
    if (s.stage == 3 && !s.keeps_parameters) config.offload_param.device = at;
    if (s.states == Tier::disk)
      config.offload_optimizer.nvme_path = config.offload_param.nvme_path = files.path().string();
  }
  if (s.delayed) config.offload_optimizer.delayed_update_after = 1;
  config.update_in_backward = s.in_backward;
  config.offload_optimizer.gradients = s.gradients_on_disk;
  config.split_master_weights = s.split;
  config.fp16 = s.fp16;
  config.layer_major_accumulation = s.layer_major;
  if (s.eight_bit) config.optimizer_states = optim::StateFormat::eight_bit;
  if (s.kept) config.hpz_partition_size = s.ranks / s.hosts;
  if (s.quantised) {
    config.quantised.weights = config.quantised.gradients = true;
    config.quantised.feedback = ErrorFeedback{};
  }
  config.packed_exponents = s.packed;
  if (s.bf16_states) config.optimizer_states = optim::StateFormat::bf16;
  config.bf16_master_weights_and_grads = s.bf16_masters;
  return config;
}

// Its middle layers are recomputed in backward.
struct Recomputed final : Learner {
  nn::Linear first{16, 32}, middle{32, 32}, last{32, 8};
  Recomputed() {
    register_module("first", first);
    register_module("middle", middle);
    register_module("last", last);
  }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    const auto hidden = recompute(
        [this](const Tensor& h) { return torch::tanh(middle(torch::relu(h))); }, first(x));
    return torch::cross_entropy_loss(last(hidden), y);
  }
};

// Layers of one size, which are used in the other order after every second pass.
struct Turns final : Learner {
  std::vector<nn::Linear> layers;
  int64_t passes = 0;
  Turns() {
    for (const auto* name : {"first", "second", "third", "fourth", "fifth", "sixth"}) {
      const auto options = nn::LinearOptions(32, 32).bias(false);
      layers.push_back(register_module(name, nn::Linear(options)));
    }
  }
  Tensor loss(const Tensor& x, const Tensor& y) override {
    auto h = torch::cat({x, x}, 1);
    for (auto& layer : layers) h = torch::tanh(layer(h));
    if (++passes % 2 == 0) std::reverse(layers.begin(), layers.end());
    return torch::cross_entropy_loss(h.narrow(1, 0, 8), y);
  }
};

// libzero's own, whose layers have kernels for the CPU and take LibTorch's operators elsewhere.
struct OwnGpt final : Learner {
  Gpt2 model{Gpt2Config{.vocab_size = 32, .context = 16, .width = 32, .layers = 2, .heads = 4}};
  OwnGpt() { register_module("model", model); }
  Tensor loss(const Tensor& x, const Tensor& y) override { return model->loss(x, y); }
};

// Ranks are threads and share the generator: values that do not need it.
std::shared_ptr<Learner> make_model(const Setting& s) {
  const auto model = [&]() -> std::shared_ptr<Learner> {
    switch (s.kind) {
      case Kind::gpt:
        return make<Gpt>();
      case Kind::mlp:
        return make<Mlp>();
      case Kind::convolution:
        return make<Convolution>();
      case Kind::lstm:
        return make<Lstm>();
      case Kind::gru:
        return make<Gru>();
      case Kind::recomputed:
        return make<Recomputed>();
      case Kind::own_gpt:
        return make<OwnGpt>();
      case Kind::turns:
        return make<Turns>();
    }
    return nullptr;
  }();
  const bool draws = s.kind == Kind::gpt || s.kind == Kind::lstm;  // dropout
  model->train(!draws);
  const torch::NoGradGuard no_grad;
  double phase = 0.3;
  for (auto& p : model->parameters())
    p.copy_(torch::sin(torch::arange(p.numel()) * 0.7 + (phase += 1.1)).mul(0.2).view(p.sizes()));
  if (s.freezes) {
    for (size_t i = 0; i < model->parameters().size(); i += 3)
      model->parameters()[i].requires_grad_(false);
  }
  return model;
}

// The input of a model in micro-batch `number`, and its expected output.
std::pair<Tensor, Tensor> example(const Setting& s, int rank, int64_t number) {
  const auto values = torch::arange(6 * 3 * 8 * 8) * (7 + 2 * rank) + number * 5;
  const auto words = [&](int64_t salt) {
    return (values.narrow(0, 0, 96) + salt).remainder(32).view({6, 16});
  };
  if (s.kind == Kind::gpt || s.kind == Kind::own_gpt) return {words(0), words(3)};
  auto x = torch::sin(values.to(at::kFloat));
  if (s.kind == Kind::convolution) {
    x = x.view({6, 3, 8, 8});
  } else if (s.kind == Kind::lstm || s.kind == Kind::gru) {
    x = x.narrow(0, 0, 480).view({6, 5, 16});
  } else {
    x = x.narrow(0, 0, 96).view({6, 16});
  }
  return {s.bf16   ? x.to(at::kBFloat16)
          : s.fp16 ? x.to(at::kHalf)
                   : x,
          values.narrow(0, 0, 6).remainder(8)};
}

Tensor loss_of(Learner& model, const Setting& s, comm::Group& group, int64_t number) {
  auto [x, y] = example(s, group.rank(), number);
  if (!group.device().is_cpu()) {
    x = x.pin_memory().to(group.device(), /*non_blocking=*/true);
    y = y.pin_memory().to(group.device(), /*non_blocking=*/true);
  }
  return model.loss(x, y);
}

struct Outcome {
  std::vector<float> losses;
  std::vector<double> norms;
  std::vector<Tensor> weights;
  int64_t host_waits = 0;  // of all ranks, in the steps after the first
  bool operator==(const Outcome& other) const {
    bool same =
        losses == other.losses && norms == other.norms && weights.size() == other.weights.size();
    for (size_t i = 0; same && i < weights.size(); ++i)
      same = at::equal(weights[i], other.weights[i]);
    return same;
  }
};

// Steps [first, last), and whatever `between` does after each of them.
using Between = std::function<void(Engine&, Learner&, int64_t step)>;
Outcome train(const Setting& s, const std::shared_ptr<comm::Group>& group,
              const Between& between = {}) {
  const auto model = make_model(s);
  model->to(group->device());
  Engine engine(*model, s.optimizer, config_of(s), group);
  std::vector<Tensor> losses;
  Outcome outcome;
  const auto host_waits = [&] {  // of all ranks, none of which is in a step
    group->barrier("count");
    const auto now = counts().host_waits;
    group->barrier("counted");
    return now;
  };
  int64_t waits = 0;
  for (int64_t step = 0; step < s.steps; ++step) {
    if (step == 1) waits = host_waits();
    const auto loss = [&](int64_t m) {
      losses.push_back(loss_of(*model, s, *group, step * s.accumulate + m));
      return losses.back();
    };
    if (s.layer_major) {
      engine.accumulate(s.accumulate, [&](const auto& layer_done) {
        for (int64_t m = 0; m < s.accumulate; ++m) {
          const auto of_batch = loss(m);
          of_batch.backward(engine.loss_gradient(of_batch));
        }
        layer_done();
      });
      outcome.norms.push_back(engine.step().grad_norm);
    }
    for (int64_t m = 0; m < s.accumulate && !s.layer_major; ++m) {
      engine.backward(loss(m));
      losses.back() = losses.back().detach();
      const auto parameters = model->parameters();
      const size_t read = s.norms > step ? parameters.size()
                          : s.norms > 0  ? parameters.size() / 2
                                         : 0;
      for (size_t i = 0; i < read; ++i) losses.push_back(parameters[i].detach().norm());
      const auto result = engine.step();
      if (result.boundary) outcome.norms.push_back(result.grad_norm);
    }
    if (between) between(engine, *model, step);
  }
  outcome.host_waits = host_waits() - waits;
  for (const auto& loss : losses) outcome.losses.push_back(loss.to(at::kFloat).item<float>());
  for (const auto& name : engine.parameter_names())
    outcome.weights.push_back(engine.parameter(name).cpu());
  for (const auto& buffer : model->buffers()) outcome.weights.push_back(buffer.cpu());
  return outcome;
}

using RunRanks = std::function<void(int, const std::function<void(std::shared_ptr<comm::Group>)>&)>;
Outcome run(const RunRanks& ranks, const Setting& s, const Between& between = {}) {
  std::vector<Outcome> all(static_cast<size_t>(s.ranks));
  ranks(s.ranks, [&](const auto& group) {
    all[static_cast<size_t>(group->rank())] = train(s, group, between);
  });
  return all[0];
}
Outcome on_cpu(const Setting& s, const Between& between = {}) {
  return run([&](int n, const auto& body) { comm::run_as_hosts(s.hosts, n / s.hosts, body); }, s,
             between);
}
void run_devices_of(const Setting& s,
                    const std::function<void(std::shared_ptr<comm::Group>)>& body) {
  run_on_devices_of_hosts(s.hosts, s.ranks / s.hosts, s.through_host, body);
}
Outcome on_devices(const Setting& s, const Between& between = {}) {
  auto outcome = run([&](int /*n*/, const auto& body) { run_devices_of(s, body); }, s, between);
  synchronize();
  return outcome;
}

// Counts a host's waits in a step whose number does not depend on sizes: one for the norm; with
// states on the host one more before it writes what copies may still read.
std::optional<int64_t> waits_of_step(const Setting& s) {
  if (s.through_host) return std::nullopt;
  if (s.states == Tier::device) return 1;
  if (optim::reach(s.optimizer) != optim::Reach::element) return std::nullopt;
  const bool in_blocks = s.bf16 || (s.stage >= 2 && s.accumulate > 1);
  if (s.states == Tier::disk || in_blocks || s.delayed || s.in_backward) return std::nullopt;
  return 2;
}

void expect_as_on_cpu(const Setting& setting, int seeds, const Between& between = {}) {
  SCOPED_TRACE(describe(setting));
  const auto reference = on_cpu(setting, between);
  for (const Options& options : schedules(seeds)) {
    SCOPED_TRACE(describe(options));
    configure(options);
    const auto outcome = on_devices(setting, between);
    EXPECT_EQ(outcome.losses, reference.losses);
    EXPECT_EQ(outcome.norms, reference.norms);
    EXPECT_TRUE(outcome == reference);
    if (const auto waits = waits_of_step(setting); waits && !between) {
      EXPECT_EQ(outcome.host_waits, *waits * (setting.steps - 1) * setting.ranks);
    }
    EXPECT_EQ(reports(), "");
  }
}

TEST(EngineOnDevices, HasTheCpusBits) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const bool bf16 : {false, true})
        expect_as_on_cpu({.stage = stage, .ranks = ranks, .bf16 = bf16}, 1);
    }
  }
}

// The distance at which units are gathered ahead is chosen from what a step computes, which is the
// same on a device: there autograd has threads of its own.
TEST(EngineOnDevices, ChoosesTheCpusPrefetchDistance) {
  for (const double link : {1e3, 1e5, 1e9}) {
    const Setting setting{.kind = Kind::mlp,
                          .speeds = PrefetchSpeeds{.compute = 1e6, .link = link}};
    const auto schedule_of = [&](const auto& train_with) {
      paging::StepSchedule schedule;
      train_with([&](Engine& engine, Learner&, int64_t step) {
        if (step == 0 && engine.group().rank() == 0) schedule = *engine.schedule();
      });
      return schedule;
    };
    const auto expected = schedule_of([&](const Between& between) { on_cpu(setting, between); });
    configure({});
    const auto schedule =
        schedule_of([&](const Between& between) { on_devices(setting, between); });
    EXPECT_EQ(schedule.flops, expected.flops);
    EXPECT_EQ(schedule.backward, expected.backward);
    EXPECT_EQ(schedule.reductions, expected.reductions);
    EXPECT_EQ(schedule.prefetch_bytes, expected.prefetch_bytes);
    expect_as_on_cpu(setting, 1);
  }
}

TEST(EngineOnDevices, HasTheCpusBitsUnderManySchedules) {
  for (int stage = 0; stage <= 3; ++stage)
    expect_as_on_cpu({.stage = stage, .bf16 = stage % 2 == 1, .kind = Kind::mlp}, 50);
}

TEST(EngineOnDevices, HasTheCpusBitsWithAccumulation) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true})
      expect_as_on_cpu({.stage = stage, .bf16 = bf16, .accumulate = 3}, 1);
  }
}

TEST(EngineOnDevices, HasTheCpusBitsOfOtherModels) {
  for (const auto kind : {Kind::convolution, Kind::lstm, Kind::gru, Kind::recomputed}) {
    for (const int stage : {1, 2, 3})
      expect_as_on_cpu({.stage = stage, .live = 2000, .kind = kind}, 1);
  }
}

TEST(EngineOnDevices, TrainsLibzerosGpt2) {
  configure({});
  std::optional<Outcome> first;
  for (int stage = 0; stage <= 3; ++stage) {
    const Setting setting{.stage = stage, .kind = Kind::own_gpt};
    SCOPED_TRACE(describe(setting));
    const auto outcome = on_devices(setting);
    if (!first) first = outcome;
    EXPECT_TRUE(outcome == *first);
    const auto reference = on_cpu(setting);
    for (size_t i = 0; i < reference.losses.size(); ++i)
      EXPECT_NEAR(outcome.losses[i], reference.losses[i], 1e-5 * reference.losses[i]);
    EXPECT_EQ(reports(), "");
  }
}

TEST(EngineOnDevices, HasTheCpusBitsWithFrozenParameters) {
  for (int stage = 0; stage <= 3; ++stage)
    expect_as_on_cpu({.stage = stage, .bf16 = true, .freezes = true}, 1);
}

TEST(EngineOnDevices, HasTheCpusBitsWithReplicas) {
  for (const int64_t accumulate : {1, 2}) {
    for (int stage = 1; stage <= 3; ++stage)
      expect_as_on_cpu(
          {.stage = stage, .ranks = 4, .bf16 = true, .accumulate = accumulate, .shards = 2}, 1);
  }
}

TEST(EngineOnDevices, HasTheCpusBitsWithStatesOnTheHost) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      expect_as_on_cpu({.stage = stage, .bf16 = bf16, .accumulate = 2, .states = Tier::host}, 1);
      expect_as_on_cpu({.stage = stage, .ranks = 1, .bf16 = bf16, .states = Tier::host}, 1);
    }
  }
}

TEST(EngineOnDevices, HasTheCpusBitsWithStatesOnADisk) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) {
      expect_as_on_cpu({.stage = stage, .bf16 = bf16, .accumulate = 2, .states = Tier::disk}, 1);
      expect_as_on_cpu({.stage = stage, .ranks = 1, .bf16 = bf16, .states = Tier::disk}, 1);
    }
  }
}

// Sums of micro-batches are read back from the disk, and come down before that.
TEST(EngineOnDevices, HasTheCpusBitsWithGradientsOnADisk) {
  for (const bool bf16 : {false, true}) {
    Setting setting{.stage = 2, .bf16 = bf16, .states = Tier::disk};
    setting.gradients_on_disk = true;
    expect_as_on_cpu(setting, 1);
    setting.delayed = true;
    expect_as_on_cpu(setting, 1);
    setting.delayed = false;
    setting.stage = 3;
    setting.accumulate = 3;
    setting.keeps_parameters = bf16;
    expect_as_on_cpu(setting, 1);
    setting.ranks = 1;
    expect_as_on_cpu(setting, 1);
  }
}

TEST(EngineOnDevices, HasTheCpusBitsWithTheOptimizerElsewhereAlone) {
  for (const auto states : {Tier::host, Tier::disk}) {
    for (const bool bf16 : {false, true})
      expect_as_on_cpu({.stage = 3, .bf16 = bf16, .states = states, .keeps_parameters = true}, 1);
  }
}

// Tests of updates that run beside the passes.
TEST(EngineOnDevices, HasTheCpusBitsOfLateUpdates) {
  for (const auto states : {Tier::host, Tier::disk}) {
    for (const int stage : {1, 2, 3}) {
      for (const bool bf16 : {false, true}) {
        expect_as_on_cpu({.stage = stage, .bf16 = bf16, .states = states, .delayed = true}, 1);
        if (stage < 2) continue;
        expect_as_on_cpu(
            {.stage = stage, .bf16 = bf16, .clip = 0, .states = states, .in_backward = true}, 1);
        expect_as_on_cpu({.stage = stage,
                          .bf16 = bf16,
                          .states = states,
                          .keeps_parameters = true,
                          .delayed = true},
                         1);
      }
    }
  }
}

TEST(EngineOnDevices, HasTheCpusBitsOfNarrowStatesOnTheHost) {
  for (const auto states : {Tier::host, Tier::disk}) {
    for (const int stage : {1, 3})
      expect_as_on_cpu({.stage = stage, .bf16 = true, .states = states, .eight_bit = true}, 1);
  }
}

TEST(EngineOnDevices, HasTheCpusBitsOfNarrowStatesAndWeights) {
  for (const int stage : {1, 2, 3}) {
    expect_as_on_cpu({.stage = stage, .bf16 = stage == 2, .eight_bit = true}, 1);
    expect_as_on_cpu({.stage = stage, .bf16 = true, .bf16_states = true, .split = stage == 3}, 1);
    expect_as_on_cpu({.stage = stage,
                      .bf16 = true,
                      .optimizer = Lion{.lr = 1e-3},
                      .eight_bit = stage == 3,
                      .bf16_masters = true},
                     1);
  }
}

TEST(EngineOnDevices, HasTheCpusBitsWithALossScale) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto states : {Tier::device, Tier::host}) {
      expect_as_on_cpu(
          {.stage = stage, .accumulate = 2, .states = states, .fp16 = true, .kind = Kind::mlp}, 1);
    }
  }
}

TEST(EngineOnDevices, HasTheCpusBitsLayerByLayer) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto states : {Tier::device, Tier::host}) {
      expect_as_on_cpu({.stage = stage,
                        .bf16 = true,
                        .accumulate = 3,
                        .states = states,
                        .layer_major = true,
                        .kind = Kind::mlp},
                       1);
    }
  }
}

TEST(EngineOnDevices, HasTheCpusBitsWithEachOptimizer) {
  for (const Optimizer& optimizer :
       {Optimizer(Sgd{.lr = 0.1, .momentum = 0.9}), Optimizer(Sgd{}), Optimizer(Adagrad{}),
        Optimizer(Lion{.lr = 1e-3}), Optimizer(ScheduleFreeAdamW{.lr = 1e-2, .warmup_steps = 2})})
    expect_as_on_cpu({.stage = 2, .bf16 = true, .optimizer = optimizer}, 1);
}

// 14 bytes a parameter with its gradient: the other half of a master weight is the parameter.
TEST(EngineOnDevices, HasTheCpusBitsWithSplitMasterWeights) {
  for (int stage = 0; stage <= 3; ++stage)
    expect_as_on_cpu({.stage = stage, .bf16 = true, .accumulate = 1 + stage % 2, .split = true}, 1);
  expect_as_on_cpu({.stage = 1, .ranks = 3, .bf16 = true, .optimizer = Lion{}, .split = true}, 1);
  expect_as_on_cpu({.bf16 = true, .states = Tier::host, .split = true}, 1);
}

// The device makes both sweeps and the products between them; the host waits for the norm alone.
TEST(EngineOnDevices, HasTheCpusBitsWithMuon) {
  const Optimizer muon = Muon{.lr = 1e-2, .weight_decay = 0.1};
  for (int stage = 0; stage <= 3; ++stage)
    expect_as_on_cpu({.stage = stage, .bf16 = stage % 2 == 0, .optimizer = muon}, 1);
  expect_as_on_cpu({.ranks = 3, .bf16 = true, .accumulate = 2, .optimizer = muon}, 1);
  expect_as_on_cpu({.ranks = 1, .bf16 = true, .optimizer = muon, .split = true}, 1);
}

// The host makes both sweeps, and what the ranks tell each other between them crosses devices.
TEST(EngineOnDevices, HasTheCpusBitsWithOptimizersOfWholeParametersOnTheHost) {
  for (const Optimizer& optimizer :
       {Optimizer(Lamb{.lr = 1e-2}), Optimizer(Muon{.lr = 1e-2}),
        Optimizer(Apollo{.lr = 1e-2, .rank = 4}), Optimizer(Adafactor{.lr = 1e-2})}) {
    Setting setting{.stage = 1, .bf16 = true, .optimizer = optimizer, .states = Tier::host};
    expect_as_on_cpu(setting, 1);
    setting.stage = 3;
    setting.accumulate = 2;
    expect_as_on_cpu(setting, 1);
    setting.accumulate = 1;
    setting.ranks = 3;
    setting.bf16 = false;
    setting.states = Tier::disk;
    expect_as_on_cpu(setting, 1);
    setting.clip = 0;
    setting.states = Tier::host;
    setting.in_backward = true;
    expect_as_on_cpu(setting, 1);
  }
}

TEST(EngineOnDevices, StatesCanBeReadAndWritten) {
  const auto touch = [](Engine& engine, Learner& model, int64_t /*step*/) {
    const auto name = engine.parameter_names()[2];
    engine.set_parameter(name, engine.parameter(name) * 1.5);
    engine.set_optimizer_state(name, "exp_avg", engine.optimizer_state(name, "exp_avg") * 0.5);
    const auto second = model.parameters()[1];
    {
      Gathered scope(engine, {second}, Gathered::Access::write);
      const torch::NoGradGuard no_grad;
      second.mul_(0.5);
    }
    const torch::NoGradGuard no_grad;
    model.parameters()[0].add_(0.25);  // without a scope
  };
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto states : {Tier::device, Tier::host, Tier::disk})
      expect_as_on_cpu({.stage = stage, .bf16 = true, .states = states}, 1, touch);
    expect_as_on_cpu({.stage = stage, .bf16 = true, .split = true}, 1, touch);
  }
}

// A run on devices goes on with what one on the CPU has saved, and the other way round.
TEST(EngineOnDevices, SavesOfTheCpuAreItsOwn) {
  for (int stage = 0; stage <= 3; ++stage) {
    const Setting setting{.stage = stage, .bf16 = true, .split = stage == 2};
    SCOPED_TRACE(describe(setting));
    configure({});
    const TemporaryFolder folder;
    const auto file = [&](const char* name) { return (folder.path() / name).string(); };
    const auto saves = [&](const char* sharded, const char* full) {
      return [=](Engine& engine, Learner& /*model*/, int64_t step) {
        if (step != 1) return;
        engine.save(file(sharded));
        engine.save_full(file(full));
      };
    };
    const auto loads = [&](const char* sharded, const char* full) {
      return [=](Engine& engine, Learner& /*model*/, int64_t step) {
        if (step == 0) engine.load(file(sharded));
        if (step == 1) engine.load_full(file(full));
      };
    };
    const auto reference = on_cpu(setting, saves("cpu", "cpu.safetensors"));
    EXPECT_TRUE(on_devices(setting, saves("device", "device.safetensors")) == reference);
    const auto resumed = on_cpu(setting, loads("cpu", "cpu.safetensors"));
    EXPECT_TRUE(on_cpu(setting, loads("device", "device.safetensors")) == resumed);
    EXPECT_TRUE(on_devices(setting, loads("cpu", "cpu.safetensors")) == resumed);
    EXPECT_EQ(reports(), "");
  }
}

// Devices of that size: what was reserved before would count too.
void with_memory(size_t bytes) {
  Options options;
  options.memory_bytes = bytes;
  configure(options);
  device_allocator().emptyCache();
}

// A model that is left on the CPU goes to the device of the group, a parameter at a time.
// A generator whose loss goes through the discriminator, which is another engine's: autograd brings
// its gradients on a thread of the device's.
TEST(EngineOnDevices, GradientsOfAnotherEnginesPassAreNoneOfThisOnes) {
  const auto weights = [](int stage, bool adversarial) {
    configure({});
    std::vector<at::Tensor> found;
    run_on_devices(2, [&](const auto& group) {
      const auto layer = [&](double phase) {
        auto made = std::make_shared<torch::nn::LinearImpl>(7, 7);
        const torch::NoGradGuard no_grad;
        for (auto& p : made->parameters())
          p.copy_(torch::sin(torch::arange(p.numel()) * 0.7 + (phase += 1)).view(p.sizes()));
        made->to(group->device());
        return made;
      };
      const auto generator = layer(0.1), discriminator = layer(0.2);
      const Config config{.stage = stage};
      Engine of_generator(generator, AdamW{.lr = 1e-2}, config, group);
      Engine engine(discriminator, AdamW{.lr = 1e-2}, config, group);
      const auto input = torch::sin(torch::arange(21) + group->rank()).view({3, 7});
      for (int64_t step = 0; step < 3; ++step) {
        const auto x = input.to(group->device());
        engine.backward(discriminator->forward(x).square().mean());
        engine.step();
        if (!adversarial) continue;
        of_generator.backward(discriminator->forward(generator->forward(x)).square().mean());
        of_generator.step();
        EXPECT_EQ(of_generator.steps(), step + 1);
      }
      for (const auto& name : engine.parameter_names()) {
        const auto whole = engine.parameter(name).cpu();
        if (group->rank() == 0) found.push_back(whole);
      }
    });
    synchronize();
    EXPECT_EQ(reports(), "");
    return found;
  };
  for (const int stage : {0, 1, 2, 3}) {
    const auto alone = weights(stage, false), adversarial = weights(stage, true);
    ASSERT_EQ(alone.size(), 2);
    for (size_t i = 0; i < alone.size(); ++i)
      EXPECT_TRUE(at::equal(alone[i], adversarial[i])) << "stage " << stage << ", " << i;
  }
}

TEST(EngineOnDevices, TakesAModelOverFromTheCpu) {
  for (const int stage : {0, 2, 3}) {
    for (const auto kind : {Kind::gpt, Kind::convolution}) {
      const Setting setting{.stage = stage, .bf16 = true, .kind = kind};
      SCOPED_TRACE(describe(setting));
      configure({});
      const auto reference = on_devices(setting);
      run_on_devices(setting.ranks, [&](const auto& group) {
        const auto model = make_model(setting);
        Engine engine(*model, setting.optimizer, config_of(setting), group);
        for (const auto& p : model->parameters()) EXPECT_EQ(p.device(), group->device());
        for (const auto& b : model->buffers()) EXPECT_EQ(b.device(), group->device());
        std::vector<float> losses;
        for (int64_t step = 0; step < setting.steps; ++step) {
          const auto loss = loss_of(*model, setting, *group, step);
          engine.backward(loss);
          engine.step();
          losses.push_back(loss.template item<float>());
        }
        if (group->rank() == 0) {
          EXPECT_EQ(losses, reference.losses);
        }
      });
      synchronize();
      EXPECT_EQ(reports(), "");
    }
  }
}

TEST(EngineOnDevices, AModelNeedNotFitOnTheDeviceWhole) {
  const Setting setting{.stage = 3, .ranks = 4, .states = Tier::host};
  const auto model_bytes = [&] {
    int64_t bytes = 0;
    for (const auto& p : make_model(setting)->parameters()) bytes += p.numel() * 4;
    return bytes;
  }();
  with_memory(static_cast<size_t>(model_bytes) * 3 / 4);
  run_on_devices(setting.ranks, [&](const auto& group) {
    const auto model = make_model(setting);
    const Engine engine(*model, setting.optimizer, config_of(setting), group);
    EXPECT_LT(device_memory(group->device()).tensors.current, model_bytes / 2);
  });
  synchronize();
  configure({});
}

TEST(EngineOnDevices, RefusesWhatItCannotDo) {
  configure({});
  EXPECT_TRUE(optim::has_kernels(c10::kPrivateUse1));
  EXPECT_FALSE(optim::has_kernels(c10::kXPU));
  nn::Module nowhere;
  nowhere.register_parameter("weight", torch::empty({4}, c10::kMeta));
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(nowhere, AdamW{}); }),
              HasSubstr("'weight' is on the device meta"));
  const auto refusal = [](Config config, const Optimizer& optimizer = AdamW{}) {
    const auto model = make<Mlp>();
    model->to(device());
    return message_of<ConfigError>([&] { Engine engine(*model, optimizer, config); });
  };
  Config config;
  config.stage = 2;
  config.gradient_clipping = 0;
  config.update_in_backward = true;
  EXPECT_THAT(refusal(config), HasSubstr("update_in_backward for a model on simulated:0 needs all "
                                         "of the optimizer's states on the host or on a disk"));
  EXPECT_THAT(refusal({}, Lamb{}), HasSubstr("Lamb for a model on simulated:0 needs all of the "
                                             "optimizer's states on the host or on a disk"));
  EXPECT_THAT(refusal({}, Apollo{}), HasSubstr("Apollo for a model on simulated:0 needs all"));
  config = {};
  config.offload_optimizer.device = OffloadDevice::cpu;
  config.offload_optimizer.ratio = 0.5;
  EXPECT_THAT(refusal(config, Muon{}), HasSubstr("Muon for a model on simulated:0 needs all"));
  const auto parts = std::make_shared<Mlp>();
  parts->layers->ptr(0)->to(device());
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(*parts, AdamW{}); }),
              HasSubstr("is on cpu, but 'layers.0.weight' is on simulated:0"));
  comm::run_as_threads(2, [&](auto group) {
    const auto model = make<Mlp>();
    model->to(device(group->rank()));
    EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(*model, AdamW{}, Config{}, group); }),
                HasSubstr("the group of 2 ranks carries tensors of cpu"));
  });
}

TEST(EngineOnDevices, MemoryOfTheStatesIsTheFormulaByTheLedger) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto states : {Tier::device, Tier::host, Tier::disk}) {
      const Setting setting{.stage = stage, .bf16 = true, .live = 20000, .states = states};
      SCOPED_TRACE(describe(setting));
      configure({});
      run_on_devices(setting.ranks, [&](const auto& group) {
        const auto model = make_model(setting);
        model->to(group->device());
        Engine engine(*model, setting.optimizer, config_of(setting), group);
        // The third step follows a plan.
        DeviceTraffic before;
        for (int64_t step = 0; step < 3; ++step) {
          if (step == 2) {
            before = engine.host_traffic();
            group->traffic().reset();
          }
          engine.backward(loss_of(*model, setting, *group, step));
          engine.step();
        }
        const auto& ledger = *group->ledger();
        const auto on_device = engine.memory_formula();
        const auto on_host = engine.host_memory_formula();
        EXPECT_EQ(ledger.usage(Category::parameters).peak, on_device.parameters);
        EXPECT_EQ(ledger.usage(Category::gradients).peak, on_device.gradients);
        EXPECT_EQ(ledger.usage(Category::optimizer).peak, on_device.optimizer);
        EXPECT_EQ(ledger.usage(Category::host_parameters).peak, on_host.parameters);
        EXPECT_EQ(ledger.usage(Category::host_gradients).peak, on_host.gradients);
        EXPECT_EQ(ledger.usage(Category::host_optimizer).peak, on_host.optimizer);
        const auto formula = engine.traffic_formula();
        EXPECT_EQ(engine.host_traffic().down - before.down, formula.host_down);
        // The formula has two gathers of a unit, as if each were released after forward. The plan
        // has other numbers, and each brings a slice up, as long as the one that is sent.
        const int64_t sent = group->traffic().count(comm::Collective::all_gather).logical_bytes;
        const bool slices_come_up = stage == 3 && states != Tier::device;
        EXPECT_EQ(engine.host_traffic().up - before.up,
                  formula.host_up +
                      (slices_come_up ? (sent - formula.all_gather) / (setting.ranks - 1) : 0));
      });
    }
  }
}

// Later passes of bf16 gradients are added up in fp32, and devices' backends send one dtype.
TEST(EngineOnDevices, BytesOfTheSumsAreTheFormulas) {
  for (const int64_t shards : {0, 2}) {
    for (int stage = 0; stage <= 3; ++stage) {
      if (shards > 0 && stage == 0) continue;
      const Setting setting{.stage = stage,
                            .ranks = shards > 0 ? 4 : 2,
                            .bf16 = true,
                            .accumulate = 3,
                            .live = 20000,
                            .shards = shards};
      SCOPED_TRACE(describe(setting) + (shards > 0 ? ", in two replicas" : ""));
      configure({});
      run_on_devices(setting.ranks, [&](const auto& group) {
        const auto model = make_model(setting);
        model->to(group->device());
        Engine engine(*model, setting.optimizer, config_of(setting), group);
        for (int64_t step = 0; step < 2; ++step) {
          group->traffic().reset();
          for (int64_t batch = 0; batch < setting.accumulate; ++batch) {
            engine.backward(loss_of(*model, setting, *group, step));
            engine.step();
          }
        }
        const auto formula = engine.traffic_formula();
        const auto sent = [&](comm::Collective collective) {
          return group->traffic().count(collective).logical_bytes;
        };
        EXPECT_EQ(sent(comm::Collective::reduce_scatter), formula.reduce_scatter);
        EXPECT_EQ(sent(comm::Collective::all_reduce), formula.all_reduce);
      });
    }
  }
}

// The host's memory carries the tensors, as it does for the CPU.
TEST(EngineOnDevices, HasTheCpusBitsBetweenHosts) {
  const auto check = [](Setting setting) {
    setting.hosts = 2;
    setting.through_host = true;
    setting.live = 2000;
    setting.kind = Kind::mlp;
    setting.unit_bytes = 2500;
    expect_as_on_cpu(setting, 1);
  };
  for (const bool bf16 : {false, true}) {
    check({.stage = 2, .bf16 = bf16, .packed = true});
    check({.bf16 = bf16, .accumulate = 2, .quantised = true});
    for (const bool quantised : {false, true})
      check({.ranks = 4, .bf16 = bf16, .accumulate = 2, .kept = true, .quantised = quantised});
  }
  check({.ranks = 4,
         .bf16 = true,
         .states = Tier::host,
         .keeps_parameters = true,
         .kept = true,
         .quantised = true});
  check({.ranks = 4, .freezes = true, .kept = true, .packed = true});
}

// A backend of devices adds in the order of one host's ranks.
TEST(EngineOnDevices, HasTheBitsOfOneHostWhereHostsKeepParameters) {
  for (const bool bf16 : {false, true}) {
    Setting setting{.ranks = 4,
                    .bf16 = bf16,
                    .accumulate = 2,
                    .live = 1200,
                    .kind = Kind::mlp,
                    .unit_bytes = 2500};
    const auto reference = on_cpu(setting);
    setting.hosts = 2;
    setting.kept = true;
    for (const Options& options : schedules(2)) {
      SCOPED_TRACE(describe(setting) + ", " + describe(options));
      configure(options);
      const auto outcome = on_devices(setting);
      EXPECT_TRUE(outcome == reference);
      EXPECT_EQ(outcome.host_waits, (setting.steps - 1) * setting.ranks);
      EXPECT_EQ(reports(), "");
    }
  }
  configure({});
  Setting rounded{.ranks = 4, .hosts = 2, .quantised = true};
  EXPECT_THAT(
      message_of<ConfigError>([&] { (void)on_devices(rounded); }),
      AllOf(HasSubstr("zero_quantized_weights between 2 hosts"), HasSubstr("--through-host")));
  rounded.quantised = false;
  rounded.packed = true;
  EXPECT_THAT(message_of<ConfigError>([&] { (void)on_devices(rounded); }),
              HasSubstr("zero_packed_exponents between 2 hosts"));
}

// Four weights, a unit each, which one operator in each direction reads.
TEST(EngineOnDevices, BytesBetweenHostsAreTheFormulas) {
  configure({});
  for (const bool bf16 : {false, true}) {
    for (const bool kept : {false, true}) {
      for (const bool quantised : {false, true}) {
        const Setting setting{.ranks = 4,
                              .bf16 = bf16,
                              .accumulate = 2,
                              .live = 0,
                              .unit_bytes = 64 * 64 * (bf16 ? 2 : 4),
                              .hosts = 2,
                              .through_host = true,
                              .kept = kept,
                              .quantised = quantised};
        SCOPED_TRACE(describe(setting));
        run_devices_of(setting, [&](const auto& group) {
          const auto chain = std::make_shared<Chain>();
          chain->to(group->device());
          std::optional<Engine> engine(std::in_place, *chain, setting.optimizer, config_of(setting),
                                       group);
          const auto x = torch::ones({2, 64}, bf16 ? at::kBFloat16 : at::kFloat)
                             .to(group->device())
                             .requires_grad_();
          for (int64_t batch = 0; batch < setting.accumulate; ++batch) {
            engine->backward(chain->forward(x).mean());
            engine->step();
          }
          const auto& ledger = *group->ledger();
          const auto memory = engine->memory_formula();
          EXPECT_EQ(ledger.usage(Category::parameters).peak, memory.parameters);
          EXPECT_EQ(ledger.usage(Category::gradients).peak, memory.gradients);
          EXPECT_EQ(ledger.usage(Category::host_gradients).peak,
                    engine->host_memory_formula().gradients);
          // A device has the fourth part of each unit, or the half that its host keeps with
          // another.
          const int64_t whole = engine->layout().numel() * (bf16 ? 2 : 4);
          EXPECT_EQ(memory.parameters, !kept       ? whole / 4
                                       : quantised ? whole / 2 + whole / 4
                                                   : whole / 2);
          const auto formula = engine->traffic_formula();
          engine.reset();  // what it has published has arrived
          // Parameters that are kept cross once before the first step, too.
          const auto gathers = group->traffic().count(comm::Collective::all_gather);
          EXPECT_EQ(gathers.link_bytes, formula.all_gather_link * (kept ? 2 : 1));
          EXPECT_EQ(gathers.logical_bytes, formula.all_gather + (kept ? whole / 4 : 0));
          const auto sums = group->traffic().count(comm::Collective::reduce_scatter);
          EXPECT_EQ(sums.link_bytes, formula.reduce_scatter_link);
          EXPECT_EQ(sums.logical_bytes, formula.reduce_scatter);
        });
        synchronize();
      }
    }
  }
}

std::string refusal_in_training(const Setting& setting, size_t memory_bytes) {
  with_memory(memory_bytes);
  std::string refusal;
  run_on_devices(1, [&](const auto& group) {
    const auto model = make_model(setting);
    model->to(group->device());
    std::optional<Engine> engine;
    const auto train = [&] {
      engine.emplace(*model, setting.optimizer, config_of(setting), group);
      for (int64_t step = 0; step < 2; ++step) {
        try {
          engine->backward(loss_of(*model, setting, *group, step));
        } catch (const c10::OutOfMemoryError& error) {
          throw engine->explained(error);
        }
        engine->step();
      }
    };
    refusal = message_of<OutOfMemory>(train);
  });
  synchronize();
  configure({});
  return refusal;
}

TEST(EngineOnDevices, ADeviceThatIsFullIsExplained) {
  const Setting setting{.stage = 0, .ranks = 1};
  // States of fp32 and AdamW: 16 bytes a parameter, of 28 thousand.
  EXPECT_THAT(
      refusal_in_training(setting, 400'000),
      AllOf(HasSubstr("The device has 390.6 KiB, but the states of the model that stay there "
                      "take"),
            HasSubstr("The next cheaper choice: offload_optimizer.device \"cpu\"")));
  const auto in_forward = refusal_in_training(setting, 455'000);
  EXPECT_THAT(in_forward,
              AllOf(HasSubstr("The device has no room for "), HasSubstr("of its 444.3 KiB"),
                    HasSubstr("parameters "), HasSubstr("optimizer "),
                    HasSubstr("The next cheaper choice: offload_optimizer.device \"cpu\"")));
  EXPECT_EQ(in_forward.find("device_memory"), std::string::npos) << in_forward;
}

TEST(EngineOnDevices, WhatADeviceHasLeftIsForGatheredUnits) {
  const Setting setting{.stage = 3, .ranks = 2, .live = 1'000'000};
  const auto held = [&](size_t memory_bytes) {
    with_memory(memory_bytes);
    int64_t gathered = 0;
    run_on_devices(setting.ranks, [&](const auto& group) {
      const auto model = make_model(setting);
      model->to(group->device());
      Engine engine(*model, setting.optimizer, config_of(setting), group);
      for (int64_t step = 0; step < 4; ++step) {
        engine.backward(loss_of(*model, setting, *group, step));
        engine.step();
        if (step == 1) group->ledger()->reset_peaks();
      }
      if (group->rank() == 0) {
        gathered = group->ledger()->usage(Category::gathered_units).peak;
        const auto memory = device_memory(group->device());
        EXPECT_GE(memory.tensors.current, group->ledger()->own_memory());
        EXPECT_LE(memory.tensors.peak, memory.total);
      }
    });
    synchronize();
    configure({});
    return gathered;
  };
  const auto plenty = held(size_t{1} << 30);
  const auto scarce = held(750'000);
  EXPECT_LT(scarce, plenty);
  EXPECT_GT(scarce, 0);
}

// The bytes that a rank holds on its device in a step after the second, and the refusal, if there
// is one.
struct Held {
  int64_t bytes = 0;
  int64_t gathered = 0;
  std::string refusal;
};
Held held_with_budget(const Setting& setting, int64_t budget) {
  configure({});
  Held held;
  run_on_devices(setting.ranks, [&](const auto& group) {
    const auto model = make_model(setting);
    model->to(group->device());
    auto config = config_of(setting);
    config.memory_budget = budget;
    const auto refusal = message_of<OutOfMemory>([&] {
      Engine engine(*model, setting.optimizer, config, group);
      for (int64_t step = 0; step < 4; ++step) {
        engine.backward(loss_of(*model, setting, *group, step));
        engine.step();
        if (step != 1) continue;
        group->ledger()->reset_peaks();
        reset_peak_memory(group->device());
      }
      if (group->rank() != 0) return;
      held.bytes = device_memory(group->device()).tensors.peak;
      held.gathered = group->ledger()->usage(Category::gathered_units).peak;
    });
    if (group->rank() == 0) held.refusal = refusal;
  });
  synchronize();
  return held;
}

// message_of says so.
constexpr const char* kNothing = "nothing was thrown";

TEST(EngineOnDevices, ABudgetBoundsWhatTheDeviceHolds) {
  const Setting setting{.stage = 3, .live = 1'000'000};
  const auto free = held_with_budget(setting, 0);
  ASSERT_EQ(free.refusal, kNothing);
  const int64_t budget = free.bytes - free.gathered / 2;
  const auto bound = held_with_budget(setting, budget);
  ASSERT_EQ(bound.refusal, kNothing);
  // The allocator rounds what it gives out, and a later step may take a little more than the first.
  EXPECT_LE(bound.bytes, budget + budget / 100);
  EXPECT_LT(bound.gathered, free.gathered);
  EXPECT_THAT(held_with_budget(setting, free.bytes - free.gathered * 5 / 4).refusal,
              AllOf(HasSubstr("The memory budget is "), HasSubstr("the first step took "),
                    HasSubstr("of its device")));
  EXPECT_THAT(held_with_budget(setting, 1000).refusal,
              HasSubstr("but the states of the model alone take"));
  // States on the host do not count.
  auto on_host = setting;
  on_host.states = Tier::host;
  EXPECT_EQ(held_with_budget(on_host, free.bytes - free.gathered / 2).refusal, kNothing);
}

// The engine goes while the device still works on what it has: a gradient of each rank.
std::vector<Tensor> gradients_left(const RunRanks& ranks, const Setting& s) {
  std::vector<Tensor> all(static_cast<size_t>(s.ranks));
  ranks(s.ranks, [&](const auto& group) {
    const auto model = make_model(s);
    model->to(group->device());
    Tensor gradient;
    {
      Engine engine(*model, s.optimizer, config_of(s), group);
      engine.backward(loss_of(*model, s, *group, 0));
      gradient = engine.gradient(engine.parameter_names().front());
    }
    all[static_cast<size_t>(group->rank())] = gradient.cpu();
  });
  return all;
}

// Each place where libzero lets a stream wait is needed in some schedule; others imply it in many.
// The name has it run with those that are long.
TEST(EngineOnDevices, NoPlaceWaitsInVainLeftOut) {
  WaitPlaces places;
  const auto look_at = [&](const std::string& what, const Setting& setting) {
    const auto reference = on_cpu(setting);
    places.look_at(what + ", " + describe(setting),
                   [&] { return on_devices(setting) == reference; });
  };
  for (const int stage : {0, 1, 2, 3}) {
    const Setting plain{.stage = stage, .live = 600, .kind = Kind::mlp, .steps = 2};
    look_at("one unit", plain);
    auto units = plain;
    units.accumulate = 3;
    units.live = 1200;
    units.unit_bytes = 2500;
    look_at("units of several sizes", units);
    if (stage > 1) {
      units.bf16 = true;
      units.states = Tier::host;
      look_at("states on the host", units);
    }
  }
  // Units become ready in another order than that in which they are reduced: more buckets wait, and
  // the new ones get memory that sums had.
  look_at("another order in each step",
          {.stage = 2, .bf16 = true, .accumulate = 2, .kind = Kind::turns, .unit_bytes = 2048});
  // A unit that was gathered ahead for a read after backward is not read this time, and updated.
  for (const int64_t live : {1100, 1300, 1500, 1800}) {
    look_at("reads that do not come again, " + std::to_string(live),
            {.live = live, .kind = Kind::mlp, .unit_bytes = 2500, .norms = 2});
  }
  for (const int stage : {1, 2}) {
    look_at("replicas", {.stage = stage,
                         .ranks = 4,
                         .bf16 = true,
                         .accumulate = 2,
                         .kind = Kind::mlp,
                         .shards = 2,
                         .steps = 2,
                         .unit_bytes = 2500});
  }
  look_at("statistics", {.stage = 1, .kind = Kind::convolution, .steps = 2});
  const Setting left{.stage = 2, .kind = Kind::mlp, .unit_bytes = 2500};
  const auto gradients =
      gradients_left([](int n, const auto& body) { comm::run_as_threads(n, body); }, left);
  places.look_at("the engine goes after backward", [&] {
    const auto all = gradients_left(&run_on_devices, left);
    synchronize();
    return std::equal(all.begin(), all.end(), gradients.begin(), gradients.end(),
                      [](const Tensor& a, const Tensor& b) { return at::equal(a, b); });
  });
  for (const auto& [name, place] : places.all()) {
    std::cout << name << ": " << place.waits << " waits, " << place.left_out
              << " left out, needed in: " << place.needed_in << "\n";
    // A backend begins every collective after what the caller's stream has, as NCCL does.
    if (name.find(" by zero::comm::Group::") != std::string::npos) continue;
    EXPECT_NE(place.needed_in, "") << name << " lets a stream wait in vain";
  }
}

// No result is wrong without a report.
TEST(EngineOnDevices, EachWaitThatIsLeftOutIsNoticed) {
  for (const int stage : {0, 1, 2, 3}) {
    const Setting setting{.stage = stage, .live = 600, .kind = Kind::mlp, .steps = 2};
    SCOPED_TRACE(describe(setting));
    const auto reference = on_cpu(setting);
    const auto left_out = leave_out_each_wait([&] { return on_devices(setting) == reference; }, 4);
    EXPECT_EQ(left_out.wrong_silent, 0) << left_out.missed.front();
    std::cout << describe(setting) << ": " << left_out.waits << " waits, "
              << left_out.wrong_reported << " wrong, " << left_out.right_reported
              << " right by luck, " << left_out.right_silent << " implied by others\n";
    for (const auto& wait : left_out.implied) std::cout << "  " << wait << "\n";
  }
}

// The detector does not see what the host does with pinned memory; the results show it.
TEST(EngineOnDevices, WaitsOfTheHostAreNeeded) {
  for (const Setting& setting :
       {Setting{.stage = 2, .accumulate = 2, .states = Tier::host, .kind = Kind::mlp, .steps = 2},
        Setting{.stage = 3, .live = 600, .states = Tier::host, .kind = Kind::mlp, .steps = 2},
        Setting{.stage = 3, .live = 600, .states = Tier::disk, .kind = Kind::mlp, .steps = 2},
        Setting{
            .stage = 2, .states = Tier::host, .delayed = true, .kind = Kind::mlp, .steps = 3}}) {
    SCOPED_TRACE(describe(setting));
    const auto reference = on_cpu(setting);
    const auto left_out =
        leave_out_each_host_wait([&] { return on_devices(setting) == reference; }, 4);
    EXPECT_GT(left_out.wrong_reported + left_out.wrong_silent, 0);
    std::cout << describe(setting) << ": " << left_out.waits << " waits of hosts, "
              << left_out.wrong_reported + left_out.wrong_silent << " wrong without, "
              << left_out.right_reported << " reported, " << left_out.right_silent
              << " implied by others\n";
  }
}

}  // namespace
}  // namespace zero::simulated
