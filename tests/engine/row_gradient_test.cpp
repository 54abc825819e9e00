// Stages 2 and 3 between hosts: a table that only look-ups use is not gathered, and its gradient
// leaves as rows (Note [Look-ups by rows] in engine/row_look_ups.h, Note [Gradients by rows] in
// engine/look_up_gradient.h).
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional/embedding.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/counted_step.h"
#include "tests/engine/worlds.h"
#include "tests/support/temporary_folder.h"
#include "zero/comm/group.h"
#include "zero/engine/costs.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"
#include "zero/engine/plan_units.h"
#include "zero/models/layers/projection.h"
#include "zero/models/recompute/recompute.h"
#include "zero/paging/pager.h"

namespace zero {
namespace {

using comm::Collective;

constexpr World kThreeByOne{3, 1};
constexpr int64_t kUsers = 5001;  // slices of three ranks end within a row
constexpr int64_t kWords = 3000;
constexpr int64_t kWidth = 20;

// Two tables, of the library's layer and of LibTorch's, which has a row that gets no gradient.
struct TablesImpl : torch::nn::Module {
  TablesImpl() {
    register_module("users", users);
    register_module("words", words);
    register_module("hidden", hidden);
    register_module("head", head);
    const torch::NoGradGuard guard;
    double phase = 0.3;
    for (auto& p : parameters())
      p.copy_(
          torch::sin(torch::arange(p.numel()) * 0.37 + (phase += 1.1)).mul(0.2).view(p.sizes()));
  }
  at::Tensor output(const at::Tensor& of_users, const at::Tensor& of_words) {
    const auto user = users(of_users);  // all ranks look up in one order
    return head(torch::tanh(hidden(user + words(of_words).mean(1))));
  }
  EmbeddingTable users{kUsers, kWidth, 1.0};
  torch::nn::Embedding words{torch::nn::EmbeddingOptions(kWords, kWidth).padding_idx(7)};
  torch::nn::Linear hidden{kWidth, kWidth};
  torch::nn::Linear head{kWidth, 3};
};
TORCH_MODULE(Tables);

// Rows that repeat within a rank, that several ranks have, and the first and the last.
at::Tensor users_of(int rank, int64_t pass, int64_t count = 12) {
  auto users = torch::arange(count).mul(97 + 5 * pass + rank).remainder(kUsers);
  users[0] = 0;
  users[1] = kUsers - 1;
  users.slice(0, 2, 6) = 1667 + pass;
  return users;
}

at::Tensor words_of(int rank, int64_t pass, int64_t count = 12) {
  auto words = torch::arange(count * 2).mul(31 + pass + 3 * rank).remainder(kWords);
  words.slice(0, 3, 9) = 7;
  words.slice(0, 9, 12) = 1500;
  return words.view({count, 2});
}

at::Tensor loss_of(Tables& model, int rank, int64_t pass, int64_t count = 12) {
  const auto output = model->output(users_of(rank, pass, count), words_of(rank, pass, count));
  return (output.to(at::kFloat) - 0.7).pow(2).mean();
}

Config config_of(int stage, bool bf16, int64_t k = 1) {
  auto c = clipped(stage, bf16, k);
  c.unit_bytes = 2'000;
  return c;
}

struct Trained {
  std::vector<float> losses;
  std::vector<double> norms;
  std::vector<at::Tensor> weights;
  std::vector<int64_t> gathered;  // bytes that all-gathers sent, by step
  std::vector<int64_t> reduced;   // bytes that reduce-scatters sent, by step
  int64_t tables = 0;             // bytes that an all-gather of both tables sends
};

using Loss = std::function<at::Tensor(Engine& engine, Tables& model, int rank, int64_t pass)>;

at::Tensor plain(Engine& /*engine*/, Tables& model, int rank, int64_t pass) {
  return loss_of(model, rank, pass);
}

// That of rank 0. The ledger's bytes are held against the formula in each step.
Trained trained(World world, const Config& c, int64_t steps, const Loss& loss = plain,
                int block = 0) {
  return train_in(world, block, [&](const std::shared_ptr<comm::Group>& group) {
    Tables model;
    Engine engine(model.ptr(), AdamW{.lr = 1e-2}, c, group);
    Trained mine;
    for (const int64_t p : {0, 1}) {
      const auto& layout = engine.layout();
      mine.tables += layout.unit(layout.unit_of(p)).bytes() / group->size() * (group->size() - 1);
    }
    for (int64_t step = 0; step < steps; ++step) {
      const auto sent = counted_step(
          engine, *group, step,
          [&](int64_t pass) { return loss(engine, model, group->rank(), pass); }, mine);
      EXPECT_EQ(group->ledger()->usage(Category::gathered_units).current, 0);
      mine.reduced.push_back(sent.reduce_scatters.logical_bytes);
      mine.gathered.push_back(sent.all_gathers.logical_bytes);
    }
    mine.weights = weights(engine);
    return mine;
  });
}

void expect_same_bits(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  expect_equal(a.weights, b.weights);
}

// Return whether a step of several hosts has sent rows in the place of both tables.
bool reduced_rows(const Trained& of, size_t step) { return of.reduced[step] < of.reduced[0] / 2; }
bool gathered_rows(const Trained& of, size_t step) {
  return of.gathered[step] < of.gathered[0] - of.tables * 3 / 4;
}

TEST(RowGradient, HasTheBitsOfOneHostAndSendsRowsAlone) {
  for (const auto world : {kTwoByOne, kTwoByTwo, kThreeByOne}) {
    for (const bool bf16 : {false, true}) {
      for (const int64_t k : {1, 2}) {
        SCOPED_TRACE(testing::Message() << world.hosts << " x " << world.ranks_a_host << ", bf16 "
                                        << bf16 << ", k " << k);
        const World one{1, world.hosts * world.ranks_a_host};
        const int block = world.ranks_a_host > 1 ? world.ranks_a_host : 0;
        const auto whole = trained(one, config_of(2, bf16, k), 4, plain, block);
        if (k == 1) expect_same_bits(trained(world, config_of(1, bf16), 4), whole);
        for (const int stage : {2, 3}) {
          const auto by_rows = trained(world, config_of(stage, bf16, k), 4);
          expect_same_bits(by_rows, whole);
          for (const size_t step : {1, 2, 3}) {
            EXPECT_EQ(reduced_rows(by_rows, step), true) << step;
            EXPECT_EQ(gathered_rows(by_rows, step), stage == 3) << step;
          }
        }
      }
    }
  }
}

// At stage 3 the formula counts units that stay between their uses twice.
TEST(RowGradient, SendsTheBytesOfTheFormula) {
  run_in(kTwoByOne, [](auto group) {
    Tables model;
    Engine engine(model.ptr(), AdamW{}, config_of(3, false), group);
    const auto& layout = engine.layout();
    int64_t whole = 0;  // of the other units
    for (int64_t u = 0; u < layout.unit_count(); ++u) {
      if (u != layout.unit_of(0) && u != layout.unit_of(1)) whole += layout.unit(u).bytes() / 2;
    }
    for (int64_t step = 0; step < 4; ++step) {
      const auto before = group->traffic().count(Collective::all_gather).logical_bytes;
      engine.backward(loss_of(model, group->rank(), step));
      engine.step();
      const auto sent = group->traffic().count(Collective::all_gather).logical_bytes - before;
      if (step == 0) continue;
      EXPECT_EQ(sent, engine.traffic_formula().all_gather - whole) << step;
    }
  });
}

// A plan takes all ranks' rows for different ones that lie evenly in the slices. Here they do.
TEST(RowGradient, IsPlannedAsTheEngineCountsIt) {
  constexpr int64_t kRows = 4000;
  constexpr int64_t kTokens = 40;
  const ModelShape shape{
      .parameters = {{.name = "weight", .sizes = {kRows, kWidth}, .strides = {kWidth, 1}}}};
  for (const int stage : {2, 3}) {
    for (const int64_t k : {1, 3}) {
      run_in(kTwoByTwo, [&](auto group) {
        EmbeddingTable table(kRows, kWidth, 1.0);
        const auto c = config_of(stage, true, k);
        Engine engine(table.ptr(), AdamW{}, c, group);
        const auto rows = torch::arange(kTokens) * (kRows / kTokens) + 50 + group->rank();
        for (int64_t i = 0; i < 3 * k; ++i) {
          engine.backward(table(rows).to(at::kFloat).pow(2).mean());
          engine.step();
        }
        const partition::RankGrid grid{.hosts = 2, .ranks_a_host = 2};
        const auto layout = lay_out(shape, c, grid);
        const auto units = plan_units(layout, shape, c, {.grid = grid});
        auto step = planned_step(layout, units, shape, c, {.grid = grid});
        plan_look_up(step,
                     {.parameter = 0, .use = LookUpUse::alone, .rows = kTokens, .columns = kWidth});
        const auto planned = planned_traffic(step);
        const auto counted = engine.traffic_formula();
        EXPECT_EQ(counted.reduce_scatter, planned.reduce_scatter);
        EXPECT_EQ(counted.reduce_scatter_link, planned.reduce_scatter_link);
        EXPECT_EQ(counted.all_gather, planned.all_gather);
        EXPECT_EQ(counted.all_gather_link, planned.all_gather_link);
        const auto whole = planned_traffic(planned_step(layout, units, shape, c, {.grid = grid}));
        EXPECT_LT(planned.reduce_scatter, whole.reduce_scatter / 8);
        if (stage == 3) {
          EXPECT_LT(planned.all_gather, whole.all_gather / 8);
        } else {
          EXPECT_EQ(planned.all_gather, whole.all_gather);
        }
      });
    }
  }
}

// Each of these makes the third of six steps another one. It says whether rows alone are gathered
// in that step, and whether they are reduced alone.
struct Case {
  std::string name;
  Loss loss;
  bool gathers = false;
  bool reduces = false;
};

at::Tensor linear_of(Tables& model, const at::Tensor& weight) {
  const auto x = torch::ones({4, kWidth}, weight.options());
  return torch::linear(model->hidden(x), weight).to(at::kFloat).pow(2).mean();
}

TEST(RowGradient, StaysExactWhateverRanksDo) {
  const std::vector<Case> cases{
      {"a rank has other numbers of rows",
       [](Engine& /*engine*/, Tables& model, int rank, int64_t pass) {
         return loss_of(model, rank, pass, rank == 0 ? 12 : 16);
       },
       true, true},
      {"a rank looks up too many rows",
       [](Engine& /*engine*/, Tables& model, int rank, int64_t pass) {
         return loss_of(model, rank, pass, rank == 0 ? 12 : 900);
       }},
      {"all evaluate before",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         {
           const torch::NoGradGuard guard;
           loss_of(model, rank, pass + 7);
         }
         return plain(engine, model, rank, pass);
       },
       false, true},
      {"a rank evaluates before the others compute",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         if (rank == 1) {
           const torch::NoGradGuard guard;
           loss_of(model, rank, pass + 7);
         }
         return plain(engine, model, rank, pass);
       },
       false, true},
      {"a look-up throws and is made again",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         const int64_t beyond = rank == 1 ? kUsers : 0;
         const auto look_up = [&] { return model->users(users_of(rank, pass) + beyond); };
         if (rank == 0) {
           look_up();
         } else {
           EXPECT_ANY_THROW(look_up());
         }
         return plain(engine, model, rank, pass);
       },
       false, true},
      {"two losses are added",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         const auto first = plain(engine, model, rank, pass);
         return first + plain(engine, model, rank, pass + 5);
       },
       true, false},
      {"a rank leaves a table out of its loss",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         if (rank == 0) return plain(engine, model, rank, pass);
         model->users(users_of(rank, pass));
         const auto words = model->words(words_of(rank, pass)).mean(1);
         return model->head(torch::tanh(model->hidden(words))).to(at::kFloat).pow(2).mean();
       },
       true, false},
      {"look-ups are computed again in backward",
       [](Engine& /*engine*/, Tables& model, int rank, int64_t pass) {
         const auto one = torch::ones({1}, model->head->weight.scalar_type()).requires_grad_();
         const auto output = recompute(
             [=](const at::Tensor& scale) mutable {
               return model->output(users_of(rank, pass), words_of(rank, pass)) * scale;
             },
             one);
         return output.to(at::kFloat).pow(2).mean();
       },
       false, false},
      {"a loss is computed and dropped",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         plain(engine, model, rank, pass + 5);
         return plain(engine, model, rank, pass);
       },
       true, true},
      {"gradients have a graph of their own",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         const auto loss = plain(engine, model, rank, pass);
         const auto of_head = torch::autograd::grad({loss}, {model->head->weight}, {}, true, true);
         return loss + of_head[0].to(at::kFloat).pow(2).sum();
       },
       true, true},
      {"a hook is set after forward",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         const auto loss = plain(engine, model, rank, pass);
         for (const auto& table : {model->users->weight, model->words->weight})
           table.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
         return loss;
       },
       true, false},
      {"gradients of a table are asked for before",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         const auto loss = plain(engine, model, rank, pass);
         const auto gradients =
             torch::autograd::grad({loss}, {model->users->weight, model->words->weight}, {}, true);
         EXPECT_TRUE(gradients[0].defined() && gradients[1].defined());
         return loss;
       },
       true, false},
      {"a table is written in a scope",
       [](Engine& engine, Tables& model, int rank, int64_t pass) {
         {
           const Gathered scope(engine, {model->users->weight, model->words->weight},
                                Gathered::Access::write);
           const torch::NoGradGuard guard;
           model->users->weight.mul_(1.5);
           model->words->weight.mul_(0.5);
         }
         return plain(engine, model, rank, pass);
       },
       false, true}};
  for (const auto& each : cases) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(each.name + (bf16 ? ", bf16" : ""));
      const Loss loss = [&](Engine& engine, Tables& model, int rank, int64_t pass) {
        return (pass == 2 ? each.loss : Loss(plain))(engine, model, rank, pass);
      };
      const auto whole = trained({1, 2}, config_of(3, bf16), 6, loss);
      const auto by_rows = trained(kTwoByOne, config_of(3, bf16), 6, loss);
      expect_same_bits(by_rows, whole);
      EXPECT_TRUE(gathered_rows(by_rows, 1));
      EXPECT_TRUE(reduced_rows(by_rows, 1));
      EXPECT_EQ(gathered_rows(by_rows, 2), each.gathers);
      EXPECT_EQ(reduced_rows(by_rows, 2), each.reduces);
      const bool again = each.name != "a hook is set after forward";  // it stays
      EXPECT_EQ(gathered_rows(by_rows, 5), again);  // the step before has shown that they can
      EXPECT_EQ(reduced_rows(by_rows, 5), again);
    }
  }
}

// The second of three micro-batches passes a graph that announced its look-ups for the first.
TEST(RowGradient, TakesTheLookUpThatWasAnnouncedAlone) {
  for (const bool other_rows : {false, true}) {
    const auto run = [&](World world) {
      return train_in(world, 0, [&](const std::shared_ptr<comm::Group>& group) {
        Tables model;
        Engine engine(model.ptr(), AdamW{.lr = 1e-2}, config_of(3, false, 2), group);
        const int rank = group->rank();
        Trained mine;
        for (int64_t step = 0; step < 4; ++step) {
          const auto first = loss_of(model, rank, step);
          engine.backward(linear_of(model, model->head->weight));
          engine.step();
          const auto second = 3 * loss_of(model, rank, other_rows ? step + 9 : step);
          const auto both = first + second;
          engine.backward(both);
          mine.losses.push_back(both.item<float>());
          mine.norms.push_back(engine.step().grad_norm);
        }
        mine.weights = weights(engine);
        return mine;
      });
    };
    expect_same_bits(run(kTwoByOne), run({1, 2}));
  }
}

// Passes of a step with few rows and with many, where no other unit is reduced between them.
TEST(RowGradient, AddsUpBesideWholeGradientsOfTheSameStep) {
  for (const int stage : {2, 3}) {
    for (const int64_t k : {2, 3}) {
      const auto run = [&](World world) {
        return train_in(world, 0, [&](const std::shared_ptr<comm::Group>& group) {
          EmbeddingTable table(kUsers, kWidth, 1.0);
          {
            const torch::NoGradGuard guard;
            table->weight.copy_(
                torch::sin(torch::arange(kUsers * kWidth) * 0.37).view({kUsers, kWidth}));
          }
          Engine engine(table.ptr(), AdamW{.lr = 1e-2}, config_of(stage, false, k), group);
          Trained mine;
          for (int64_t pass = 0; pass < 5 * k; ++pass) {
            const int64_t count = pass >= k && pass % k < k - 1 ? 1500 : 12;
            engine.backward(table(users_of(group->rank(), pass, count)).pow(2).mean());
            const auto result = engine.step();
            if (result.boundary) mine.norms.push_back(result.grad_norm);
          }
          mine.weights = weights(engine);
          return mine;
        });
      };
      SCOPED_TRACE(testing::Message() << "stage " << stage << ", k " << k);
      expect_same_bits(run(kTwoByOne), run({1, 2}));
    }
  }
}

// Gives no gradient to what comes before it.
struct Stop : torch::autograd::Function<Stop> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& /*g*/) {
    return {{}};
  }
};

TEST(RowGradient, IsAbsentWhereTheLookUpHasNone) {
  const Loss loss = [](Engine& /*engine*/, Tables& model, int rank, int64_t pass) {
    const auto of_users = model->users(users_of(rank, pass));
    const auto of_words = model->words(words_of(rank, pass)).mean(1);
    const auto x = pass < 2 ? of_users : Stop::apply(of_users);
    return model->head(torch::tanh(model->hidden(x + of_words))).to(at::kFloat).pow(2).mean();
  };
  const auto whole = trained({1, 2}, config_of(2, false), 5, loss);
  for (const int stage : {2, 3})
    expect_same_bits(trained(kTwoByOne, config_of(stage, false), 5, loss), whole);
}

// A hook that only looks at the gradient, set before the engine takes the model over.
TEST(RowGradient, IsWholeWhereAHookOfTheUsersSeesIt) {
  class Counts final : public torch::autograd::PostAccumulateGradHook {
   public:
    explicit Counts(int64_t& calls) : calls_(calls) {}
    void operator()(const torch::autograd::Variable& variable) override {
      calls_ += variable.grad().defined() ? 1 : 0;
    }

   private:
    int64_t& calls_;
  };
  run_in(kTwoByOne, [](auto group) {
    Tables model;
    int64_t calls = 0;
    torch::autograd::impl::set_post_acc_grad_hooks(model->users->weight,
                                                   std::make_unique<Counts>(calls));
    Engine engine(model.ptr(), AdamW{}, config_of(2, false), group);
    for (int64_t step = 0; step < 4; ++step) {
      engine.backward(loss_of(model, group->rank(), step));
      engine.step();
      EXPECT_EQ(calls, step + 1);
    }
  });
}

// A table whose rows are too many is gathered for the look-up, and released behind it.
TEST(RowGradient, DoesNotKeepATableThatHasTooManyRows) {
  run_in(kTwoByOne, [](auto group) {
    Tables model;
    Engine engine(model.ptr(), AdamW{}, config_of(3, false), group);
    const auto& layout = engine.layout();
    const int64_t tables =
        layout.unit(layout.unit_of(0)).bytes() + layout.unit(layout.unit_of(1)).bytes();
    for (int64_t step = 0; step < 4; ++step) {
      const auto loss = loss_of(model, group->rank(), step, 900);
      const auto held = group->ledger()->usage(Category::gathered_units).current;
      EXPECT_EQ(held<tables / 2, step> 0) << step;
      engine.backward(loss);
      engine.step();
    }
  });
}

// Something else uses the tables in every step.
TEST(RowGradient, StaysWholeWhereSomethingElseUsesTheTables) {
  for (const bool bf16 : {false, true}) {
    const Loss loss = [](Engine& engine, Tables& model, int rank, int64_t pass) {
      return plain(engine, model, rank, pass) + linear_of(model, model->words->weight) +
             linear_of(model, model->users->weight);
    };
    const auto whole = trained({1, 2}, config_of(2, bf16), 4, loss);
    for (const int stage : {2, 3}) {
      const auto between = trained(kTwoByOne, config_of(stage, bf16), 4, loss);
      expect_same_bits(between, whole);
      EXPECT_EQ(between.reduced[3], between.reduced[0]);
      EXPECT_EQ(between.gathered[3], between.gathered[0]);
    }
  }
}

// A budget of no bytes, offloaded states, updates in backward and delayed, states of 8 bits, a hook
// of the user's, and layer after layer.
TEST(RowGradient, HasTheBitsOfOneHostInOtherSettings) {
  const std::vector<std::pair<std::string, std::function<void(Config&)>>> settings{
      {"no live parameters", [](Config& c) { c.max_live_parameters = 0; }},
      {"few live parameters", [](Config& c) { c.max_live_parameters = kWidth * kWords; }},
      {"no prefetch", [](Config& c) { c.prefetch_bucket_size = 0; }},
      {"updates in backward",
       [](Config& c) {
         c.update_in_backward = true;
         c.gradient_clipping = 0;
       }},
      {"no updates in forward", [](Config& c) { c.update_in_forward = false; }},
      {"offloaded optimizer", [](Config& c) { c.offload_optimizer.device = OffloadDevice::cpu; }},
      {"offloaded parameters", [](Config& c) { c.offload_param.device = OffloadDevice::cpu; }}};
  for (const auto& [name, set] : settings) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(name + (bf16 ? ", bf16" : ""));
      auto c = config_of(3, bf16);
      set(c);
      expect_same_bits(trained(kTwoByOne, c, 4), trained({1, 2}, c, 4));
    }
  }
}

// The pass begins with the first gradient, which is not the table's, or is.
TEST(RowGradient, LeavesInAPassThatTheEngineDoesNotBegin) {
  for (const bool alone : {false, true}) {
    const auto run = [&](World world) {
      return train_in(world, 0, [&](const std::shared_ptr<comm::Group>& group) {
        Tables model;
        Engine engine(model.ptr(), AdamW{.lr = 1e-2}, config_of(3, true), group);
        Trained mine;
        for (int64_t step = 0; step < 4; ++step) {
          const auto before = group->traffic().count(Collective::reduce_scatter).logical_bytes;
          const auto loss =
              alone ? model->users(users_of(group->rank(), step)).to(at::kFloat).pow(2).mean()
                    : loss_of(model, group->rank(), step);
          loss.backward();
          mine.losses.push_back(loss.item<float>());
          mine.norms.push_back(engine.step().grad_norm);
          mine.reduced.push_back(group->traffic().count(Collective::reduce_scatter).logical_bytes -
                                 before);
        }
        mine.weights = weights(engine);
        return mine;
      });
    };
    const auto by_rows = run(kTwoByOne);
    expect_same_bits(by_rows, run({1, 2}));
    EXPECT_EQ(reduced_rows(by_rows, 3), !alone);
  }
}

// Between steps the states are saved and loaded; another number of ranks goes on.
TEST(RowGradient, GoesOnAfterALoad) {
  const TemporaryFolder folder;
  const auto run = [&](World world, const std::string& name) {
    return train_in(world, 0, [&](const std::shared_ptr<comm::Group>& group) {
      Tables model;
      Engine engine(model.ptr(), AdamW{.lr = 1e-2}, config_of(3, false), group);
      Trained mine;
      for (int64_t step = 0; step < 6; ++step) {
        if (step == 3) engine.save(name);
        if (step == 5) engine.load(name);
        const auto loss = loss_of(model, group->rank(), step);
        engine.backward(loss);
        mine.losses.push_back(loss.item<float>());
        mine.norms.push_back(engine.step().grad_norm);
      }
      mine.weights = weights(engine);
      return mine;
    });
  };
  expect_same_bits(run(kTwoByOne, folder / "rows"), run({1, 2}, folder / "whole"));
}

}  // namespace
}  // namespace zero
