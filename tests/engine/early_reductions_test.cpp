// Stages 0 and 1 between hosts: gradients that are reduced beside the backward pass (Note [Early
// reductions] in engine/early_reductions.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/engine/worlds.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {
namespace {

using comm::Collective;

constexpr World kTwoOnOneHost{1, 2};

Collective sum_at(int stage) {
  return stage == 0 ? Collective::all_reduce : Collective::reduce_scatter;
}

// Sums that have been started.
int64_t sums(comm::Group& group, int stage) { return group.traffic().count(sum_at(stage)).calls; }

using Body = std::function<void(Engine& engine, Uneven& model, int rank)>;

// The weights after `body`, the same on all ranks.
std::vector<at::Tensor> trained(World world, const Config& c, const Body& body, int block = 0,
                                const Optimizer& optimizer = AdamW{.lr = 1e-2}) {
  std::mutex mutex;
  std::vector<std::vector<at::Tensor>> all(static_cast<size_t>(world.hosts * world.ranks_a_host));
  run_in(
      world,
      [&](auto group) {
        auto model = std::make_shared<Uneven>();
        Engine engine(model, optimizer, c, group);
        body(engine, *model, group->rank());
        auto mine = weights(engine);
        const std::lock_guard lock(mutex);
        all[static_cast<size_t>(group->rank())] = std::move(mine);
      },
      block);
  for (const auto& other : all) expect_equal(other, all.front());
  return all.front();
}

void expect_the_bits_of_one_host(const Config& c, const Body& body) {
  expect_equal(trained(kTwoByOne, c, body), trained(kTwoOnOneHost, c, body));
  expect_equal(trained(kTwoByTwo, c, body), trained(kFourByOne, c, body, 2));
}

TEST(EarlyReductions, GiveTheBitsOfOneHost) {
  for (const int stage : {0, 1}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 3}) {
        for (const bool converts : {false, true}) {
          SCOPED_TRACE(testing::Message() << "stage " << stage << ", bf16 " << bf16 << ", k " << k
                                          << ", converts " << converts);
          auto c = clipped(stage, bf16, k);
          if (converts) c.communication_dtype = bf16 ? DtypeName::fp32 : DtypeName::bf16;
          expect_the_bits_of_one_host(c, [&](Engine& engine, Uneven& model, int rank) {
            for (int64_t i = 0; i < 4 * k; ++i) {
              engine.backward(model.loss(rank, i, true));
              engine.step();
            }
          });
        }
      }
    }
  }
}

TEST(EarlyReductions, StartInTheLastPassOfAStepOnceTheOrderIsKnown) {
  for (const int stage : {0, 1}) {
    for (const int64_t k : {1, 2}) {
      for (const auto world : {kTwoByOne, kTwoByTwo, kTwoOnOneHost}) {
        run_in(world, [&](auto group) {
          auto model = std::make_shared<Uneven>();
          Engine engine(model, AdamW{}, config(stage, false, k), group);
          int64_t units = 0;
          for (int64_t step = 0; step < 3; ++step) {
            const int64_t before = sums(*group, stage);
            for (int64_t i = 1; i <= k; ++i) {
              engine.backward(model->loss(group->rank(), step, true));
              const int64_t started = sums(*group, stage) - before;
              const bool early = world.hosts > 1 && step > 0 && i == k;
              EXPECT_EQ(started, early ? units : 0) << "step " << step << ", pass " << i;
              engine.step();
            }
            units = sums(*group, stage) - before;
            EXPECT_GT(units, 2);
          }
        });
      }
    }
  }
}

// The layers that a rank uses in a step.
enum class Use { net, with_extra, nothing };

at::Tensor loss_with(Uneven& model, Use use, int rank, int64_t step) {
  return model.loss(use == Use::with_extra ? 1 : 0, use == Use::with_extra ? step + rank : 0,
                    false);
}

// A layer in the middle of the order that a rank leaves out, or all, stops nobody and changes no
// sum.
TEST(EarlyReductions, GoOnWhereARankLeavesLayersOut) {
  const std::vector<std::vector<Use>> steps{
      {Use::with_extra, Use::with_extra}, {Use::with_extra, Use::net},
      {Use::net, Use::with_extra},        {Use::net, Use::net},
      {Use::net, Use::with_extra},        {Use::with_extra, Use::nothing},
      {Use::nothing, Use::net},           {Use::with_extra, Use::with_extra}};
  for (const int stage : {0, 1}) {
    for (const bool converts : {false, true}) {
      auto c = clipped(stage, false);
      if (converts) c.communication_dtype = DtypeName::bf16;
      expect_the_bits_of_one_host(c, [&](Engine& engine, Uneven& model, int rank) {
        for (size_t step = 0; step < steps.size(); ++step) {
          const auto use = steps[step][static_cast<size_t>(rank % 2)];
          if (use != Use::nothing)
            engine.backward(loss_with(model, use, rank, static_cast<int64_t>(step)));
          engine.step();
        }
      });
    }
  }
}

// All ranks have begun the same in each step, or the next collectives would be taken for others.
TEST(EarlyReductions, AreTheSameOnAllRanksWhenAPassEnds) {
  for (const int stage : {0, 1}) {
    run_in(kTwoByOne, [&](auto group) {
      auto model = std::make_shared<Uneven>();
      Engine engine(model, AdamW{}, config(stage), group);
      for (int64_t step = 0; step < 4; ++step) {
        const bool leaves_out = step == 2 && group->rank() == 1;
        engine.backward(loss_with(*model, leaves_out ? Use::net : Use::with_extra, 0, step));
        auto sum = group->empty(1000, at::kFloat, Category::communication);
        sum.fill_(static_cast<float>(group->rank() + 1));
        group->all_reduce(sum).wait();
        EXPECT_EQ(sum.sum().template item<float>(), 3000);
        if (step == 2) engine.zero_grad();
        if (step != 2) engine.step();
      }
    });
  }
}

// zero_grad after a pass: the reductions were for nothing, so there are none any more.
TEST(EarlyReductions, ThatAreDroppedAreTheLast) {
  for (const int stage : {0, 1}) {
    const auto body = [&](Engine& engine, Uneven& model, int rank) {
      for (int64_t step = 0; step < 5; ++step) {
        const int64_t before = sums(engine.group(), stage);
        engine.backward(model.loss(rank, step, true));
        const bool hosts = engine.group().topology().hosts > 1;
        EXPECT_EQ(sums(engine.group(), stage) > before, hosts && step == 1) << step;
        if (step == 1) {
          engine.zero_grad();
          engine.backward(model.loss(rank, step + 9, true));
        }
        engine.step();
      }
    };
    expect_the_bits_of_one_host(clipped(stage, false), body);
  }
}

// All ranks drop what one rank has begun, also if others had no pass.
TEST(EarlyReductions, AreDroppedOnAllRanksWhereSomeHadNoPass) {
  for (const int stage : {0, 1}) {
    expect_the_bits_of_one_host(clipped(stage, false),
                                [&](Engine& engine, Uneven& model, int rank) {
                                  for (int64_t step = 0; step < 5; ++step) {
                                    if (step == 2) {
                                      if (rank % 2 == 0)
                                        engine.backward(model.loss(rank, step + 9, true));
                                      engine.zero_grad();
                                    }
                                    engine.backward(model.loss(rank, step, true));
                                    engine.step();
                                  }
                                });
  }
}

TEST(EarlyReductions, AreNoneWhereSeveralPassesBringAStepsGradients) {
  for (const int stage : {0, 1}) {
    expect_the_bits_of_one_host(clipped(stage, false),
                                [&](Engine& engine, Uneven& model, int rank) {
                                  for (int64_t step = 0; step < 3; ++step) {
                                    const int64_t before = sums(engine.group(), stage);
                                    engine.backward(model.loss(rank, step, true));
                                    EXPECT_EQ(sums(engine.group(), stage), before);
                                    engine.backward(model.loss(rank, step + 7, rank != 0));
                                    EXPECT_EQ(sums(engine.group(), stage), before);
                                    engine.step();
                                  }
                                });
  }
}

TEST(EarlyReductions, AddWhatComesForAUnitThatHasBeenReducedAndThenWaitForTheEnd) {
  for (const int stage : {0, 1}) {
    const auto body = [&](Engine& engine, Uneven& model, int rank) {
      for (int64_t step = 0; step < 5; ++step) {
        const int64_t before = sums(engine.group(), stage);
        engine.backward(model.loss(rank, step, true));
        const int64_t started = sums(engine.group(), stage) - before;
        EXPECT_EQ(started > 0, engine.group().topology().hosts > 1 && (step == 1 || step == 2));
        // The later steps have a second loss, on rank 1 of other layers too.
        if (step >= 2) engine.backward(model.loss(rank, step + 7, rank != 0));
        engine.step();
        EXPECT_EQ(engine.group().ledger()->usage(Category::gradient_buckets).current, 0);
      }
    };
    const auto expect_near = [](const auto& a, const auto& b) {
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-5, 1e-6));
    };
    const Optimizer sgd = Sgd{.lr = 0.1};
    const auto c = config(stage);
    expect_near(trained(kTwoByOne, c, body, 0, sgd), trained(kTwoOnOneHost, c, body, 0, sgd));
    expect_near(trained(kTwoByTwo, c, body, 0, sgd), trained(kFourByOne, c, body, 2, sgd));
  }
}

// The pass that a rank makes before the one that counts.
enum class Pass { none, whole, throws_last, throws_first };

// Returns a loss whose backward pass throws: in the last layer, before any unit is complete, or in
// the first layer that forward meets, which backward meets last.
at::Tensor loss_that(Pass pass, Uneven& model, int rank, int64_t step) {
  const auto fail = [](const at::Tensor&) { throw std::runtime_error("as planned"); };
  auto x = input(rank, step, at::kFloat).requires_grad_(true);
  if (pass == Pass::throws_last) x.register_hook(fail);
  const auto y = model.net->forward(torch::tanh(model.extra(x)));
  if (pass == Pass::throws_first) y.register_hook(fail);
  return y.pow(2).mean();
}

// Gradients that a pass has begun to reduce when it fails are dropped on all ranks, wherever the
// others are, and later ones go on.
TEST(EarlyReductions, OfPassesThatThrowAreDroppedOnAll) {
  struct Row {
    const char* name;
    Pass rank0, rank1;
    bool begun;  // on rank 0
    void (Engine::*drop)();
  };
  const std::vector<Row> rows{
      {"on both", Pass::throws_last, Pass::throws_last, true, nullptr},
      {"on one", Pass::whole, Pass::throws_last, true, &Engine::drop_gradients},
      {"where the other had none", Pass::none, Pass::throws_last, false, &Engine::drop_gradients},
      {"and are cleared", Pass::none, Pass::throws_last, false, &Engine::zero_grad},
      {"in two places", Pass::throws_first, Pass::throws_last, true, &Engine::zero_grad},
      {"in two places, and nobody drops them", Pass::throws_first, Pass::throws_last, true,
       nullptr}};
  for (const int stage : {0, 1}) {
    const auto c = clipped(stage, false);
    const auto body = [&](const Row* fails) {
      return [&, fails](Engine& engine, Uneven& model, int rank) {
        for (int64_t step = 0; step < 4; ++step) {
          if (fails != nullptr && step == 2) {
            const int64_t before = sums(engine.group(), stage);
            const auto pass = rank == 0 ? fails->rank0 : fails->rank1;
            if (pass == Pass::whole) engine.backward(loss_that(pass, model, rank, step));
            if (pass == Pass::throws_first || pass == Pass::throws_last) {
              EXPECT_THROW(engine.backward(loss_that(pass, model, rank, step)), std::runtime_error);
            }
            EXPECT_EQ(sums(engine.group(), stage) > before, rank == 1 || fails->begun);
            if (fails->drop != nullptr) (engine.*fails->drop)();
          }
          engine.backward(model.loss(rank, step, true));
          engine.step();
          engine.drop_gradients();  // nothing
        }
      };
    };
    const auto expected = trained(kTwoByOne, c, body(nullptr));
    for (const auto& row : rows) {
      SCOPED_TRACE(testing::Message() << "stage " << stage << ", " << row.name);
      expect_equal(trained(kTwoByOne, c, body(&row)), expected);
    }
  }
}

// The sums of a rank whose pass has ended hold what the others' failed passes brought.
TEST(EarlyReductions, AreRefusedWhereTheOthersWereOfAPassThatThrew) {
  for (const int stage : {0, 1}) {
    const auto c = clipped(stage, false);
    const auto body = [](bool fails) {
      return [fails](Engine& engine, Uneven& model, int rank) {
        for (int64_t step = 0; step < 4; ++step) {
          if (fails && step == 2) {
            const auto pass = rank == 0 ? Pass::whole : Pass::throws_last;
            if (rank == 0) {
              engine.backward(loss_that(pass, model, rank, step));
            } else {
              EXPECT_THROW(engine.backward(loss_that(pass, model, rank, step)), std::runtime_error);
              engine.backward(model.loss(rank, step, true));
            }
            const auto message = message_of<Error>([&] { engine.step(); });
            EXPECT_THAT(message, testing::HasSubstr("thrown on some ranks"));
            EXPECT_EQ(message_of<Error>([&] { engine.step(); }), message);
            engine.zero_grad();
          }
          engine.backward(model.loss(rank, step, true));
          engine.step();
        }
      };
    };
    expect_equal(trained(kTwoByOne, c, body(true)), trained(kTwoByOne, c, body(false)));
  }
}

}  // namespace
}  // namespace zero
