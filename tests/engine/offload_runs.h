// Runs whose results do not depend on where states live.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/engine/net.h"
#include "tests/support/temporary_folder.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {

inline Config optimizer_on_host(Config c) {
  c.offload_optimizer.device = OffloadDevice::cpu;
  return c;
}

inline Config all_on_host(Config c) {
  c = optimizer_on_host(std::move(c));
  c.offload_param.device = OffloadDevice::cpu;
  return c;
}

inline Config in_backward(Config c) {
  c.update_in_backward = true;
  return c;
}

inline Config on_disk(Config c, const TemporaryFolder& folder, int64_t buffers = 4) {
  c.offload_optimizer.device = OffloadDevice::nvme;
  c.offload_optimizer.nvme_path = folder.path().string();
  c.offload_optimizer.buffer_count = buffers;
  return c;
}

// Puts the parameters on disk too; the first `kept` elements of a rank's slices stay in memory.
inline Config all_on_disk(Config c, const TemporaryFolder& folder, int64_t kept = 0) {
  c = on_disk(c, folder);
  c.offload_param = {
      .device = OffloadDevice::nvme, .nvme_path = folder.path().string(), .max_in_cpu = kept};
  return c;
}

// Each stage, with parameters that are master weights, that have whole ones, and that are half of
// them.
inline std::vector<Config> replicated_and_sharded(int first_stage = 0) {
  std::vector<Config> all;
  for (int stage = first_stage; stage <= 3; ++stage) {
    for (const bool bf16 : {false, true}) all.push_back(config(stage, bf16));
    all.push_back(config(stage, true));
    all.back().split_master_weights = true;
  }
  return all;
}

// The private folders went with their runs.
inline void expect_no_left_overs(const TemporaryFolder& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    EXPECT_FALSE(entry.path().filename().string().starts_with("libzero")) << entry.path();
}

// Returns what `run` of rank 0 gives.
inline std::vector<at::Tensor> of_rank_zero(
    int ranks,
    const std::function<std::vector<at::Tensor>(const std::shared_ptr<comm::Group>&)>& run) {
  std::vector<at::Tensor> result;
  comm::run_as_threads(ranks, [&](const std::shared_ptr<comm::Group>& group) {
    auto mine = run(group);
    if (group->rank() == 0) result = std::move(mine);
  });
  return result;
}

// Weights and states after training, by name, of a run that saves and loads in the middle.
template <class Network>
std::vector<at::Tensor> states_after_training(const Config& c, const Optimizer& optimizer,
                                              int ranks, const std::filesystem::path& save) {
  return of_rank_zero(ranks, [&](auto group) {
    const auto look = [&](Engine& engine) {
      std::vector<at::Tensor> now;
      for (const auto& name : engine.parameter_names()) {
        now.push_back(engine.parameter(name).clone());
        for (const auto state : optim::state_names(optimizer))
          now.push_back(engine.optimizer_state(name, state).clone());
      }
      return now;
    };
    auto net = std::make_shared<Network>();
    Engine engine(net, optimizer, c, group);
    train(engine, *net, 3);
    engine.set_parameter("a.bias", torch::linspace(-1, 1, 33));
    if (!optim::state_names(optimizer).empty())
      engine.set_optimizer_state("b.weight", optim::state_names(optimizer)[0],
                                 torch::full({29, 33}, 0.01));
    {
      const torch::NoGradGuard guard;
      net->c->bias.add_(0.25);
    }
    engine.save((save / "sharded").string());
    engine.save_full((save / "full").string());
    train(engine, *net, 2, 3);
    auto straight = look(engine);
    engine.load((save / "sharded").string());
    train(engine, *net, 2, 3);
    expect_equal(look(engine), straight);
    engine.load_full((save / "full").string());
    train(engine, *net, 2, 3);
    expect_equal(look(engine), straight);
    return straight;
  });
}

inline std::vector<at::Tensor> weights_after(const Config& c, int ranks, int64_t steps) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    train(engine, *net, steps);
    return weights(engine);
  });
}

// Three steps that do not use `a`, which shares a unit with others: it keeps weights and moments.
inline void train_without_a(Engine& engine, Net& net) {
  for (int64_t i = 0; i < 3; ++i) {
    const auto x = torch::full({5, 33}, 0.1 * static_cast<double>(i + engine.group().rank() + 1))
                       .to(engine.config().parameter_dtype());
    engine.backward(net.c(torch::tanh(net.b(x))).to(at::kFloat).mean());
    engine.step();
  }
}

// Weights after steps of two micro-batches, and a gradient in the middle.
inline std::vector<at::Tensor> after_accumulation(const Config& c, int ranks) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    train(engine, *net, 2);
    engine.backward(loss_of(*net, group->rank(), 40));
    engine.step();
    engine.backward(loss_of(*net, group->rank(), 41));
    const auto gradient = engine.gradient("b.weight");
    engine.set_gradient("a.bias", torch::linspace(-1, 1, 33));
    engine.step();
    auto all = weights(engine);
    all.push_back(gradient);
    return all;
  });
}

// Weights after six steps in which the update is delayed from the third on, and the losses.
inline std::vector<at::Tensor> after_delayed_steps(const Config& c, int ranks) {
  return of_rank_zero(ranks, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, c, group);
    std::vector<at::Tensor> all;
    for (int64_t i = 0; i < 6; ++i) {
      const auto loss = loss_of(*net, group->rank(), i);
      engine.backward(loss);
      engine.step();
      all.push_back(loss.detach());
    }
    for (auto& tensor : weights(engine)) all.push_back(tensor);
    all.push_back(engine.optimizer_state("b.weight", "exp_avg"));
    return all;
  });
}

}  // namespace zero
