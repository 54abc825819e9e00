// Stages 2 and 3 between hosts: the gradient of a tied weight leaves while it is made (Note [Tied
// gradient in tiles] in engine/look_up_gradient.h). At stage 3 its look-up fetches rows (Note
// [Look-ups by rows] in engine/row_look_ups.h), and an output projection begins with the rows that
// are here (Note [Logits in blocks] in models/layers/cross_entropy.cpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/counted_step.h"
#include "tests/engine/worlds.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/gradient_place.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/tied_embedding.h"
#include "zero/models/llama/llama.h"
#include "zero/models/recompute/recompute.h"
#include "zero/paging/pager.h"

namespace zero {
namespace {

constexpr World kThreeByOne{3, 1};

// Three tiles and a part of one; slices of three ranks end within a row.
Gpt2Config tiled() {
  return {.vocab_size = 3 * kTileRows + 101, .context = 16, .width = 32, .layers = 2, .heads = 2};
}

void set_values(const torch::nn::Module& model) {
  const torch::NoGradGuard guard;
  double phase = 0.3;
  for (auto& p : model.parameters())  // ranks are threads that share the generator
    p.copy_(torch::sin(torch::arange(p.numel()) * 0.37 + (phase += 1.1)).mul(0.05).view(p.sizes()));
}

Gpt2 make_model() {
  Gpt2 model(tiled());
  set_values(*model);
  return model;
}

// Rows that repeat within a rank, that several ranks have, and the first and the last.
at::Tensor tokens_of(int rank, int64_t step, int64_t rows = 2) {
  auto tokens =
      torch::arange(rows * 16).mul(211 + 7 * step + rank).remainder(1200).view({rows, 16});
  tokens[0][0] = 0;
  tokens[0][1] = tiled().vocab_size - 1;
  tokens[0].slice(0, 4, 8) = 2081;
  tokens[0].slice(0, 9, 12) = 17;
  return tokens;
}

template <class Model>
at::Tensor loss_of(Model& model, int rank, int64_t step, int64_t rows = 2) {
  const auto tokens = tokens_of(rank, step, rows);
  return model->loss(tokens, tokens.roll(-1, 1));
}

Config tied_config(int stage, bool bf16, int64_t k = 1) {
  auto c = clipped(stage, bf16, k);
  c.unit_bytes = 100'000;
  return c;
}

struct Trained {
  std::vector<float> losses;
  std::vector<double> norms;
  std::vector<at::Tensor> weights;
  std::vector<int64_t> sums;  // reduce-scatters of each step
  // By step, the bytes of all-gathers, and by the formula, which has units that stay twice.
  std::vector<std::array<int64_t, 2>> gathered, formula;
};

using Loss = std::function<at::Tensor(Gpt2& model, int rank, int64_t pass)>;

// That of rank 0. The ledger's bytes are held against the formula in each step.
Trained trained(World world, const Config& c, int64_t steps, const Loss& loss, int block = 0) {
  return train_in(world, block, [&](const std::shared_ptr<comm::Group>& group) {
    auto model = make_model();
    Engine engine(model.ptr(), AdamW{.lr = 1e-2}, c, group);
    Trained mine;
    for (int64_t step = 0; step < steps; ++step) {
      const auto sent = counted_step(
          engine, *group, step, [&](int64_t pass) { return loss(model, group->rank(), pass); },
          mine);
      mine.sums.push_back(sent.reduce_scatters.calls);
      mine.gathered.push_back({sent.all_gathers.logical_bytes, sent.all_gathers.link_bytes});
      const auto formula = engine.traffic_formula();
      mine.formula.push_back({formula.all_gather, formula.all_gather_link});
    }
    mine.weights = weights(engine);
    return mine;
  });
}

Trained trained(World world, const Config& c, int block = 0) {
  return trained(
      world, c, 4, [](Gpt2& model, int rank, int64_t pass) { return loss_of(model, rank, pass); },
      block);
}

void expect_same_bits(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  expect_equal(a.weights, b.weights);
}

// Pieces of a slice, less the one that a whole unit is, and the message of the look-ups.
int64_t more_sums(World world) {
  const int64_t slice = tiled().vocab_size / (world.hosts * world.ranks_a_host) + 1;
  return (slice + kTileRows - 1) / kTileRows;
}

TEST(TiedGradient, HasTheBitsOfOneHostAndLeavesInPieces) {
  for (const auto world : {kTwoByOne, kTwoByTwo, kThreeByOne}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        SCOPED_TRACE(testing::Message() << world.hosts << " x " << world.ranks_a_host << ", bf16 "
                                        << bf16 << ", k " << k);
        const World one{1, world.hosts * world.ranks_a_host};
        const int block = world.ranks_a_host > 1 ? world.ranks_a_host : 0;
        const auto whole = trained(one, tied_config(2, bf16, k), block);
        EXPECT_EQ(whole.sums[3], whole.sums[0]);
        if (k == 1) {
          expect_same_bits(trained(world, tied_config(0, bf16)), whole);
          expect_same_bits(trained(world, tied_config(1, bf16)), whole);
        }
        for (const int stage : {2, 3}) {
          const auto in_tiles = trained(world, tied_config(stage, bf16, k));
          expect_same_bits(in_tiles, whole);
          EXPECT_EQ(in_tiles.sums[0], whole.sums[0]);  // the first step shows whether it can
          for (const size_t step : {1, 2, 3}) {
            EXPECT_EQ(in_tiles.sums[step], whole.sums[0] + more_sums(world));
            for (const size_t bytes : {0, 1}) {  // those of the rows
              const auto more = in_tiles.gathered[step][bytes] - in_tiles.gathered[0][bytes];
              EXPECT_EQ(more, in_tiles.formula[step][bytes] - in_tiles.formula[0][bytes]);
              EXPECT_EQ(more > 0, stage == 3);
            }
          }
        }
      }
    }
  }
}

// Each of these makes the third of five steps one in which the gradient stays whole.
TEST(TiedGradient, StaysWholeWhereARankCannotGiveTiles) {
  const auto plain = [](Gpt2& model, int rank, int64_t pass) { return loss_of(model, rank, pass); };
  const auto third = [&](const Loss& other) -> Loss {
    return [other, plain](Gpt2& model, int rank, int64_t pass) {
      return pass == 2 ? other(model, rank, pass) : plain(model, rank, pass);
    };
  };
  const std::vector<std::pair<std::string, Loss>> cases{
      {"a rank computes a loss without the head", third([&](Gpt2& model, int rank, int64_t pass) {
         if (rank == 0) return plain(model, rank, pass);
         return model->forward(tokens_of(rank, pass)).to(at::kFloat).pow(2).mean();
       })},
      {"a rank computes two losses and uses one", third([&](Gpt2& model, int rank, int64_t pass) {
         if (rank == 1) plain(model, rank, pass + 5);
         return plain(model, rank, pass);
       })},
      {"two losses are added", third([&](Gpt2& model, int rank, int64_t pass) {
         return plain(model, rank, pass) + plain(model, rank, pass + 5);
       })},
      {"more tokens than columns",
       third([](Gpt2& model, int rank, int64_t pass) { return loss_of(model, rank, pass, 3); })}};
  for (const auto& [name, loss] : cases) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(name + (bf16 ? ", bf16" : ""));
      const auto whole = trained({1, 2}, tied_config(2, bf16), 6, loss);
      for (const int stage : {2, 3}) {
        const auto in_tiles = trained(kTwoByOne, tied_config(stage, bf16), 6, loss);
        expect_same_bits(in_tiles, whole);
        EXPECT_EQ(in_tiles.sums[1], whole.sums[0] + more_sums(kTwoByOne));
        EXPECT_EQ(in_tiles.sums[2], whole.sums[0]);
        EXPECT_EQ(in_tiles.sums[3], whole.sums[0]);  // no rank says anything of rows
        EXPECT_EQ(in_tiles.sums[4], whole.sums[0] + more_sums(kTwoByOne));
      }
    }
  }
}

TEST(TiedGradient, StaysWholeWhereSomethingElseUsesTheWeight) {
  for (const bool bf16 : {false, true}) {
    const Loss loss = [](Gpt2& model, int rank, int64_t pass) {
      return loss_of(model, rank, pass) + model->wte->weight.to(at::kFloat).pow(2).mean();
    };
    const auto whole = trained({1, 2}, tied_config(3, bf16), 3, loss);
    const auto between = trained(kTwoByOne, tied_config(3, bf16), 3, loss);
    expect_same_bits(between, whole);
    EXPECT_EQ(between.sums, whole.sums);
  }
}

// A use that first appears in a step in tiles is added as a late gradient.
TEST(TiedGradient, AddsAUseThatComesInAStepInTiles) {
  const Loss loss = [](Gpt2& model, int rank, int64_t pass) {
    auto loss = loss_of(model, rank, pass);
    if (pass != 2) return loss;
    return loss + model->wte->weight.pow(2).sum();
  };
  const auto whole = trained({1, 2}, tied_config(2, false), 3, loss);
  std::vector<at::Tensor> late;
  run_in(kTwoByOne, [&](auto group) {
    auto model = make_model();
    Engine engine(model.ptr(), AdamW{.lr = 1e-2}, tied_config(2, false), group);
    for (int64_t i = 0; i < 3; ++i) {
      engine.backward(loss(model, group->rank(), i));
      engine.step();
    }
    const auto mine = weights(engine);
    if (group->rank() == 0) late = mine;
  });
  ASSERT_EQ(late.size(), whole.weights.size());
  for (size_t i = 0; i < late.size(); ++i)
    EXPECT_TRUE(torch::allclose(late[i], whole.weights[i], 1e-3, 1e-4)) << i;
}

// Two losses that are passed one after the other before a step: each pass is taken for the last.
TEST(TiedGradient, AddsUpOverPassesOfAStep) {
  for (const bool bf16 : {false, true}) {
    const auto train_twice = [&](World world) {
      std::vector<at::Tensor> result;
      run_in(world, [&](auto group) {
        auto model = make_model();
        Engine engine(model.ptr(), AdamW{.lr = 1e-2}, tied_config(2, bf16), group);
        for (int64_t step = 0; step < 3; ++step) {
          engine.backward(loss_of(model, group->rank(), step));
          engine.backward(loss_of(model, group->rank(), step + 9));
          engine.step();
        }
        const auto mine = weights(engine);
        if (group->rank() == 0) result = mine;
      });
      return result;
    };
    expect_equal(train_twice(kTwoByOne), train_twice({1, 2}));
  }
}

// A pass that throws on all ranks after its pieces have left may be made again.
TEST(TiedGradient, LeavesNothingOfAPassThatThrows) {
  const auto run = [](World world, bool throws) {
    std::vector<at::Tensor> result;
    run_in(world, [&](auto group) {
      auto model = make_model();
      Engine engine(model.ptr(), AdamW{.lr = 1e-2}, tied_config(2, true), group);
      for (int64_t step = 0; step < 4; ++step) {
        if (throws && step == 2) {
          const auto loss = loss_of(model, group->rank(), step);
          model->ln_f->weight.register_hook(
              [armed = std::make_shared<bool>(true)](const at::Tensor& gradient) {
                if (std::exchange(*armed, false)) throw std::runtime_error("no more");
                return gradient;
              });
          EXPECT_ANY_THROW(engine.backward(loss));
        }
        engine.backward(loss_of(model, group->rank(), step));
        engine.step();
      }
      const auto mine = weights(engine);
      if (group->rank() == 0) result = mine;
    });
    return result;
  };
  expect_equal(run(kTwoByOne, true), run({1, 2}, false));
}

// Trains five steps at stage 3 between hosts. `deed` makes the loss of the third, from which the
// weight's rows are not always looked up; the others are plain.
using Deed = std::function<at::Tensor(Engine& engine, Gpt2& model, int rank)>;
constexpr int64_t kDeed = 2;

struct Done {
  std::vector<at::Tensor> weights;
  std::vector<double> norms;
  std::vector<bool> rows;  // by step, whether the link carried rows
};

Done done(World world, int stage, bool bf16, const Deed& deed) {
  return train_in(world, 0, [&](const std::shared_ptr<comm::Group>& group) {
    auto model = make_model();
    Engine engine(model.ptr(), AdamW{.lr = 1e-2}, tied_config(stage, bf16), group);
    Done mine;
    int64_t plain = 0;
    for (int64_t step = 0; step < 5; ++step) {
      engine.backward(step == kDeed ? deed(engine, model, group->rank())
                                    : loss_of(model, group->rank(), step));
      mine.norms.push_back(engine.step().grad_norm);
      EXPECT_EQ(group->ledger()->usage(Category::gathered_units).current, 0);
      const auto formula = engine.traffic_formula().all_gather;
      if (step == 0) plain = formula;
      mine.rows.push_back(formula > plain);
    }
    mine.weights = weights(engine);
    return mine;
  });
}

at::Tensor look_up(Gpt2& model, int rank) {
  const auto& weight = model->wte->weight;
  return tied_embedding(weight, tokens_of(rank, 9), gradient_slot(weight));
}

// A look-up that is computed again in backward, and the head.
at::Tensor recomputed(Gpt2& model, int rank) {
  const auto tokens = tokens_of(rank, kDeed);
  const auto& weight = model->wte->weight;
  LinearCrossEntropyOptions options;
  options.weight_in_backward = announce_rows(weight, tokens);
  options.weight_slot = gradient_slot(weight, options.weight_in_backward);
  const auto one = torch::ones({1}, weight.scalar_type()).requires_grad_();
  const auto hidden = recompute(
      [=, slot = options.weight_slot](const at::Tensor& scale) {
        return tied_embedding(weight, tokens, slot) * scale;
      },
      one);
  return linear_cross_entropy(hidden.view({-1, hidden.size(-1)}), weight,
                              tokens.roll(-1, 1).reshape({-1}), options);
}

// Ranks that do different things stay together, and have the weights of one host.
TEST(LookUps, OfRowsAreSafeWhateverARankDoes) {
  const auto plain = [](Gpt2& model, int rank) { return loss_of(model, rank, kDeed); };
  const std::vector<std::pair<std::string, Deed>> cases{
      {"a rank evaluates in a scope, with gradients on",
       [&](Engine& engine, Gpt2& model, int rank) {
         {
           const Gathered scope(engine, {});
           if (rank == 0) loss_of(model, rank, 7);
         }
         return plain(model, rank);
       }},
      {"a rank evaluates without gradients before the others compute",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         if (rank == 1) {
           const torch::NoGradGuard guard;
           loss_of(model, rank, 7);
         }
         return plain(model, rank);
       }},
      {"a rank evaluates with gradients before the others compute",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         if (rank == 1) loss_of(model, rank, 7);
         return plain(model, rank);
       }},
      {"all evaluate, with gradients and without, and one has more",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         loss_of(model, rank, 7);
         {
           const torch::NoGradGuard guard;
           for (int i = 0; i <= rank; ++i) model->logits_last(tokens_of(rank, i));
         }
         return plain(model, rank);
       }},
      {"a pass throws before its look-up",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         const auto wrong = tokens_of(rank, kDeed) + (rank == 0 ? tiled().vocab_size : 0);
         if (rank == 0) {
           EXPECT_ANY_THROW(model->loss(wrong, wrong));
         }
         return plain(model, rank);
       }},
      {"a pass ends behind its look-up, and is made again",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         if (rank == 0) look_up(model, rank);
         return plain(model, rank);
       }},
      {"a rank looks up alone",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         if (rank == 0) return plain(model, rank);
         return look_up(model, rank).to(at::kFloat).pow(2).mean();
       }},
      {"all look up alone",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         return look_up(model, rank).to(at::kFloat).pow(2).mean();
       }},
      {"no rank uses the weight as before, and one saves the states with the others",
       [&](Engine& engine, Gpt2& model, int rank) {
         if (rank == 1) look_up(model, rank);
         if (rank == 0) plain(model, rank);
         engine.parameter("wte.weight");
         return plain(model, rank);
       }},
      {"a rank stops behind its look-up, and all ask which gradients there are",
       [&](Engine& engine, Gpt2& model, int rank) {
         if (rank == 0) look_up(model, rank);
         if (rank == 1) plain(model, rank);
         engine.gradients_present();
         return plain(model, rank);
       }},
      {"a rank has other numbers of tokens",
       [&](Engine& /*engine*/, Gpt2& model, int rank) {
         return loss_of(model, rank, kDeed, rank == 0 ? 1 : 2);
       }},
      {"the look-up is computed again",
       [&](Engine& /*engine*/, Gpt2& model, int rank) { return recomputed(model, rank); }},
      {"the weight is written in a scope, and steps go on",
       [&](Engine& engine, Gpt2& model, int rank) {
         {
           const Gathered scope(engine, {model->wte->weight}, Gathered::Access::write);
           const torch::NoGradGuard guard;
           model->wte->weight.mul_(1.5);
         }
         return plain(model, rank);
       }}};
  for (const auto& [name, deed] : cases) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(name + (bf16 ? ", bf16" : ""));
      const auto whole = done({1, 2}, 2, bf16, deed);
      const auto rows = done(kTwoByOne, 3, bf16, deed);
      expect_equal(rows.weights, whole.weights);
      EXPECT_EQ(rows.norms, whole.norms);
      EXPECT_FALSE(rows.rows[0]);
      EXPECT_TRUE(rows.rows[1]);
    }
  }
}

// Between steps the states are saved and loaded, and two engines take turns within a step.
TEST(LookUps, LeaveNothingWhereAnEngineEndsBehindThem) {
  train_in(kTwoByOne, 0, [&](const std::shared_ptr<comm::Group>& group) {
    for (int engines = 0; engines < 2; ++engines) {
      auto model = make_model();
      Engine engine(model.ptr(), AdamW{.lr = 1e-2}, tied_config(3, true), group);
      for (int64_t step = 0; step < 3; ++step) {
        engine.backward(loss_of(model, group->rank(), step));
        engine.step();
      }
      look_up(model, group->rank());
    }
    EXPECT_EQ(group->ledger()->usage(Category::gathered_units).current, 0);
    return Done{};
  });
}

TEST(LookUps, OfRowsGoOnAfterALoadAndBesideAnotherEngine) {
  const TemporaryFolder folder;
  const auto run = [&](World world, int stage) {
    return train_in(world, 0, [&](const std::shared_ptr<comm::Group>& group) {
      auto model = make_model();
      auto second = make_model();
      const auto c = tied_config(stage, true);
      Engine engine(model.ptr(), AdamW{.lr = 1e-2}, c, group);
      Engine other(second.ptr(), AdamW{.lr = 1e-2}, c, group);
      const auto name = (folder / std::to_string(world.hosts)).string();
      Done mine;
      for (int64_t step = 0; step < 6; ++step) {
        if (step == 2) engine.save(name);
        const auto first = loss_of(model, group->rank(), step);
        const auto next = loss_of(second, group->rank(), step + 1);
        engine.backward(first);
        other.backward(next);
        mine.norms.push_back(other.step().grad_norm);
        mine.norms.push_back(engine.step().grad_norm);
        if (step == 3) engine.load(name);
      }
      mine.weights = weights(engine);
      for (const auto& weight : weights(other)) mine.weights.push_back(weight);
      return mine;
    });
  };
  const auto whole = run({1, 2}, 2);
  const auto rows = run(kTwoByOne, 3);
  expect_equal(rows.weights, whole.weights);
  EXPECT_EQ(rows.norms, whole.norms);
}

struct EarlyCase {
  World world;
  std::vector<int64_t> rows;  // by rank: those of the whole blocks in its slice
};
const std::vector<EarlyCase> kEarlyCases{
    {kTwoByOne, {kTileRows, kTileRows + 101}},  // slices of 3124 rows
    {kTwoByTwo, {0, 0, 0, 101}},                // 1562
    {kThreeByOne, {kTileRows, 0, 101}}};        // 2082

template <class Model>
Trained trained_early(const EarlyCase& of, const std::function<Model()>& make, const Config& c,
                      int block = 0) {
  return train_in(of.world, block, [&](const std::shared_ptr<comm::Group>& group) {
    auto model = make();
    Engine engine(model.ptr(), AdamW{.lr = 1e-2}, c, group);
    Trained mine;
    for (int64_t step = 0; step < 4; ++step) {
      const auto before = engine.pager() ? engine.pager()->counts() : paging::PagerCounts{};
      const auto loss = loss_of(model, group->rank(), step);
      engine.backward(loss);
      mine.losses.push_back(loss.template item<float>());
      if (of.world.hosts > 1) {
        EXPECT_EQ(engine.pager()->counts().early_rows - before.early_rows,
                  of.rows[static_cast<size_t>(group->rank())])
            << "rank " << group->rank() << ", step " << step;
        EXPECT_TRUE(step < 2 || engine.pager()->following());
      }
      mine.norms.push_back(engine.step().grad_norm);
    }
    mine.weights = weights(engine);
    return mine;
  });
}

template <class Model>
void expect_early(const std::function<Model()>& make, int64_t live) {
  for (const auto& each : kEarlyCases) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << each.world.hosts << " x " << each.world.ranks_a_host << ", bf16 " << bf16);
      auto c = tied_config(3, bf16);
      c.max_live_parameters = live;
      const EarlyCase one{{1, each.world.hosts * each.world.ranks_a_host}, {}};
      const int block = each.world.ranks_a_host > 1 ? each.world.ranks_a_host : 0;
      expect_same_bits(trained_early(each, make, c), trained_early(one, make, c, block));
    }
  }
}

// The head's weight is gathered ahead of it, behind the blocks.
TEST(EarlyLogits, BeginWithTheRowsThatAreHere) {
  const LlamaConfig config{.vocab_size = tiled().vocab_size,
                           .context = 16,
                           .width = 32,
                           .inner = 64,
                           .layers = 2,
                           .heads = 2,
                           .key_heads = 2,
                           .head_dim = 16};
  expect_early<Llama>(
      [&] {
        Llama model(config);
        set_values(*model);
        return model;
      },
      Config().max_live_parameters);
}

// No unit is gathered ahead, so that of the head is gathered while it computes.
TEST(EarlyLogits, BeginWithTheRowsThatAreHereWhereTheGatherBeginsWithThem) {
  expect_early<Gpt2>(make_model, 0);
}

// The look-up of the first step gathers a tied weight, and those of the others fetch rows.
TEST(EarlyLogits, OfATiedWeightFollowALookUpOfRows) {
  run_in(kTwoByOne, [](auto group) {
    auto model = make_model();
    Engine engine(model.ptr(), AdamW{}, tied_config(3, true), group);
    for (int64_t step = 0; step < 4; ++step) {
      const auto before = engine.pager()->counts().early_rows;
      engine.backward(loss_of(model, group->rank(), step));
      engine.step();
      const auto rows = kEarlyCases.front().rows[static_cast<size_t>(group->rank())];
      EXPECT_EQ(engine.pager()->counts().early_rows - before, step > 0 ? rows : 0) << step;
    }
  });
}

}  // namespace
}  // namespace zero
