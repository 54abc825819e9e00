// A save leaves a delayed update delayed, and a run that loads it goes on as if it had not ended.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine/offload_runs.h"
#include "tests/support/temporary_folder.h"
#include "zero/checkpoint/foreign/checkpoint_view.h"
#include "zero/checkpoint/in_force.h"
#include "zero/checkpoint/manifest.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSteps = 6;
constexpr int64_t kSaved = 4;  // the step whose checkpoint is loaded

Config delayed(Config c, int64_t after = 2) {
  c.offload_optimizer.delayed_update_after = after;
  return c;
}

using Training = std::function<std::vector<at::Tensor>(Engine&, Net&)>;

std::vector<at::Tensor> on_ranks(int ranks, const Config& c, const Training& run,
                                 const Optimizer& optimizer = AdamW{.lr = 1e-2}) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, optimizer, c, group);
    return run(engine, *net);
  });
}

// Returns the losses of the steps from `first` on, and the weights and a state at the end. `after`
// is called after each step with the number of steps so far.
std::vector<at::Tensor> go_on(
    Engine& engine, Net& net, int64_t first,
    const std::function<void(int64_t)>& after = [](int64_t) {}) {
  std::vector<at::Tensor> all;
  for (int64_t i = first; i < kSteps; ++i) {
    const auto loss = loss_of(net, engine.group().rank(), i);
    engine.backward(loss);
    engine.step();
    all.push_back(loss.detach());
    after(i + 1);
  }
  for (auto& tensor : weights(engine)) all.push_back(tensor);
  for (const auto state : optim::state_names(engine.optimizer()))
    all.push_back(engine.optimizer_state("b.weight", state));
  return all;
}

// Returns a loss with the parameters in force, which does not depend on the number of ranks; and
// then all weights and a state, for which an update under way is completed.
std::vector<at::Tensor> seen(Engine& engine, Net& net) {
  std::vector<at::Tensor> all;
  {
    const torch::NoGradGuard guard;
    all.push_back(loss_of(net, 0, 99));
  }
  for (auto& tensor : weights(engine)) all.push_back(tensor.clone());
  all.push_back(engine.optimizer_state("b.weight", "exp_avg").clone());
  return all;
}

// Trains with a save after each step, every second one beside the steps that follow, and returns
// what `go_on` does.
std::vector<at::Tensor> saving(Engine& engine, Net& net, const fs::path& folder) {
  return go_on(engine, net, 0, [&](int64_t step) {
    engine.save(folder / std::to_string(step), {},
                {.background = step % 2 == 0, .staging_bytes = 2000});
  });
}

void expect_tail(const std::vector<at::Tensor>& tail, const std::vector<at::Tensor>& all) {
  expect_equal(tail, {all.end() - static_cast<int64_t>(tail.size()), all.end()});
}

TEST(DelayedSave, ChangesNothingAndResumesWithTheSameBits) {
  const TemporaryFolder folder;
  auto split = config(3, true);
  split.split_master_weights = true;
  auto narrow = config(2, true);
  narrow.bf16_master_weights_and_grads = true;
  auto eight_bit = config(1, true);
  eight_bit.optimizer_states = optim::StateFormat::eight_bit;
  auto half = config(2);
  half.fp16 = true;
  half.loss_scaling = {.initial_power = 4};
  const std::vector<Config> places{
      config(0),
      config(1, true),
      config(3),
      config(3, true),
      split,
      narrow,
      eight_bit,
      half,
      optimizer_on_host(config(2, true)),
      optimizer_on_host(config(1)),
      all_on_host(config(3)),
      on_disk(config(1), folder),
      on_disk(split, folder),
      all_on_disk(config(3), folder),
      all_on_disk(config(3, true), folder),
      all_on_disk(split, folder),
  };
  for (size_t i = 0; i < places.size(); ++i) {
    const auto c = delayed(places[i]);
    SCOPED_TRACE(testing::Message() << "place " << i << ": " << c.dump());
    const auto saves = folder.path() / "saves";
    const auto straight = on_ranks(2, c, [](auto& e, auto& net) { return go_on(e, net, 0); });
    expect_equal(on_ranks(2, c, [&](auto& e, auto& net) { return saving(e, net, saves); }),
                 straight);
    const auto resumed = on_ranks(2, c, [&](Engine& engine, Net& net) {
      train(engine, net, 3, 50);  // something else, to be overwritten
      engine.load(saves / std::to_string(kSaved));
      return go_on(engine, net, kSaved);
    });
    expect_tail(resumed, straight);
  }
}

TEST(DelayedSave, ResumesWithTheSameBitsWhereAnUpdateHasTwoPasses) {
  const TemporaryFolder folder;
  for (const Optimizer& optimizer :
       std::vector<Optimizer>{Lamb{}, Muon{}, Adafactor{}, Apollo{.rank = 3}}) {
    SCOPED_TRACE(optim::name(optimizer));
    const auto c = delayed(config(3, true));
    const auto saves = folder.path() / "saves";
    const auto run = [&](const Training& body) { return on_ranks(2, c, body, optimizer); };
    const auto straight = run([](auto& e, auto& net) { return go_on(e, net, 0); });
    expect_equal(run([&](auto& e, auto& net) { return saving(e, net, saves); }), straight);
    expect_tail(run([&](auto& engine, auto& net) {
                  engine.load(saves / std::to_string(kSaved));
                  return go_on(engine, net, kSaved);
                }),
                straight);
  }
}

TEST(DelayedSave, LoadsAtOtherRanksStagesAndTiers) {
  const TemporaryFolder folder;
  const auto saves = folder.path() / "saved";
  const auto resharded = folder.path() / "resharded";
  const std::vector<std::pair<int, Config>> from{{2, config(3, true)},
                                                 {3, on_disk(config(1, true), folder)}};
  for (const auto& [ranks, place] : from) {
    const auto saved = on_ranks(ranks, delayed(place), [&](Engine& engine, Net& net) {
      train(engine, net, 4);
      engine.save(saves);
      return seen(engine, net);
    });
    EXPECT_EQ(version_of(read_manifest(saves)), 3);
    foreign::write_checkpoint(foreign::view_checkpoint(saves), resharded, 5);
    auto split = config(2, true);
    split.split_master_weights = true;
    for (const auto& to :
         {config(0, true), config(1, true), all_on_disk(config(3, true), folder), split}) {
      for (const int others : {1, 4}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks to " << others << ": " << to.dump());
        for (const auto& path : {saves, resharded}) {
          expect_equal(on_ranks(others, delayed(to),
                                [&](Engine& engine, Net& net) {
                                  engine.load(path);
                                  return seen(engine, net);
                                }),
                       saved);
        }
      }
    }
  }
}

TEST(DelayedSave, IsCompleteWhereUpdatesAreNotDelayed) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "saved";
  const auto whole = folder.path() / "whole.safetensors";
  const auto loaded = [&](const Config& c, const fs::path& from) {
    return on_ranks(2, c, [&](Engine& engine, Net& net) {
      from == whole ? engine.load_full(from) : static_cast<void>(engine.load(from));
      return seen(engine, net);
    });
  };
  for (const bool bf16 : {false, true}) {
    const auto now = config(3, bf16);
    std::vector<at::Tensor> in_force;
    const auto complete = on_ranks(2, delayed(now), [&](Engine& engine, Net& net) {
      train(engine, net, 4);
      engine.save(path);
      engine.save_full(whole);
      auto mine = seen(engine, net);  // completes the update
      if (engine.group().rank() == 0) in_force = mine;
      return seen(engine, net);
    });
    EXPECT_FALSE(torch::equal(complete[0], in_force[0]));
    expect_equal(loaded(now, path), complete);
    expect_equal(loaded(delayed(now), path), in_force);
    for (const auto& c : {now, delayed(now)}) expect_equal(loaded(c, whole), complete);

    // And back: the first updates of a run are not delayed, so both have the same steps.
    const auto later = delayed(now, 3);
    const auto straight = on_ranks(2, later, [](auto& e, auto& net) { return go_on(e, net, 0); });
    (void)on_ranks(2, now, [&](Engine& engine, Net& net) {
      train(engine, net, 3);
      engine.save(path);
      return weights(engine);
    });
    EXPECT_EQ(version_of(read_manifest(path)), 2);
    expect_tail(on_ranks(2, later,
                         [&](Engine& engine, Net& net) {
                           engine.load(path);
                           return go_on(engine, net, 3);
                         }),
                straight);
  }
}

}  // namespace
}  // namespace zero
