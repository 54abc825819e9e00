// A traced step against the same step as it runs: bytes, the memory of each rank by category, and
// FLOPs.
#include "zero/planner/trace.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "tests/support/message_of.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/comm/group.h"
#include "zero/engine/costs.h"
#include "zero/engine/engine.h"
#include "zero/engine/flops_profiler.h"
#include "zero/engine/plan_units.h"
#include "zero/models/architectures.h"
#include "zero/planner/memory.h"
#include "zero/planner/planner.h"

namespace zero::plan {
namespace {

namespace nn = torch::nn;

constexpr auto kGpt2 =
    R"({"model_type": "gpt2", "n_layer": 6, "n_head": 4, "n_embd": 256, "n_positions": 256,
        "vocab_size": 8000, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0})";
constexpr auto kDrops =
    R"({"model_type": "gpt2", "n_layer": 3, "n_head": 3, "n_embd": 96, "n_positions": 256,
        "vocab_size": 257})";  // each of its three dropouts is 0.1
constexpr auto kLlama =
    R"({"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4000,
        "max_position_embeddings": 256})";

int64_t kept_bytes(const Trace& trace) {
  int64_t sum = 0;
  for (const auto& each : trace.kept) sum += each.bytes;
  return sum;
}

// Convolutions, batch norm and pooling.
struct Net : nn::Module {
  Net() {
    int64_t in = 3;
    for (const int64_t out : {32, 64, 128}) {
      layers->push_back(nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)));
      layers->push_back(nn::BatchNorm2d(out));
      layers->push_back(nn::ReLU());
      layers->push_back(nn::MaxPool2d(2));
      in = out;
    }
    register_module("layers", layers);
    register_module("last", last);
  }
  at::Tensor loss(const at::Tensor& images, const at::Tensor& classes) {
    auto x = images.to(last->weight.scalar_type());
    x = layers->forward(x).mean({2, 3});
    return nn::functional::cross_entropy(last(x), classes);
  }
  nn::Sequential layers;
  nn::Linear last = nn::Linear(128, 10);
};

at::Tensor images() { return at::zeros({16, 3, 64, 64}); }
at::Tensor classes() { return at::zeros({16}, at::kLong); }

struct Setting {
  const char* name;
  const char* json;  // null: Net
  int stage = 0;
  bool bf16 = false;
  int64_t batch = 2;
  int64_t accumulation = 1;
  int64_t recompute = 0;
  Updates updates = Updates::in_step;
  OffloadDevice states = OffloadDevice::none;
  bool autocast = false;  // to bf16
  bool muon = false;
  Optimizer optimizer() const { return muon ? Optimizer(Muon{}) : Optimizer(AdamW{}); }
};

constexpr int64_t kSequence = 256;

Config config_of(const Setting& s) {
  Config config;
  config.stage = s.stage;
  config.bf16 = s.bf16;
  config.optimizer = s.optimizer();
  config.autocast.enabled = s.autocast;
  config.gradient_accumulation_steps = s.accumulation;
  config.unit_bytes = 1 << 20;
  config.update_in_backward = s.updates == Updates::in_backward;
  if (config.update_in_backward) config.gradient_clipping = 0;
  config.offload_optimizer.delayed_update_after = s.updates == Updates::delayed ? 1 : 0;
  config.offload_optimizer.device = s.states;
  config.offload_optimizer.nvme_path = std::filesystem::temp_directory_path();
  return config;
}

// The memory that a rank held in its third step.
struct Held {
  std::array<int64_t, kCategories> peaks{};
  int64_t states = 0;  // the most of all that the ledger counts at once
};

Held run(const Setting& s, const std::shared_ptr<comm::Group>& group) {
  at::manual_seed(1);
  std::unique_ptr<LanguageModel> language;
  std::shared_ptr<Net> net;
  if (s.json != nullptr) {
    language = language_model_config_from_json(s.json, "test")->build();
    language->recompute({.every = s.recompute});
  } else {
    net = std::make_shared<Net>();
  }
  auto& module = language ? language->module() : *net;
  Engine engine(module, s.optimizer(), config_of(s), group);
  const auto tokens = at::zeros({s.batch, kSequence}, at::kLong);
  const auto pictures = images();
  const auto labels = classes();
  for (int step = 0; step < 3; ++step) {
    if (step == 2) {
      group->barrier("measured step");
      group->ledger()->reset_peaks();
      HostAllocator::instance().reset_peaks();
    }
    const int64_t before = HostAllocator::instance().used();
    for (int64_t i = 0; i < s.accumulation; ++i) {
      engine.backward([&] {
        const Autocast casts(engine.config().autocast_dtype());
        return language ? language->loss(tokens, tokens) : net->loss(pictures, labels);
      }());
      engine.step();
    }
    if (step < 2) continue;
    Held held;
    for (size_t c = 0; c < kCategories; ++c)
      held.peaks[c] = group->ledger()->usage(static_cast<Category>(c)).peak;
    held.peaks[static_cast<size_t>(Category::activations)] =
        HostAllocator::instance().usage().used.peak - before;
    held.states = group->ledger()->total().peak;
    return held;
  }
  return {};
}

// The step on `ranks` processes; what rank 0 held. A test's own process computes nothing before, so
// it has no threads that a child would lack.
Held run_ranks(const Setting& s, int ranks) {
  const TemporaryFolder folder;
  std::array<int, 2> pipe{};
  EXPECT_EQ(::pipe(pipe.data()), 0);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    int status = 1;
    try {
      install_host_allocator();
      at::set_num_threads(1);
      const auto group =
          ranks == 1 ? comm::single()
                     : comm::shared_memory_group(c10::make_intrusive<c10d::FileStore>(
                                                     (folder.path() / "store").string(), ranks),
                                                 rank, ranks);
      const auto held = run(s, group);
      status = rank == 0 && write(pipe[1], &held, sizeof held) != sizeof held ? 1 : 0;
    } catch (const std::exception& error) {
      fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    _exit(status);
  }
  close(pipe[1]);
  Held held;
  EXPECT_EQ(read(pipe[0], &held, sizeof held), static_cast<ssize_t>(sizeof held)) << s.name;
  close(pipe[0]);
  for (const auto child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0) << s.name;
  }
  return held;
}

Trace traced(const Setting& s) {
  auto options = trace_options(config_of(s), /*host=*/true);
  if (s.json != nullptr) {
    return trace(*language_model_config_from_json(s.json, "test"), s.batch, kSequence, s.recompute,
                 options);
  }
  // Made before, as those of the real step.
  return trace(
      [] { return std::make_shared<Net>(); },
      [pictures = images(), labels = classes()](Net& net) { return net.loss(pictures, labels); },
      options);
}

RankMemory predicted(const Setting& s, int ranks) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto memory = predict_memory(traced(s), config_of(s), {.ranks_a_host = ranks});
  at::set_num_threads(threads);
  return memory;
}

// Fp32 and bf16, all stages, micro-batches and recomputation, each for real on two ranks. States
// agree to the byte; the most that a rank holds, states and activations, nearly so.
TEST(Trace, PredictsTheMemoryOfARank) {
  constexpr auto kInBackward = Updates::in_backward, kDelayed = Updates::delayed;
  constexpr auto kHost = OffloadDevice::cpu, kDisk = OffloadDevice::nvme;
  const auto beside = [](Setting s, Updates updates, OffloadDevice states = OffloadDevice::none) {
    s.updates = updates;
    s.states = states;
    return s;
  };
  const auto cast = [](Setting s) {
    s.autocast = true;
    return s;
  };
  const auto by_muon = [](Setting s) {
    s.muon = true;
    return s;
  };
  const std::array settings{
      Setting{"GPT-2, stage 0", kGpt2},
      Setting{"GPT-2, stage 1, bf16", kGpt2, 1, true},
      Setting{"GPT-2, stage 2, bf16", kGpt2, 2, true},
      Setting{"GPT-2, stage 3, bf16, batch 4", kGpt2, 3, true, 4},
      Setting{"GPT-2, stage 2, two micro-batches", kGpt2, 2, true, 2, 2},
      Setting{"GPT-2, stage 1, bf16, two micro-batches", kGpt2, 1, true, 2, 2},
      Setting{"GPT-2, stage 2, dropout, three micro-batches", kDrops, 2, false, 2, 3},
      Setting{"GPT-2, stage 3, recomputed, batch 8", kGpt2, 3, false, 8, 1, 1},
      Setting{"Llama, stage 0, bf16", kLlama, 0, true},
      Setting{"Llama, stage 2", kLlama, 2},
      Setting{"Llama, stage 3, recomputed, batch 4", kLlama, 3, false, 4, 1, 1},
      Setting{"convolutions, stage 0", nullptr, 0},
      Setting{"convolutions, stage 3", nullptr, 3},
      cast({"GPT-2, stage 0, autocast", kGpt2, 0}),
      cast({"GPT-2, stage 3, autocast", kGpt2, 3}),
      cast({"Llama, stage 2, recomputed, autocast", kLlama, 2, false, 4, 2, 1}),
      cast({"convolutions, stage 1, autocast", nullptr, 1}),
      by_muon({"Llama, stage 0, bf16, Muon", kLlama, 0, true}),
      by_muon({"Llama, stage 2, Muon", kLlama, 2}),
      beside({"GPT-2, stage 2, in backward", kGpt2, 2}, kInBackward),
      beside({"GPT-2, stage 3, bf16, in backward", kGpt2, 3, true}, kInBackward),
      beside({"GPT-2, stage 2, in backward, on disk", kGpt2, 2}, kInBackward, kDisk),
      beside({"GPT-2, stage 0, bf16, delayed", kGpt2, 0, true}, kDelayed),
      beside({"GPT-2, stage 1, delayed", kGpt2, 1}, kDelayed),
      beside({"GPT-2, stage 3, bf16, two delayed", kGpt2, 3, true, 2, 2}, kDelayed),
      beside({"Llama, stage 2, host", kLlama, 2}, Updates::in_step, kHost),
      beside({"Llama, stage 2, bf16, delayed, host", kLlama, 2, true}, kDelayed, kHost),
      beside({"Llama, stage 2, delayed, on disk", kLlama, 2}, kDelayed, kDisk)};
  std::vector<double> errors;
  for (const auto& s : settings) {
    constexpr int kRanks = 2;
    const auto real = run_ranks(s, kRanks);
    const auto memory = predicted(s, kRanks);
    const auto of = [&](Category c) { return real.peaks[static_cast<size_t>(c)]; };
    // An update in backward may need fewer of the disk's buffers than it may have.
    const bool at_most = s.updates == kInBackward && s.states == kDisk;
    EXPECT_GE(memory.of(Category::offload_buffers), of(Category::offload_buffers)) << s.name;
    for (const auto c :
         {Category::parameters, Category::gradients, Category::optimizer, Category::offload_buffers,
          Category::host_parameters, Category::host_gradients, Category::host_optimizer,
          Category::host_buffers}) {
      if (at_most && c == Category::offload_buffers) continue;
      EXPECT_EQ(memory.of(c), of(c)) << s.name << ": " << name(c);
    }
    const auto all = [&](auto&& value) {
      double sum = 0;
      for (size_t c = 0; c < kCategories; ++c) sum += static_cast<double>(value(c));
      return sum;
    };
    const double held = all([&](size_t c) { return real.peaks[c]; });
    const double said = all([&](size_t c) { return memory.peaks[c]; });
    errors.push_back(std::abs(said / held - 1));
    printf(
        "%-42s held %12.0f predicted %12.0f (%+.2f %%); activations %11lld %11lld; buckets "
        "%9lld %9lld; communication %9lld %9lld\n",
        s.name, held, said, 100 * (said / held - 1),
        static_cast<long long>(of(Category::activations)),
        static_cast<long long>(memory.of(Category::activations)),
        static_cast<long long>(of(Category::gradient_buckets)),
        static_cast<long long>(memory.of(Category::gradient_buckets)),
        static_cast<long long>(of(Category::communication)),
        static_cast<long long>(memory.of(Category::communication)));
    EXPECT_LT(errors.back(), at_most ? 0.08 : 0.01) << s.name;
  }
  std::ranges::sort(errors);
  EXPECT_LT(errors[errors.size() / 2], 0.003);
}

// The bytes that forward keeps are those of one layer times the layers, and name their modules.
TEST(Trace, KeepsBytesByModuleAndDtype) {
  const auto step = traced({"", kGpt2, 0, true});
  EXPECT_EQ(step.parameters(), language_model_config_from_json(kGpt2, "test")->parameter_count());
  int64_t layer = 0;
  for (const auto& kept : step.kept) {
    if (!kept.module.starts_with("h.1.") && kept.module != "h.1") continue;
    layer += kept.bytes;
    EXPECT_TRUE(kept.dtype == at::kBFloat16 || kept.bytes < 20000) << kept.module;
  }
  EXPECT_GT(layer, 0);
  EXPECT_LT(layer, kept_bytes(step) / 5);
  EXPECT_GT(step.peak, kept_bytes(step));
  EXPECT_TRUE(step.bounds.empty());
}

// Bytes are linear in the micro-batch, and a trillion parameters take no memory.
TEST(Trace, TakesNoMemory) {
  const auto one = traced({"", kLlama, 0, true, 1});
  const auto two = traced({"", kLlama, 0, true, 2});
  const auto four = traced({"", kLlama, 0, true, 4});
  EXPECT_NEAR(static_cast<double>(kept_bytes(four) - kept_bytes(two)),
              2.0 * static_cast<double>(kept_bytes(two) - kept_bytes(one)),
              1e-3 * static_cast<double>(kept_bytes(four)));
  const auto large = language_model_config_from_json(
      R"({"model_type": "gpt2", "n_layer": 128, "n_head": 200, "n_embd": 25600,
          "n_positions": 1024, "vocab_size": 50257, "attn_pdrop": 0, "resid_pdrop": 0,
          "embd_pdrop": 0})",
      "test");
  const auto step = trace(*large, 1, 1024, 1, {.dtype = at::kBFloat16});
  EXPECT_GT(step.parameters(), 1'000'000'000'000);
  EXPECT_GT(step.flops(), 6e15);
}

// Forward's FLOPs are those that the profiler counts in a real step.
TEST(Trace, CountsFlops) {
  const auto model = language_model_config_from_json(kLlama, "test")->build();
  FlopsProfiler profiler(model->module());
  const auto tokens = at::zeros({2, kSequence}, at::kLong);
  model->loss(tokens, tokens).backward();
  profiler.stop();
  const auto counted = static_cast<double>(profiler.profile().total.flops);
  const auto step = traced({"", kLlama});
  // The loss computes its gradients in forward, which the profiler leaves to backward.
  EXPECT_NEAR(step.flops(), 3 * counted, 0.03 * 3 * counted);
}

// Tensors that were made before count as nothing, and keep their values.
TEST(Trace, TakesTensorsThatWereMadeBefore) {
  const auto before = traced({"", nullptr});
  const auto within = trace([] { return std::make_shared<Net>(); },
                            [](Net& net) { return net.loss(images(), classes()); },
                            trace_options(config_of({"", nullptr}), /*host=*/true));
  EXPECT_EQ(before.flops(), within.flops());
  // The most is held after the loss has given the classes back.
  EXPECT_EQ(within.peak - before.peak, static_cast<int64_t>(images().nbytes()));
  struct Scaled : nn::Module {
    at::Tensor loss(const at::Tensor& scale) {
      return last(at::ones({2, 4})).mul_(scale).sum() * scale.item<double>();
    }
    nn::Linear last = register_module("last", nn::Linear(4, 4));
  };
  const auto scale = at::full({}, 3.0F);
  const auto step =
      trace([] { return std::make_shared<Scaled>(); }, [&](Scaled& m) { return m.loss(scale); });
  EXPECT_EQ(step.parameters(), 20);
  EXPECT_EQ(scale.item<double>(), 3);
}

// A trace says what it cannot know.
TEST(Trace, NamesOperatorsThatReadValues) {
  struct Reads : nn::Module {
    at::Tensor loss() { return last(at::ones({2, 4})).sum() * at::ones({}).item<double>(); }
    nn::Linear last = register_module("last", nn::Linear(4, 4));
  };
  const auto message = message_of<Error>(
      [] { trace([] { return std::make_shared<Reads>(); }, [](Reads& m) { return m.loss(); }); });
  EXPECT_NE(message.find("_local_scalar_dense"), std::string::npos) << message;
  struct Many : nn::Module {
    at::Tensor loss() { return last(at::ones({2, 4})); }
    nn::Linear last = register_module("last", nn::Linear(4, 4));
  };
  EXPECT_NE(message_of<ConfigError>([] {
              trace([] { return std::make_shared<Many>(); }, [](Many& m) { return m.loss(); });
            }).find("has 8 elements"),
            std::string::npos);
  struct Selects : nn::Module {
    at::Tensor loss() {
      const auto y = last(at::ones({2, 4}));
      return at::masked_select(y, y > 0).sum();
    }
    nn::Linear last = register_module("last", nn::Linear(4, 4));
  };
  const auto step =
      trace([] { return std::make_shared<Selects>(); }, [](Selects& m) { return m.loss(); });
  ASSERT_EQ(step.bounds.size(), 1U);
  EXPECT_EQ(step.bounds.front().name, "aten::masked_select");
  EXPECT_EQ(step.bounds.front().module, "last");
}

}  // namespace
}  // namespace zero::plan
