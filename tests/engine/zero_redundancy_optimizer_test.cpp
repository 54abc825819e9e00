#include "zero/engine/zero_redundancy_optimizer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "zero/base/error.h"
#include "zero/comm/group.h"

namespace zero {
namespace {

using Groups = ZeroRedundancyOptimizer::ParameterGroups;
using Factory = ZeroRedundancyOptimizer::Factory;
using Parameters = std::vector<at::Tensor>;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr size_t kNever = 3;     // this parameter has no gradient on any rank
constexpr size_t kLastRank = 4;  // this one on the last rank alone

at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed));
}

/// Parameters of odd sizes and several layouts, the same for the same seed.
Parameters make_parameters(at::ScalarType dtype, uint64_t seed = 1) {
  Parameters all;
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {7, 3}, {129}, {64, 5}, {11}, {1}, {2, 3, 4, 4}, {33, 5}, {0}, {6, 4}}) {
    all.push_back(random(shape, seed + all.size()).to(dtype));
  }
  all[5] = all[5].contiguous(at::MemoryFormat::ChannelsLast);
  all[8] = all[8].t();
  for (auto& parameter : all) parameter.requires_grad_();
  return all;
}

at::Tensor gradient(const Parameters& parameters, size_t i, int rank, int step) {
  const auto seed = static_cast<uint64_t>(1000 * step + 50 * rank) + i;
  return random(parameters[i].sizes(), seed).to(parameters[i].scalar_type());
}

bool has_gradient(size_t i, int rank, int size) {
  return i != kNever && (i != kLastRank || rank == size - 1);
}

void set_gradients(Parameters& parameters, int rank, int size, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() =
        has_gradient(i, rank, size) ? gradient(parameters, i, rank, step) : at::Tensor();
  }
}

/// The mean over the ranks: summed in rank order in fp32 (fp64 for fp64), rounded once.
void set_mean_gradients(Parameters& parameters, int size, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = at::Tensor();
    if (i == kNever) continue;
    const auto dtype = parameters[i].scalar_type();
    auto sum = at::zeros(parameters[i].sizes(), dtype == at::kDouble ? at::kDouble : at::kFloat);
    for (int rank = 0; rank < size; ++rank) {
      if (has_gradient(i, rank, size)) sum.add_(gradient(parameters, i, rank, step));
    }
    parameters[i].mutable_grad() = sum.div_(size).to(dtype);
  }
}

struct Case {
  std::string name;
  Factory factory;
};

const std::vector<Case>& cases() {
  namespace optim = torch::optim;
  static const std::vector<Case> all{
      {"AdamW",
       [](const Groups& groups) {
         return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.01).weight_decay(0.1));
       }},
      {"SGD",
       [](const Groups& groups) {
         return std::make_unique<optim::SGD>(
             groups, optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
       }},
      {"Adagrad",
       [](const Groups& groups) {
         return std::make_unique<optim::Adagrad>(groups, optim::AdagradOptions(0.1));
       }},
      {"RMSprop", [](const Groups& groups) {
         return std::make_unique<optim::RMSprop>(
             groups, optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
       }}};
  return all;
}

void expect_same_bits(const Parameters& a, const Parameters& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const auto mine = a[i].detach().contiguous();
    const auto theirs = b[i].detach().contiguous();
    ASSERT_EQ(mine.sizes(), theirs.sizes());
    ASSERT_TRUE(mine.nbytes() == 0 ||
                std::memcmp(mine.const_data_ptr(), theirs.const_data_ptr(), mine.nbytes()) == 0)
        << what << ", parameter " << i;
  }
}

/// The weights after some steps of the unsharded optimizer fed with the mean gradients.
Parameters unsharded(const Case& c, at::ScalarType dtype, int size, int steps) {
  auto parameters = make_parameters(dtype);
  auto optimizer = c.factory({torch::optim::OptimizerParamGroup(parameters)});
  for (int step = 0; step < steps; ++step) {
    set_mean_gradients(parameters, size, step);
    optimizer->step();
  }
  return parameters;
}

TEST(ZeroRedundancyOptimizer, IsTheUnshardedOptimizerBitForBit) {
  for (const auto& c : cases()) {
    for (const int size : {1, 2, 3, 4}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
        if (dtype != at::kFloat && c.name != "AdamW") continue;
        const auto expected = unsharded(c, dtype, size, 4);
        for (const int64_t bucket_bytes : {int64_t{512}, int64_t{1} << 20}) {
          comm::run_as_threads(size, [&](std::shared_ptr<comm::Group> group) {
            auto parameters = make_parameters(dtype);
            ZeroRedundancyOptimizer optimizer(group, parameters, c.factory,
                                              {.bucket_bytes = bucket_bytes});
            for (int step = 0; step < 4; ++step) {
              set_gradients(parameters, group->rank(), size, step);
              optimizer.step();
            }
            expect_same_bits(
                parameters, expected,
                c.name + " on " + std::to_string(size) + " ranks, " + c10::toString(dtype));
          });
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(ZeroRedundancyOptimizer, KeepsTheStateOfOwnParametersAlone) {
  comm::run_as_threads(3, [](std::shared_ptr<comm::Group> group) {
    auto parameters = make_parameters(at::kFloat);
    ZeroRedundancyOptimizer optimizer(group, parameters, cases()[0].factory);
    set_gradients(parameters, group->rank(), 3, 0);
    optimizer.step();
    size_t owned = 0;
    std::vector<int64_t> numel(3, 0);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const int owner = optimizer.owner(0, i);
      numel[static_cast<size_t>(owner)] += parameters[i].numel();
      const bool held = optimizer.inner().state().count(parameters[i].unsafeGetTensorImpl()) == 1;
      EXPECT_EQ(held, owner == group->rank() && i != kNever) << i;
      owned += held ? 1 : 0;
    }
    EXPECT_EQ(optimizer.inner().state().size(), owned);
    EXPECT_TRUE(optimizer.state().empty());
    // 320 elements; 165 and 24; 129, 96, 21, 11 and 1 in turn: the largest first, to the least
    // loaded.
    EXPECT_EQ(*std::max_element(numel.begin(), numel.end()), 320);
    EXPECT_GE(*std::min_element(numel.begin(), numel.end()), 200);
  });
}

TEST(ZeroRedundancyOptimizer, AveragesTheGradientsOfOwnersOrLeavesThemAlone) {
  comm::run_as_threads(2, [](std::shared_ptr<comm::Group> group) {
    for (const bool average : {true, false}) {
      Parameters parameters{torch::zeros({3}).requires_grad_(), torch::zeros({3}).requires_grad_()};
      ZeroRedundancyOptimizer optimizer(group, parameters,
                                        [](const Groups& groups) {
                                          return std::make_unique<torch::optim::SGD>(
                                              groups, torch::optim::SGDOptions(1.0));
                                        },
                                        {.average_gradients = average});
      for (auto& parameter : parameters) {
        parameter.mutable_grad() = torch::full({3}, group->rank() == 0 ? 2.0 : 6.0);
      }
      optimizer.step();
      for (size_t i = 0; i < 2; ++i) {
        const double theirs = optimizer.owner(0, i) == 0 ? 2.0 : 6.0;
        EXPECT_TRUE(torch::all(parameters[i] == (average ? -4.0 : -theirs)).item<bool>());
      }
      optimizer.zero_grad();
      for (const auto& parameter : parameters) EXPECT_FALSE(parameter.grad().defined());
    }
  });
}

TEST(ZeroRedundancyOptimizer, StartsFromTheParametersOfRank0) {
  const auto first = make_parameters(at::kFloat, 100);
  comm::run_as_threads(3, [&](std::shared_ptr<comm::Group> group) {
    const auto parameters =
        make_parameters(at::kFloat, 100 + 77 * static_cast<uint64_t>(group->rank()));
    const ZeroRedundancyOptimizer optimizer(group, parameters, cases()[0].factory);
    expect_same_bits(parameters, first, "after construction");
  });
}

TEST(ZeroRedundancyOptimizer, TrainsAModuleWithClosureSchedulerAndParameterGroups) {
  const auto train = [](const std::shared_ptr<comm::Group>& group, bool shard) {
    torch::nn::Linear a(5, 4);
    torch::nn::Linear b(4, 1);
    torch::NoGradGuard no_gradients;
    uint64_t seed = 3;
    for (auto& module : {a, b}) {
      for (auto& parameter : module->parameters()) {
        parameter.copy_(random(parameter.sizes(), seed++));
      }
    }
    Groups groups;
    groups.emplace_back(a->parameters(), std::make_unique<torch::optim::SGDOptions>(0.05));
    groups.emplace_back(b->parameters());
    const Factory factory = [](const Groups& each) {
      return std::make_unique<torch::optim::SGD>(each, torch::optim::SGDOptions(0.2).momentum(0.5));
    };
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (shard) {
      optimizer = std::make_unique<ZeroRedundancyOptimizer>(group, groups, factory);
    } else {
      optimizer = factory(groups);
    }
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0.05);
    EXPECT_EQ(optimizer->param_groups()[1].options().get_lr(), 0.2);
    torch::optim::StepLR scheduler(*optimizer, 1, 0.5);
    // The same data on both ranks: the mean of two equal gradients is that gradient.
    const auto x = random({8, 5}, 50);
    const auto y = random({8, 1}, 51);
    for (int step = 0; step < 5; ++step) {
      const auto loss = optimizer->step([&] {
        optimizer->zero_grad();
        auto error = torch::mse_loss(b(torch::tanh(a(x))), y);
        error.backward();
        return error;
      });
      EXPECT_TRUE(loss.defined());
      scheduler.step();
    }
    auto parameters = a->parameters();
    for (const auto& parameter : b->parameters()) parameters.push_back(parameter);
    return parameters;
  };
  const auto expected = train(nullptr, false);
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    expect_same_bits(train(group, true), expected, "a trained module");
  });
}

TEST(ZeroRedundancyOptimizer, TakesParameterGroupsLater) {
  for (const auto& c : {cases()[0], cases()[2]}) {
    const int size = 2;
    // Torch's Adagrad cannot take a group later, so the unsharded run has both from the start but
    // no gradients for one.
    const auto run = [&](torch::optim::Optimizer& optimizer, Parameters& all, const auto& fill,
                         int from, int to) {
      for (int step = from; step < to; ++step) {
        fill(all, step);
        if (step < 2) {
          for (size_t i = 5; i < all.size(); ++i) all[i].mutable_grad() = at::Tensor();
        }
        optimizer.step();
      }
    };
    auto expected = make_parameters(at::kFloat);
    auto plain = c.factory({{Parameters(expected.begin(), expected.begin() + 5)},
                            {Parameters(expected.begin() + 5, expected.end())}});
    run(
        *plain, expected, [&](Parameters& all, int step) { set_mean_gradients(all, size, step); },
        0, 4);
    comm::run_as_threads(size, [&](std::shared_ptr<comm::Group> group) {
      auto all = make_parameters(at::kFloat);
      const auto fill = [&](Parameters& p, int step) {
        set_gradients(p, group->rank(), size, step);
      };
      ZeroRedundancyOptimizer optimizer(group, Parameters(all.begin(), all.begin() + 5), c.factory);
      run(optimizer, all, fill, 0, 2);
      optimizer.add_param_group({Parameters(all.begin() + 5, all.end())});
      EXPECT_EQ(optimizer.param_groups().size(), 2);
      run(optimizer, all, fill, 2, 4);
      expect_same_bits(all, expected, c.name);
    });
  }
}

TEST(ZeroRedundancyOptimizer, ARefusedGroupLeavesTheOthersAsTheyWere) {
  const auto c = cases()[0];
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    const auto train = [&](bool refused) {
      auto all = make_parameters(at::kFloat);
      const Parameters first(all.begin(), all.begin() + 3);
      ZeroRedundancyOptimizer optimizer(group, first, c.factory);
      if (refused) {
        const Parameters integers{all[3], at::zeros({3}, at::kInt)};
        EXPECT_THROW(optimizer.add_param_group({integers}), ConfigError);
        EXPECT_EQ(optimizer.param_groups().size(), 1);
      }
      for (int step = 0; step < 2; ++step) {
        set_gradients(all, group->rank(), 2, step);
        optimizer.step();
      }
      optimizer.add_param_group({Parameters(all.begin() + 3, all.end())});
      set_gradients(all, group->rank(), 2, 2);
      optimizer.step();
      return all;
    };
    expect_same_bits(train(true), train(false), c.name);
  });
}

TEST(ZeroRedundancyOptimizer, ResumesAtAnyNumberOfRanksAndInTheUnshardedOptimizer) {
  for (const auto& c : cases()) {
    const int size = 3;
    std::string saved;
    Parameters at_save;
    comm::run_as_threads(size, [&](std::shared_ptr<comm::Group> group) {
      auto parameters = make_parameters(at::kFloat);
      ZeroRedundancyOptimizer optimizer(group, parameters, c.factory);
      optimizer.param_groups()[0].options().set_lr(0.03);
      for (int step = 0; step < 3; ++step) {
        set_gradients(parameters, group->rank(), size, step);
        optimizer.step();
      }
      std::ostringstream stream;
      torch::save(optimizer, stream);
      if (group->rank() == 0) {
        saved = stream.str();
        for (const auto& parameter : parameters) at_save.push_back(parameter.detach().clone());
      } else {
        std::istringstream other(stream.str());
        EXPECT_THAT([&] { torch::load(optimizer, other); },
                    ThrowsMessage<CheckpointError>(
                        HasSubstr("rank " + std::to_string(group->rank()) + "'s")));
      }
    });
    const auto resume = [&](torch::optim::Optimizer& optimizer, Parameters& parameters,
                            const auto& fill) {
      {
        const torch::NoGradGuard no_gradients;
        for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(at_save[i]);
      }
      std::istringstream stream(saved);
      torch::load(optimizer, stream);
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.03);
      for (int step = 3; step < 6; ++step) {
        fill(parameters, step);
        optimizer.step();
      }
    };
    auto expected = make_parameters(at::kFloat);
    auto plain = c.factory({torch::optim::OptimizerParamGroup(expected)});
    plain->param_groups()[0].options().set_lr(0.03);
    for (int step = 0; step < 6; ++step) {
      set_mean_gradients(expected, size, step);
      plain->step();
    }
    auto parameters = make_parameters(at::kFloat);
    auto again = c.factory({torch::optim::OptimizerParamGroup(parameters)});
    resume(*again, parameters, [&](Parameters& p, int step) { set_mean_gradients(p, size, step); });
    expect_same_bits(parameters, expected, c.name + " resumed unsharded");
    comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      auto mine = make_parameters(at::kFloat);
      ZeroRedundancyOptimizer optimizer(group, mine, c.factory, {.average_gradients = false});
      resume(optimizer, mine, [&](Parameters& p, int step) { set_mean_gradients(p, size, step); });
      expect_same_bits(mine, expected, c.name + " resumed on 2 ranks");
    });
  }
}

TEST(ZeroRedundancyOptimizer, RefusesWhatItCannotShard) {
  const auto& adamw = cases()[0].factory;
  comm::run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
    const auto parameters = make_parameters(at::kFloat);
    EXPECT_THAT(
        [&] {
          ZeroRedundancyOptimizer(group, parameters, [](const Groups& groups) {
            return std::make_unique<torch::optim::LBFGS>(groups);
          });
        },
        ThrowsMessage<ConfigError>(HasSubstr("LBFGS")));
    EXPECT_THAT(
        [&] { ZeroRedundancyOptimizer(group, Parameters{torch::zeros({3}, at::kInt)}, adamw); },
        ThrowsMessage<ConfigError>(HasSubstr("Int")));
    EXPECT_THAT(
        [&] { ZeroRedundancyOptimizer(group, Parameters{torch::zeros({1}).expand({3})}, adamw); },
        ThrowsMessage<ConfigError>(HasSubstr("parameter 0")));
    EXPECT_THAT([&] { ZeroRedundancyOptimizer(group, parameters, adamw, {.bucket_bytes = 0}); },
                ThrowsMessage<ConfigError>(HasSubstr("bucket_bytes")));
    EXPECT_THAT(
        [&] {
          ZeroRedundancyOptimizer(group, parameters, [](const Groups& groups) {
            return std::make_unique<torch::optim::SGD>(groups[0].params(),
                                                       torch::optim::SGDOptions(0.1));
          }).add_param_group({Parameters{torch::zeros({2})}});
        },
        ThrowsMessage<ConfigError>(HasSubstr("factory")));
  });
}

TEST(ZeroRedundancyOptimizer, TellsEveryRankThatParametersDiffer) {
  comm::run_as_threads(3, [](std::shared_ptr<comm::Group> group) {
    const Parameters parameters{torch::zeros({group->rank() == 2 ? 5 : 4})};
    EXPECT_THAT([&] { ZeroRedundancyOptimizer(group, parameters, cases()[0].factory); },
                ThrowsMessage<ConfigError>(HasSubstr("parameters of rank 2 differ")));
  });
}

TEST(ZeroRedundancyOptimizer, TellsEveryRankOfASparseGradient) {
  comm::run_as_threads(2, [](std::shared_ptr<comm::Group> group) {
    Parameters parameters{torch::zeros({4, 2}).requires_grad_()};
    ZeroRedundancyOptimizer optimizer(group, parameters, cases()[0].factory);
    const auto dense = torch::ones({4, 2});
    parameters[0].mutable_grad() = group->rank() == 1 ? dense.to_sparse() : dense;
    EXPECT_THAT([&] { optimizer.step(); },
                ThrowsMessage<ConfigError>(HasSubstr("4 x 2 has a sparse gradient on rank 1")));
  });
}

TEST(ZeroRedundancyOptimizer, NoticesParametersAddedThroughTheBase) {
  ZeroRedundancyOptimizer optimizer(comm::single(), make_parameters(at::kFloat),
                                    cases()[0].factory);
  static_cast<torch::optim::Optimizer&>(optimizer).add_param_group({Parameters{torch::zeros({3})}});
  EXPECT_THAT([&] { optimizer.step(); },
              ThrowsMessage<ConfigError>(HasSubstr("ZeroRedundancyOptimizer::add_param_group")));
}

TEST(ZeroRedundancyOptimizer, RefusesAnArchiveOfOtherParameters) {
  ZeroRedundancyOptimizer large(comm::single(), make_parameters(at::kFloat), cases()[0].factory);
  ZeroRedundancyOptimizer small(comm::single(), Parameters{torch::zeros({3})}, cases()[0].factory);
  std::ostringstream stream;
  torch::save(small, stream);
  std::istringstream saved(stream.str());
  EXPECT_THROW(torch::load(large, saved), CheckpointError);
}

}  // namespace
}  // namespace zero
