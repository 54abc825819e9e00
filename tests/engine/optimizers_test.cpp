// Every optimizer in the engine: results do not depend on stages, slices, tiers, schedules or
// threads; memory and what the ranks exchange between two sweeps are the formulas; states save and
// load.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/net.h"
#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_counts.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/optim/exact_sum.h"
#include "zero/optim/projection.h"
#include "zero/optim/sweeps.h"

namespace zero {
namespace {

using comm::Collective;
using comm::run_as_threads;

const std::vector<std::pair<std::string, Optimizer>>& optimizers() {
  static const std::vector<std::pair<std::string, Optimizer>> all{
      {"Adagrad", Adagrad{.lr = 1e-2, .weight_decay = 0.1}},
      {"Lion", Lion{.lr = 1e-3, .weight_decay = 0.1}},
      {"ScheduleFree", ScheduleFreeAdamW{.lr = 1e-2, .weight_decay = 0.1, .warmup_steps = 2}},
      {"Lamb", Lamb{.lr = 1e-2, .weight_decay = 0.1}},
      {"Muon", Muon{.lr = 1e-2, .weight_decay = 0.1}},
      {"Adafactor", Adafactor{.lr = 1e-2, .weight_decay = 0.1}},
      {"Apollo", Apollo{.rank = 3, .update_proj_gap = 2, .weight_decay = 0.1}}};
  return all;
}

// The states of a parameter of Net: of Muon's and Apollo's groups biases have AdamW's, and
// Adafactor's are whole.
std::vector<std::string_view> states_of(const Optimizer& optimizer, const std::string& name) {
  const bool matrix = name.ends_with("weight");
  const auto own = optim::optimizer_for(optimizer, name, matrix ? 2 : 1);
  auto names = optim::state_names(own);
  if (!matrix) return names;
  for (const auto& state : optim::factored_states(own, {2, 2}, {2, 1})) names.push_back(state.name);
  return names;
}

std::vector<at::Tensor> look(Engine& engine, const Optimizer& optimizer) {
  std::vector<at::Tensor> now;
  for (const auto& name : engine.parameter_names()) {
    now.push_back(engine.parameter(name).clone());
    for (const auto state : states_of(optimizer, name))
      now.push_back(engine.optimizer_state(name, state).clone());
  }
  return now;
}

std::vector<at::Tensor> after_training(const Config& c, const Optimizer& optimizer, int ranks,
                                       int64_t steps = 4) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, optimizer, c, group);
    train(engine, *net, steps);
    engine.complete_update();
    return look(engine, optimizer);
  });
}

TEST(Optimizers, StagesSlicesTiersAndSchedulesGiveTheSameBits) {
  const TemporaryFolder folder;
  for (const auto& [name, optimizer] : optimizers()) {
    for (const auto& replicated : {config(0, false), config(0, true), [] {
                                     auto split = config(0, true);
                                     split.split_master_weights = true;
                                     return split;
                                   }()}) {
      for (int ranks = 1; ranks <= 3; ++ranks) {
        SCOPED_TRACE(testing::Message() << name << " bf16 " << replicated.bf16 << " split "
                                        << replicated.split_master_weights << " ranks " << ranks);
        const auto expected = after_training(replicated, optimizer, ranks);
        const auto same = [&](const char* what, const Config& c) {
          SCOPED_TRACE(what);
          expect_equal(after_training(c, optimizer, ranks), expected);
        };
        auto c = replicated;
        for (c.stage = 1; c.stage <= 3; ++c.stage) {
          SCOPED_TRACE(testing::Message() << "stage " << c.stage);
          same("in memory", c);
          same("on disk", on_disk(c, folder));
          if (!c.split_master_weights) same("on the host", optimizer_on_host(c));
          if (c.stage < 2) continue;
          same("in backward", in_backward(c));
          if (!c.split_master_weights)
            same("on the host, in backward", in_backward(optimizer_on_host(c)));
          same("on disk, in backward", in_backward(on_disk(c, folder)));
          auto gradients = on_disk(c, folder);
          gradients.offload_optimizer.gradients = true;
          same("gradients on disk", gradients);
        }
        c.stage = 3;
        same("all on disk", all_on_disk(c, folder));
        same("all on disk, in backward", in_backward(all_on_disk(c, folder)));
        same("all on the host", all_on_host(c));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// The threads of the update: LibTorch's matrix products depend on them.
TEST(Optimizers, ThreadsDoNotMatter) {
  const int threads = at::get_num_threads();
  for (const auto& [name, optimizer] : optimizers()) {
    SCOPED_TRACE(name);
    std::vector<at::Tensor> of_one;
    for (const int count : thread_counts()) {
      auto net = std::make_shared<Net>();
      Engine engine(net, optimizer, config(0));
      for (int64_t i = 0; i < 3; ++i) {
        at::set_num_threads(1);
        engine.backward(loss_of(*net, 0, i));
        at::set_num_threads(count);
        engine.step();
      }
      if (count == 1) of_one = look(engine, optimizer);
      expect_equal(look(engine, optimizer), of_one);
    }
  }
  at::set_num_threads(threads);
}

TEST(Optimizers, StatesTakeTheBytesOfTheFormula) {
  const std::vector<std::pair<Optimizer, int64_t>> bytes{
      {Adagrad{}, 4},          {Lion{}, 4}, {Lamb{}, 8}, {Muon{}, 4}, {AdamW{}, 8}, {Sgd{}, 0},
      {ScheduleFreeAdamW{}, 8}};
  for (const auto& [optimizer, moments] : bytes) {
    for (const bool bf16 : {false, true}) {
      for (const int stage : {0, 1, 3}) {
        run_as_threads(2, [&, &optimizer = optimizer, moments = moments](auto group) {
          Config c;
          c.stage = stage;
          c.bf16 = bf16;
          Engine engine(std::make_shared<Chain>(), optimizer, c, group);
          const int64_t expected = (moments + (bf16 ? 4 : 0)) * 4 * 64 * 64 / (stage == 0 ? 1 : 2);
          EXPECT_EQ(engine.memory_formula().optimizer, expected);
          EXPECT_EQ(group->ledger()->usage(Category::optimizer).current, expected);
        });
      }
    }
  }
}

// The bytes that the ranks send in a step beyond AdamW's.
int64_t gathered_in_a_step(const Config& c, const Optimizer& optimizer, int ranks,
                           const std::function<void(Engine&)>& look = {}) {
  int64_t sent = 0;
  run_as_threads(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, optimizer, c, group);
    train(engine, *net, 1);
    group->traffic().reset();
    train(engine, *net, 1, 1);
    const auto counted = group->traffic().count(Collective::all_gather).logical_bytes;
    EXPECT_EQ(engine.traffic_formula().all_gather, counted);
    if (group->rank() != 0) return;
    sent = counted;
    if (look) look(engine);
  });
  return sent;
}

TEST(Lamb, ExchangesTheNormsOfParametersInSeveralSlicesAndNothingElse) {
  for (const int ranks : {1, 2, 3}) {
    for (const int stage : {0, 1, 2}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, stage " << stage);
      int64_t shared = 0;
      const auto with = gathered_in_a_step(config(stage), Lamb{}, ranks, [&](Engine& engine) {
        const auto& layout = engine.layout();
        for (int64_t u = 0; u < layout.unit_count(); ++u) {
          for (const auto& segment : layout.unit(u).segments) {
            const int64_t slice = layout.unit(u).numel / ranks;
            if (segment.offset / slice != (segment.offset + segment.numel - 1) / slice) ++shared;
          }
        }
      });
      const auto without = gathered_in_a_step(config(stage), AdamW{}, ranks);
      const bool sliced = ranks > 1 && stage > 0;
      EXPECT_EQ(shared > 0, ranks > 1);
      EXPECT_EQ(with - without, sliced ? shared * 2 * 21 * 8 * (ranks - 1) : 0);
    }
  }
}

// Returns the bytes of all-gathers in the second step of a chain whose matrices are a unit each:
// two batches of two. They are those of the formula.
int64_t gathered_in_a_step(const Optimizer& optimizer, int stage,
                           const std::shared_ptr<comm::Group>& group) {
  auto chain = std::make_shared<Chain>();
  Config c = config(stage);
  c.unit_bytes = 64 * 64 * 4;
  Engine engine(chain, optimizer, c, group);
  const auto step = [&] {
    engine.backward(chain->forward(torch::full({3, 64}, 0.1)).mean());
    engine.step();
  };
  step();
  group->traffic().reset();
  step();
  const auto counted = group->traffic().count(Collective::all_gather).logical_bytes;
  EXPECT_EQ(engine.traffic_formula().all_gather, counted);
  return counted;
}

TEST(WholeMatrices, TheirDirectionsAreExchangedOnceAndWhatIsFoundOnce) {
  const std::vector<std::pair<Optimizer, int64_t>> found{{Muon{}, 64 * 64},
                                                         {Apollo{.rank = 4}, 64}};
  for (const auto& [optimizer, numel] : found) {
    run_as_threads(2, [&, &optimizer = optimizer, numel = numel](auto group) {
      for (const int stage : {0, 1, 2}) {
        const auto counted = gathered_in_a_step(optimizer, stage, group);
        const int64_t model = int64_t{4} * 64 * 64 * 4;
        // Parameters and directions, and the results.
        EXPECT_EQ(counted, stage == 0 ? 0 : 2 * model / 2 + 4 * numel * 4 / 2);
      }
    });
  }
}

TEST(Factored, StatesAreWholeOnEveryRankOrWhereMatricesAreProjectedAndNothingElseIsKept) {
  const TemporaryFolder folder;
  // Rows and columns; two moments in low rank, and a norm. Each of two ranks projects two matrices.
  const std::vector<std::pair<Optimizer, int64_t>> factored{
      {Adafactor{}, 64 + 64}, {Apollo{.rank = 4}, 2 * 4 * 64 + 1}, {Apollo::mini(), 2 * 64 + 1}};
  for (const auto& [optimizer, numel] : factored) {
    for (const bool bf16 : {false, true}) {
      for (const int stage : {0, 1, 3}) {
        for (const auto& place : {config(stage, bf16), optimizer_on_host(config(stage, bf16)),
                                  on_disk(config(stage, bf16), folder)}) {
          run_as_threads(2, [&, &optimizer = optimizer, numel = numel](auto group) {
            Engine engine(std::make_shared<Chain>(), optimizer, place, group);
            constexpr int64_t kNumel = int64_t{4} * 64 * 64;
            const auto device = place.offload_optimizer.device;
            // Master weights: of bf16, and of fp32 parameters whose update is on the host.
            const bool master = bf16 || device == OffloadDevice::cpu;
            const bool in_memory = master && device != OffloadDevice::nvme;
            const bool projected = std::holds_alternative<Apollo>(optimizer);
            const int64_t expected = (projected && stage > 0 ? 2 : 4) * numel * 4 +
                                     (in_memory ? 4 * kNumel / (stage == 0 ? 1 : 2) : 0);
            const bool host = device != OffloadDevice::none;
            const auto held = [&](Category c) { return group->ledger()->usage(c).current; };
            EXPECT_EQ(engine.memory_formula().optimizer, host ? 0 : expected);
            EXPECT_EQ(engine.host_memory_formula().optimizer, host ? expected : 0);
            EXPECT_EQ(held(Category::optimizer), engine.memory_formula().optimizer);
            EXPECT_EQ(held(Category::host_optimizer), engine.host_memory_formula().optimizer);
          });
        }
      }
    }
  }
}

TEST(Adafactor, ExchangesSumsOfRowsAndColumnsAndNorms) {
  run_as_threads(2, [&](auto group) {
    for (const int stage : {0, 1, 2}) {
      const auto counted = gathered_in_a_step(Adafactor{}, stage, group);
      // Parameters; of half of the rows and all columns an exponent and a sum; norms.
      const int64_t parameters = int64_t{4} * 64 * 64 * 4 / 2;
      const int64_t sums = int64_t{4} * (32 + 64) * (1 + 8);
      const int64_t norms = int64_t{4} * 2 * 21 * 8;
      EXPECT_EQ(counted, stage == 0 ? 0 : parameters + sums + norms);
    }
  });
}

// A parameter of more dimensions, and one whose storage is not by rows.
struct Shapes : nn::Module {
  Shapes() {
    const auto filled = [](at::IntArrayRef sizes) {
      const auto numel = c10::multiply_integers(sizes);
      return torch::sin(torch::arange(numel) * 0.7).mul(0.2).view(sizes).clone();
    };
    all = {register_parameter("scalar", torch::full({}, 0.5)),
           register_parameter("transposed", filled({40, 130}).t()),
           register_parameter("batched", filled({3, 20, 17})),
           register_parameter("convolution", filled({6, 5, 3, 3})),
           register_parameter("channels_last",
                              filled({6, 5, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast)),
           register_parameter("row", filled({1, 90})),
           register_parameter("none", filled({0, 5}))};
  }
  at::Tensor loss(int rank, int64_t step) {
    auto sum = torch::zeros({});
    for (const auto& p : all) {
      const auto wanted = torch::cos(torch::arange(p.numel()) * 0.3 + rank + 2.0 * step);
      sum = sum + (p.to(at::kFloat).reshape({-1}) - wanted).pow(2).sum();
    }
    return sum;
  }
  std::vector<at::Tensor> all;
};

TEST(Adafactor, FactorsTheLastTwoDimensionsWhateverTheStorage) {
  const auto after = [](const Config& c, int ranks) {
    return of_rank_zero(ranks, [&](auto group) {
      auto module = std::make_shared<Shapes>();
      Engine engine(module, Adafactor{.lr = 0.1}, c, group);
      for (int64_t i = 0; i < 4; ++i) {
        engine.backward(module->loss(group->rank(), i));
        engine.step();
      }
      auto now = weights(engine);
      for (const auto* name : {"transposed", "batched", "convolution", "channels_last", "row"}) {
        const auto sizes = engine.parameter(name).sizes().vec();
        auto rows = sizes, columns = sizes;
        rows.back() = 1;
        columns[sizes.size() - 2] = 1;
        now.push_back(engine.optimizer_state(name, "row_var"));
        EXPECT_EQ(now.back().sizes(), rows);
        now.push_back(engine.optimizer_state(name, "col_var"));
        EXPECT_EQ(now.back().sizes(), columns);
        EXPECT_THROW(engine.optimizer_state(name, "variance"), ConfigError);
      }
      now.push_back(engine.optimizer_state("scalar", "variance"));
      for (const auto& tensor : now) EXPECT_TRUE(tensor.isfinite().all().item<bool>());
      // The same values, however they lie; the update of means over other matrices differs.
      EXPECT_GT(now[3].abs().max().item<double>(), 0);
      return now;
    });
  };
  for (const bool bf16 : {false, true}) {
    for (const int ranks : {1, 2, 3}) {
      const auto expected = after(config(0, bf16), ranks);
      for (const int stage : {1, 3}) expect_equal(after(config(stage, bf16), ranks), expected);
    }
  }
}

TEST(WholeMatrices, GiveTheSameBitsInSlicesWhateverTheStorage) {
  const auto after = [](const Optimizer& optimizer, int stage, int ranks) {
    return of_rank_zero(ranks, [&](auto group) {
      auto module = std::make_shared<Shapes>();
      Engine engine(module, optimizer, config(stage), group);
      for (int64_t i = 0; i < 3; ++i) {
        engine.backward(module->loss(group->rank(), i));
        engine.step();
      }
      return weights(engine);
    });
  };
  for (const Optimizer& optimizer :
       {Optimizer(Muon{}), Optimizer(Apollo{.rank = 3}), Optimizer(Apollo::mini())}) {
    for (const int ranks : {1, 2, 3}) {
      const auto expected = after(optimizer, 0, ranks);
      for (const int stage : {1, 3}) expect_equal(after(optimizer, stage, ranks), expected);
    }
  }
}

// A unit without elements comes first in its batch: the others lie in slices all the same.
struct Empty : nn::Module {
  explicit Empty(bool more) {
    all = {register_parameter("none", torch::zeros({0, 5})),
           register_parameter("bias", torch::full({7}, 0.3))};
    if (more)
      all.push_back(register_parameter("large", torch::sin(torch::arange(40 * 60)).view({40, 60})));
  }
  at::Tensor loss(int rank) {
    auto sum = torch::zeros({});
    for (const auto& p : all) sum = sum + (p.to(at::kFloat) - 0.1 * (rank + 1)).pow(2).sum();
    return sum;
  }
  std::vector<at::Tensor> all;
};

TEST(TwoSweeps, AUnitWithoutElementsChangesNothing) {
  const auto after = [](const Optimizer& optimizer, int stage, bool more) {
    return of_rank_zero(2, [&](auto group) {
      auto module = std::make_shared<Empty>(more);
      Engine engine(module, optimizer, config(stage), group);
      for (int i = 0; i < 3; ++i) {
        engine.backward(module->loss(group->rank()));
        engine.step();
      }
      return weights(engine);
    });
  };
  for (const Optimizer& optimizer :
       {Optimizer(Adafactor{.lr = 0.1}), Optimizer(Lamb{.lr = 0.1}), Optimizer(Muon{.lr = 0.1}),
        Optimizer(Apollo{.lr = 0.1, .rank = 3})}) {
    for (const bool more : {false, true}) {
      const auto expected = after(optimizer, 0, more);
      for (const int stage : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << optim::name(optimizer) << ", stage " << stage);
        expect_equal(after(optimizer, stage, more), expected);
      }
    }
  }
}

TEST(Factored, AParameterWithoutAGradientKeepsItsStates) {
  const std::vector<std::pair<Optimizer, const char*>> kept{
      {Adafactor{.lr = 1e-2}, "row_var"},
      {Apollo{.rank = 3, .update_proj_gap = 1}, "exp_avg_low_rank"}};
  for (const auto& [optimizer, state] : kept) {
    const auto after = [&, &optimizer = optimizer, state = state](int stage) {
      return of_rank_zero(2, [&](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, optimizer, config(stage), group);
        train(engine, *net, 1);
        const auto own = engine.optimizer_state("a.weight", state);
        const auto other = engine.optimizer_state("b.weight", state);
        const auto weight = engine.parameter("a.weight").clone();
        train_without_a(engine, *net);
        EXPECT_TRUE(torch::equal(engine.optimizer_state("a.weight", state), own));
        EXPECT_FALSE(torch::equal(engine.optimizer_state("b.weight", state), other));
        EXPECT_TRUE(torch::equal(engine.parameter("a.weight"), weight));
        train(engine, *net, 1, 1);  // its second
        return look(engine, optimizer);
      });
    };
    const auto expected = after(0);
    for (const int stage : {1, 3}) expect_equal(after(stage), expected);
  }
}

// Biases go to AdamW, whose rate is another.
TEST(Apollo, TrainsMatricesAsThePapersAlgorithmInDouble) {
  for (const auto& given : {Apollo{.rank = 3, .update_proj_gap = 2, .weight_decay = 0.1},
                            Apollo{.rank = 40, .norm_growth = 0, .seed = 5}, Apollo::mini()}) {
    auto apollo = given;
    apollo.adam_lr = 1e-3;
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      Engine engine(net, apollo, config(2), group);
      EXPECT_EQ(engine.group_count(), 2);
      EXPECT_EQ(engine.lr(0), 0.01);
      EXPECT_EQ(engine.lr(1), 1e-3);
      struct Matrix {
        at::Tensor weights, exp_avg, exp_avg_sq, norm;
      };
      std::map<std::string, Matrix> exact;
      const auto numbers = [](const at::Tensor& t) { return t.mutable_data_ptr<double>(); };
      for (int64_t step = 1; step <= 5; ++step) {
        engine.backward(loss_of(*net, group->rank(), step));
        for (const auto* name : {"a.weight", "b.weight", "c.weight"}) {
          auto& of = exact[name];
          const auto direction = engine.gradient(name).to(torch::kDouble).contiguous();
          const auto projection =
              *optim::projection_of(apollo, direction.sizes(), direction.strides());
          if (step == 1) {
            of.weights = engine.parameter(name).to(torch::kDouble);
            of.exp_avg = torch::zeros({projection.channels, projection.rank}, torch::kDouble);
            of.exp_avg_sq = torch::zeros_like(of.exp_avg);
            of.norm = torch::zeros({1}, torch::kDouble);
          }
          optim::projected_direction_exact(
              apollo, name, step, projection, numbers(direction),
              {numbers(of.exp_avg), numbers(of.exp_avg_sq), numbers(of.norm)});
          of.weights = of.weights * (1 - apollo.lr * apollo.weight_decay) - direction * apollo.lr;
        }
        engine.step();
        for (const auto& [name, of] : exact) {
          const auto near = [&](const at::Tensor& ours, const at::Tensor& wanted) {
            EXPECT_TRUE(torch::allclose(ours.to(torch::kDouble), wanted, 1e-4, 1e-6))
                << name << " in step " << step;
          };
          near(engine.parameter(name), of.weights);
          near(engine.optimizer_state(name, "exp_avg_low_rank"), of.exp_avg);
          near(engine.optimizer_state(name, "exp_avg_sq_low_rank"), of.exp_avg_sq);
          near(engine.optimizer_state(name, "update_norm"), of.norm);
        }
      }
      EXPECT_THROW(engine.optimizer_state("b.weight", "exp_avg"), ConfigError);
      EXPECT_NO_THROW(engine.optimizer_state("b.bias", "exp_avg"));
    });
  }
}

TEST(Apollo, KeepsItsRank) {
  auto net = std::make_shared<Net>();
  Engine engine(net, Apollo{.rank = 3}, config(0));
  EXPECT_THAT([&] { engine.set_optimizer(Apollo{.rank = 4}); },
              testing::ThrowsMessage<ConfigError>(testing::HasSubstr(
                  "state exp_avg_low_rank of 'a.weight' has the shape (33, 4)")));
  EXPECT_EQ(std::get<Apollo>(engine.optimizer()).rank, 3);
  engine.set_optimizer(Apollo{.rank = 3, .alpha = 2});
  EXPECT_EQ(std::get<Apollo>(engine.optimizer()).alpha, 2);
}

TEST(Adafactor, StatesAreSetByNameAndRefusedWhereThereAreNone) {
  auto net = std::make_shared<Net>();
  Engine engine(net, Adafactor{}, config(0));
  engine.set_optimizer_state("b.weight", "row_var", torch::full({29, 1}, 0.5));
  EXPECT_TRUE(
      torch::equal(engine.optimizer_state("b.weight", "row_var"), torch::full({29, 1}, 0.5)));
  EXPECT_THROW(engine.set_optimizer_state("b.weight", "row_var", torch::zeros({29, 33})),
               ConfigError);
  EXPECT_THROW(engine.optimizer_state("b.bias", "row_var"), ConfigError);
  EXPECT_EQ(engine.group_count(), 1);
  auto c = config(2, true);
  c.bf16_master_weights_and_grads = true;
  EXPECT_THROW(Engine(std::make_shared<Net>(), Adafactor{}, c), ConfigError);
  // Whole second moments, where they are wanted.
  Engine whole(std::make_shared<Net>(), Adafactor{.factored = false}, config(0));
  EXPECT_EQ(whole.optimizer_state("b.weight", "variance").numel(), 29 * 33);
}

TEST(Lamb, TheSecondPassMovesWhatTheFormulaSays) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    for (const bool host : {false, true}) {
      for (const int read_ahead : {0, 1}) {
        SCOPED_TRACE(testing::Message() << "bf16 " << bf16 << " host " << host);
        run_as_threads(2, [&](auto group) {
          auto c = host ? optimizer_on_host(config(2, bf16)) : on_disk(config(2, bf16), folder);
          c.offload_optimizer.pipeline_read = read_ahead != 0;
          auto net = std::make_shared<Net>();
          Engine engine(net, Lamb{}, c, group);
          train(engine, *net, 2);
          const auto disk = engine.disk();
          const auto traffic = engine.host_traffic();
          train(engine, *net, 1, 2);
          const auto formula = engine.traffic_formula();
          if (host) {
            EXPECT_EQ(engine.host_traffic().down - traffic.down, formula.host_down);
            EXPECT_EQ(engine.host_traffic().up - traffic.up, formula.host_up);
          } else {
            // Blocks read ahead for the next step may be in either.
            if (read_ahead == 0) {
              EXPECT_EQ(engine.disk().read - disk.read, formula.disk_read);
            }
            EXPECT_EQ(engine.disk().written - disk.written, formula.disk_written);
          }
        });
      }
    }
  }
}

TEST(Optimizers, StatesSaveAndLoadAlsoAtAnotherNumberOfRanks) {
  const TemporaryFolder folder;
  for (const auto& [name, optimizer] : optimizers()) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(testing::Message() << name << " bf16 " << bf16);
      const auto file = (folder.path() / "full").string();
      const auto saved = of_rank_zero(3, [&, &optimizer = optimizer](auto group) {
        auto net = std::make_shared<Net>();
        Engine engine(net, optimizer, config(2, bf16), group);
        train(engine, *net, 3);
        engine.save((folder.path() / "sharded").string());
        engine.save_full(file);
        auto then = look(engine, optimizer);
        train(engine, *net, 2, 3);
        const auto straight = look(engine, optimizer);
        engine.load((folder.path() / "sharded").string());
        train(engine, *net, 2, 3);
        expect_equal(look(engine, optimizer), straight);
        engine.load_full(file);
        train(engine, *net, 2, 3);
        expect_equal(look(engine, optimizer), straight);
        return then;
      });
      std::vector<at::Tensor> resumed;
      for (const int ranks : {1, 2}) {
        for (const int stage : {0, 3}) {
          std::vector<at::Tensor> after;
          const auto loaded = of_rank_zero(ranks, [&, &optimizer = optimizer](auto group) {
            auto net = std::make_shared<Net>();
            Engine engine(net, optimizer, config(stage, bf16), group);
            engine.load_full(file);
            EXPECT_EQ(engine.steps(), 3);
            auto now = look(engine, optimizer);
            train(engine, *net, 2, 3);
            auto later = look(engine, optimizer);
            if (group->rank() == 0) after = std::move(later);
            return now;
          });
          expect_equal(loaded, saved);
          if (stage == 0) {
            resumed = after;
          } else {
            expect_equal(after, resumed);
          }
        }
      }
    }
  }
}

// Clips by norm and then by value, as torch's two functions do one after the other.
TEST(Clipping, ByValueFollowsThatByNormAndWorksInBackward) {
  const double limit = 0.003;
  auto c = config(0);
  c.gradient_clipping = 0.5;
  c.gradient_clipping_value = limit;
  auto net = std::make_shared<Net>();
  Engine engine(net, Sgd{.lr = 1}, c);
  auto plain = std::make_shared<Net>();
  engine.backward(loss_of(*net, 0, 0));
  engine.step();
  loss_of(*plain, 0, 0).backward();
  torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
  torch::nn::utils::clip_grad_value_(plain->parameters(), limit);
  bool cut = false;
  for (const auto& p : plain->named_parameters()) {
    const auto expected = p.value().detach() - p.value().grad();
    cut = cut || p.value().grad().abs().max().item<double>() > 0.999 * limit;
    EXPECT_TRUE(torch::allclose(engine.parameter(p.key()), expected, 1e-5, 1e-7)) << p.key();
  }
  EXPECT_TRUE(cut);
  c = config(2);
  c.gradient_clipping_value = limit;
  const auto expected = after_training(c, AdamW{}, 2);
  expect_equal(after_training(in_backward(c), AdamW{}, 2), expected);
  const auto sgd = [&](const Config& with) { return after_training(with, Sgd{.lr = 1}, 2); };
  EXPECT_FALSE(torch::equal(sgd(c).front(), sgd(config(2)).front()));
}

// Biases go to AdamW, whose rate follows its own.
TEST(Muon, TrainsMatricesAndLeavesTheRestToAdamW) {
  auto net = std::make_shared<Net>();
  Engine engine(net, Muon{.lr = 0.02, .adam_lr = 1e-3}, config(0));
  EXPECT_EQ(engine.group_count(), 2);
  EXPECT_EQ(engine.lr(0), 0.02);
  EXPECT_EQ(engine.lr(1), 1e-3);
  auto same = std::make_shared<Net>();
  Engine adam(same, AdamW{.lr = 1e-3, .weight_decay = 0}, config(0));
  const auto before = engine.parameter("b.weight").clone();
  train(engine, *net, 1);
  train(adam, *same, 1);
  EXPECT_TRUE(torch::equal(engine.parameter("b.bias"), adam.parameter("b.bias")));
  const auto step = engine.parameter("b.weight") - before;
  const auto singular = std::get<1>(torch::linalg_svd(step / -0.02, false, {}));
  EXPECT_LT(singular.max().item<double>(), 1.3);
  EXPECT_THROW(engine.optimizer_state("b.weight", "exp_avg"), ConfigError);
  EXPECT_NO_THROW(engine.optimizer_state("b.bias", "exp_avg"));
}

TEST(Lamb, StepsByTheNormOfTheParameter) {
  auto net = std::make_shared<Net>();
  Engine engine(net, Lamb{.lr = 0.01, .bias_correction = false}, config(0));
  const auto before = engine.parameter("b.weight").clone();
  train(engine, *net, 1);
  const auto step = engine.parameter("b.weight") - before;
  EXPECT_NEAR(step.norm().item<double>(), 0.01 * before.norm().item<double>(), 1e-6);
}

}  // namespace
}  // namespace zero
