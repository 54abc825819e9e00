// Checkpoints go from anywhere to anywhere: other numbers of ranks, stages, units, tiers, replicas
// and dtypes; and one that is not as it was written is never loaded.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "tests/engine/offload_runs.h"
#include "tests/engine/worlds.h"
#include "tests/support/message_of.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/checkpoint/manifest.h"
#include "zero/engine/gathered.h"

namespace zero {
namespace {

namespace fs = std::filesystem;
using comm::run_as_threads;
using ::testing::AllOf;
using ::testing::HasSubstr;

using States = std::map<std::string, at::Tensor>;

// Every state of every parameter, by name.
States states_of(Engine& engine) {
  States all;
  for (const auto& name : engine.parameter_names()) {
    all[name] = engine.parameter(name).clone();
    std::vector<std::string_view> names{"exp_avg", "exp_avg_sq", "momentum_buffer",
                                        "sum",     "variance",   "z"};
    names.insert(names.end(), optim::kFactoredStates.begin(), optim::kFactoredStates.end());
    for (const auto state : names) {
      try {
        all[name + "." + std::string(state)] = engine.optimizer_state(name, state).clone();
      } catch (const ConfigError&) {  // it has none of that name
      }
    }
    all[name + ".steps"] = torch::tensor(engine.parameter_steps(name));
  }
  engine.visit_parameters([&](const std::string& name, const at::Tensor& value) {
    all[name + ".shown"] = value.clone();
  });
  return all;
}

void expect_same(const States& a, const States& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, value] : a) {
    ASSERT_TRUE(b.contains(name)) << name;
    EXPECT_TRUE(torch::equal(value, b.at(name))) << name;
  }
}

// An engine somewhere.
struct Place {
  World world{};
  Config config{};
  Optimizer optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1};
};

Place on(int ranks, const Config& c, const Optimizer& optimizer = AdamW{.lr = 1e-2}) {
  return {{1, ranks}, c, optimizer};
}

// The states that rank 0 sees.
States run_at(const Place& place, const std::function<void(Engine&, Net&)>& body) {
  States seen;
  run_in(place.world, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, place.optimizer, place.config, group);
    body(engine, *net);
    auto mine = states_of(engine);
    if (group->rank() == 0) seen = std::move(mine);
  });
  return seen;
}

States save(const Place& place, const fs::path& folder) {
  return run_at(place, [&](Engine& engine, Net& net) {
    train(engine, net, 3);
    engine.save(folder);
  });
}

States load(const Place& place, const fs::path& folder) {
  return run_at(place, [&](Engine& engine, Net& net) {
    train(engine, net, 1, 7);  // something else, to be overwritten
    engine.load(folder);
    EXPECT_EQ(engine.steps(), 3);
  });
}

Config with_units(Config c, int64_t bytes) {
  c.unit_bytes = bytes;
  return c;
}

TEST(Checkpoint, LoadsAtAnyNumberOfRanks) {
  const TemporaryFolder folder;
  for (const auto& [from, to] : {std::pair{2, 4}, {4, 2}, {3, 1}, {1, 3}, {2, 5}}) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(testing::Message() << from << " to " << to << " ranks, bf16 " << bf16);
      const auto saved = save(on(from, config(2, bf16)), folder.path() / "run");
      expect_same(load(on(to, config(2, bf16)), folder.path() / "run"), saved);
      expect_same(load(on(to, with_units(config(3, bf16), 400)), folder.path() / "run"), saved);
    }
  }
}

TEST(Checkpoint, LoadsAtAnyStageAndUnitSize) {
  const TemporaryFolder folder;
  for (int from = 0; from <= 3; ++from) {
    const auto saved = save(on(3, config(from, true)), folder.path() / "run");
    for (int to = 0; to <= 3; ++to) {
      SCOPED_TRACE(testing::Message() << "stage " << from << " to " << to);
      expect_same(load(on(2, config(to, true)), folder.path() / "run"), saved);
      expect_same(load(on(3, with_units(config(to, true), 1 << 20)), folder.path() / "run"), saved);
    }
  }
}

TEST(Checkpoint, LoadsFromAnyTierToAnyOther) {
  const TemporaryFolder folder;
  for (const bool bf16 : {false, true}) {
    auto host = config(3, bf16);
    host.offload_optimizer.device = OffloadDevice::cpu;
    host.offload_param.device = OffloadDevice::cpu;
    const std::vector<Config> tiers{config(3, bf16), host, all_on_disk(config(3, bf16), folder),
                                    on_disk(config(2, bf16), folder)};
    for (size_t from = 0; from < tiers.size(); ++from) {
      const auto saved = save(on(2, tiers[from]), folder.path() / "run");
      for (size_t to = 0; to < tiers.size(); ++to) {
        SCOPED_TRACE(testing::Message() << "tier " << from << " to " << to << " bf16 " << bf16);
        expect_same(load(on(3, tiers[to]), folder.path() / "run"), saved);
      }
    }
  }
}

TEST(Checkpoint, LoadsWithAndWithoutReplicas) {
  const TemporaryFolder folder;
  auto blocks = config(3, true);
  blocks.mics_shard_size = 2;
  const auto path = folder.path() / "run";
  const auto saved = save({kFourByOne, blocks}, path);
  expect_same(load({kFourByOne, config(3, true)}, path), saved);
  expect_same(load({kTwoByTwo, blocks}, path), saved);
  expect_same(load(on(3, config(1, true)), path), saved);
  expect_same(load({kFourByOne, blocks}, path), saved);
  const auto whole = save(on(3, config(2, true)), path);
  expect_same(load({kTwoByTwo, blocks}, path), whole);
}

TEST(Checkpoint, KeepsTheBitsOfEveryOptimizer) {
  const TemporaryFolder folder;
  for (const Optimizer& optimizer :
       std::vector<Optimizer>{AdamW{}, Sgd{.momentum = 0.9}, Sgd{}, Adagrad{}, Lion{}, Lamb{},
                              Muon{}, Adafactor{}, ScheduleFreeAdamW{}, Apollo{.rank = 3}}) {
    SCOPED_TRACE(optim::name(optimizer));
    const auto saved = save(on(3, config(3, true), optimizer), folder.path() / "run");
    expect_same(load(on(2, config(1, true), optimizer), folder.path() / "run"), saved);
  }
}

TEST(Checkpoint, KeepsTheBitsOfEveryFormatOfMoments) {
  using optim::StateFormat;
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  const auto with = [](StateFormat format) {
    auto c = config(2, true);
    c.optimizer_states = format;
    return c;
  };
  for (const auto format : {StateFormat::fp32, StateFormat::bf16, StateFormat::eight_bit}) {
    const auto saved = save(on(3, with(format)), path);
    expect_same(load(on(2, with(format)), path), saved);
    // All are numbers of fp32.
    expect_same(load(on(2, with(StateFormat::fp32)), path), saved);
    // Others are the nearest.
    const auto coded = load(on(2, with(StateFormat::eight_bit)), path);
    EXPECT_TRUE(
        torch::allclose(coded.at("b.weight.exp_avg"), saved.at("b.weight.exp_avg"), 0.07, 1e-4));
  }
}

TEST(Checkpoint, LoadsBetweenPrecisionsOfParameters) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  auto split = config(3, true);
  split.split_master_weights = true;
  auto half = config(3);
  half.fp16 = true;
  half.loss_scaling = {.initial_power = 4};
  const auto without = [](States states, const std::string& ending) {
    std::erase_if(states, [&](const auto& each) { return each.first.ends_with(ending); });
    return states;
  };
  // Master weights and moments are the same bits; what the model shows has its own dtype.
  for (const auto& from : {config(3), config(3, true), split, half}) {
    const auto saved = without(save(on(3, from), path), ".shown");
    for (const auto& to : {config(3), config(3, true), split, half}) {
      const auto loaded = load(on(2, to), path);
      expect_same(without(loaded, ".shown"), saved);
      for (const auto& [name, value] : saved) {
        if (!loaded.contains(name + ".shown")) continue;
        const auto shown = loaded.at(name + ".shown").to(at::kFloat);
        EXPECT_TRUE(torch::allclose(shown, value, 1e-2, 1e-6)) << name;
      }
    }
  }
  // Parameters that have no master weights are their own.
  auto narrow = config(3, true);
  narrow.bf16_master_weights_and_grads = true;
  const auto saved = save(on(2, narrow), path);
  expect_same(without(load(on(3, config(2, true)), path), ".shown"), without(saved, ".shown"));
  expect_same(load(on(3, narrow), path), saved);
}

TEST(Checkpoint, LoadsWhereOthersAreFrozen) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  const auto run_frozen = [&](bool frozen, bool saves) {
    States seen;
    run_as_threads(2, [&](auto group) {
      auto net = std::make_shared<Net>();
      net->b->weight.requires_grad_(!frozen);
      Engine engine(net, AdamW{.lr = 1e-2}, config(3, true), group);
      train(engine, *net, 3);
      saves ? engine.save(path) : static_cast<void>(engine.load(path));
      auto mine = states_of(engine);
      if (group->rank() == 0) seen = std::move(mine);
    });
    return seen;
  };
  auto saved = run_frozen(false, true);
  auto loaded = run_frozen(true, false);
  EXPECT_TRUE(torch::equal(loaded.at("b.weight.shown"), saved.at("b.weight.shown")));
  EXPECT_TRUE(torch::equal(loaded.at("a.bias.exp_avg"), saved.at("a.bias.exp_avg")));
  saved = run_frozen(true, true);
  loaded = run_frozen(false, false);
  EXPECT_TRUE(torch::equal(loaded.at("b.weight"), saved.at("b.weight")));
  EXPECT_EQ(loaded.at("b.weight.exp_avg").count_nonzero().item<int64_t>(), 0);
  EXPECT_EQ(loaded.at("b.weight.steps").item<int64_t>(), 0);
  EXPECT_EQ(loaded.at("a.bias.steps").item<int64_t>(), 3);
}

TEST(Checkpoint, WhatWasSavedBeforeTheFirstStepBeginsAnew) {
  const TemporaryFolder folder;
  const std::vector<Optimizer> optimizers{AdamW{.lr = 1e-2, .weight_decay = 0.1},
                                          Sgd{.lr = 0.1, .momentum = 0.9}, Adagrad{.lr = 1e-2},
                                          Adafactor{.lr = 1e-2}};
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto& optimizer : optimizers) {
      for (const bool whole : {false, true}) {
        const auto path = folder.path() / (whole ? "whole.safetensors" : "shards");
        const auto run = [&](bool restores) {
          return run_at(on(2, config(stage), optimizer), [&](Engine& engine, Net& net) {
            if (restores) {
              whole ? engine.save_full(path) : engine.save(path);
              train(engine, net, 2, 7);
              whole ? engine.load_full(path) : static_cast<void>(engine.load(path));
              EXPECT_EQ(engine.steps(), 0);
            }
            train(engine, net, 2);
          });
        };
        expect_same(run(true), run(false));
      }
    }
  }
}

TEST(Checkpoint, GivesEachRankItsBuffersAndWhatItHasAttached) {
  const TemporaryFolder folder;
  const auto path = (folder.path() / "run").string();
  for (const int ranks : {2, 3}) {
    run_as_threads(ranks, [&](auto group) {
      const int rank = group->rank();
      auto net = std::make_shared<Net>();
      auto buffer = net->register_buffer("mine", torch::zeros({2}));
      Engine engine(net, AdamW{}, config(1), group);
      buffer.fill_(1.0 + rank);
      if (ranks == 2) engine.save(path, {{"state", fmt::format("of rank {}: \"ü\"", rank)}});
      buffer.zero_();
      const auto attached = engine.load(path);
      EXPECT_TRUE(torch::equal(buffer, torch::full({2}, 1.0 + rank % 2)));
      EXPECT_EQ(attached.at("state"), fmt::format("of rank {}: \"ü\"", rank % 2));
    });
  }
  attach(path, "more", "later");
  EXPECT_EQ(read_manifest(path).files[0].attached.at("more"), "later");
  verify(path, read_manifest(path));
}

// Returns how many pages of a file are in the page cache, after it has dropped them if `drop`.
int64_t cached_pages(const fs::path& path, bool drop) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (drop) (void)::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
  const auto size = fs::file_size(path);
  std::vector<unsigned char> pages(size / static_cast<size_t>(::getpagesize()) + 1);
  void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
  EXPECT_EQ(::mincore(mapping, size, pages.data()), 0);
  ::munmap(mapping, size);
  return std::count_if(pages.begin(), pages.end(), [](auto page) { return (page & 1) != 0; });
}

TEST(Checkpoint, IsReadAhead) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  run_at(on(2, config(2, true)),
         [&](Engine& engine, Net& /*net*/) { engine.save(path.string(), {}); });
  const auto manifest = read_manifest(path);
  const auto cached = [&](bool drop) {
    int64_t pages = 0;
    for (const auto& file : manifest.files) pages += cached_pages(path / file.name, drop);
    return pages;
  };
  cached(true);
  for (const int part : {0, 1}) read_ahead(path, manifest, part, 2);
  for (int i = 0; i < 1000 && cached(false) == 0; ++i) ::usleep(10'000);
  EXPECT_GT(cached(false), 0);
  fs::remove(path / manifest.files.back().name);
  EXPECT_THROW(read_ahead(path, manifest, 1, 2), DamagedCheckpoint);
}

// --- Saves in the background

// Returns why a checkpoint is not sound; empty where it is.
std::string damage(const fs::path& folder) {
  return message_of<DamagedCheckpoint>([&] { verify(folder, read_manifest(folder)); });
}

// Trains `steps` steps, saves, trains as many more, and completes the save. Returns the states at
// the save and at the end.
std::pair<States, States> save_beside(const Place& place, const fs::path& folder,
                                      const SaveOptions& options) {
  States saved;
  auto last = run_at(place, [&](Engine& engine, Net& net) {
    train(engine, net, 3);
    auto mine = states_of(engine);
    if (engine.group().rank() == 0) saved = std::move(mine);
    engine.save(folder, {{"name", "value"}}, options);
    train(engine, net, 2, 3);
    engine.complete_save();
    EXPECT_EQ(engine.save_progress(), SaveProgress::none);
  });
  return {saved, last};
}

TEST(Checkpoint, ABackgroundSaveHasTheStatesOfItsMoment) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  auto host = config(3, true);
  host.offload_optimizer.device = OffloadDevice::cpu;
  auto split = config(2, true);
  split.split_master_weights = true;
  auto early = config(2, false);
  early.update_in_backward = true;
  early.gradient_clipping = 0;
  const std::vector<Config> places{config(0, true),
                                   config(1, false),
                                   config(2, true),
                                   config(3, false),
                                   config(3, true),
                                   host,
                                   split,
                                   early,
                                   on_disk(config(2, true), folder),
                                   all_on_disk(config(3, true), folder)};
  for (size_t i = 0; i < places.size(); ++i) {
    const auto [again, undisturbed] = save_beside(on(2, places[i]), folder.path() / "other", {});
    // Nothing fits, a slice does, everything does.
    for (const int64_t staging : {int64_t{0}, int64_t{600}, int64_t{1} << 20}) {
      SCOPED_TRACE(testing::Message() << "place " << i << ", staging " << staging);
      const auto [saved, last] =
          save_beside(on(2, places[i]), path, {.background = true, .staging_bytes = staging});
      expect_same(saved, again);
      expect_same(last, undisturbed);
      EXPECT_EQ(damage(path), "nothing was thrown");
      EXPECT_EQ(read_manifest(path).files[1].attached.at("name"), "value");
      expect_same(load(on(3, config(2, places[i].bf16)), path), saved);
    }
  }
}

TEST(Checkpoint, WritesBesideABackgroundSaveAreNotInIt) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  for (const auto& place : {config(2, true), config(3, false), on_disk(config(3, true), folder),
                            all_on_disk(config(3, true), folder)}) {
    for (const int64_t staging : {int64_t{0}, int64_t{1} << 20}) {
      States saved;
      run_at(on(2, place), [&](Engine& engine, Net& net) {
        train(engine, net, 3);
        auto mine = states_of(engine);
        if (engine.group().rank() == 0) saved = std::move(mine);
        engine.save(path, {}, {.background = true, .staging_bytes = staging});
        for (const auto& name : engine.parameter_names()) {
          engine.set_parameter(name, torch::ones_like(engine.parameter(name)));
          engine.set_optimizer_state(name, "exp_avg", torch::ones_like(engine.parameter(name)));
        }
        {
          const Gathered gathered(engine, {}, Gathered::Access::write);
          const c10::NoGradGuard no_grad;
          for (auto& parameter : net.parameters()) parameter.fill_(2);
        }
        engine.complete_save();
      });
      expect_same(load(on(1, config(1, place.bf16)), path), saved);
    }
  }
}

struct LargeThenSmall : torch::nn::Module {
  LargeThenSmall() {
    register_module("0", torch::nn::Linear(1536, 1536));
    register_module("1", torch::nn::Linear(1536, 8));
  }
};

// While the large layer, which is first in the file, is written, the state behind it changes.
TEST(Checkpoint, AStateThatChangesBeforeItIsWrittenIsSavedAsItWas) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  const std::string name = "1.weight";
  const auto c = with_units(config(2), int64_t{1} << 20);
  for (const int64_t staging : {int64_t{0}, int64_t{1} << 20}) {
    at::Tensor saved;
    run_as_threads(2, [&](std::shared_ptr<comm::Group> group) {
      const auto model = std::make_shared<LargeThenSmall>();
      Engine engine(model, AdamW{.lr = 1e-2}, c, group);
      const auto value = torch::full({8, 1536}, 0.5);
      engine.set_optimizer_state(name, "exp_avg", value);
      engine.save(path, {}, {.background = true, .staging_bytes = staging});
      engine.set_optimizer_state(name, "exp_avg", torch::ones_like(value));
      engine.complete_save();
      engine.load(path);
      const auto seen = engine.optimizer_state(name, "exp_avg").clone();
      if (group->rank() == 0) saved = seen;
    });
    EXPECT_TRUE(torch::equal(saved, torch::full({8, 1536}, 0.5)));
  }
}

TEST(Checkpoint, PreparedSavesTakeNoMoreMemoryLater) {
  const TemporaryFolder folder;
  run_at(on(2, config(2, true)), [&](Engine& engine, Net& net) {
    auto& ledger = *engine.group().ledger();
    const auto before = ledger.usage(Category::host_buffers).current;
    engine.prepare_saves();
    const auto prepared = ledger.usage(Category::host_buffers).current;
    EXPECT_GT(prepared, before);
    for (int step = 0; step < 2; ++step) {
      train(engine, net, 1, step);
      engine.save(folder.path() / "run", {}, {.background = true, .staging_bytes = 0});
    }
    engine.complete_save();
    engine.prepare_saves();
    EXPECT_EQ(ledger.usage(Category::host_buffers).current, prepared);
  });
}

// Parameters on a disk are written from there.
TEST(Checkpoint, ABackgroundSaveOfStatesOnADiskHoldsTheStaging) {
  const TemporaryFolder folder;
  run_at(on(2, all_on_disk(config(3, true), folder)), [&](Engine& engine, Net& net) {
    train(engine, net, 1);
    auto& ledger = *engine.group().ledger();
    const auto before = ledger.usage(Category::host_buffers).current;
    ledger.reset_peaks();
    engine.save(folder.path() / "run", {}, {.background = true, .staging_bytes = 0});
    train(engine, net, 1, 1);
    engine.complete_save();
    // The net's buffers are copied.
    EXPECT_LE(ledger.usage(Category::host_buffers).peak - before, 4096);
  });
}

TEST(Checkpoint, ABackgroundSaveHoldsNoMoreThanTheParametersAndTheStaging) {
  const TemporaryFolder folder;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, config(2, true), group);
    train(engine, *net, 1);
    auto& ledger = *group->ledger();
    const auto before = ledger.usage(Category::host_buffers).current;
    ledger.reset_peaks();
    engine.save(folder.path() / "run", {}, {.background = true, .staging_bytes = 512});
    train(engine, *net, 2, 1);
    engine.complete_save();
    const auto after = ledger.usage(Category::host_buffers);
    // Each copy begins on a cache line; each piece of memory is whole pages.
    const int64_t parameters = engine.parameter_count() * 2 / 2;
    EXPECT_GT(after.peak, before);
    EXPECT_LE(after.peak - before, parameters + 512 + 16 * 4096);
    // The memory of the parameters' copies stays for the next save, which takes no more.
    EXPECT_GT(after.current, before);
    EXPECT_LE(after.current - before, parameters + 16 * 64);
    engine.save(folder.path() / "next", {}, {.background = true, .staging_bytes = 512});
    engine.complete_save();
    EXPECT_EQ(ledger.usage(Category::host_buffers).current, after.current);
  });
}

TEST(Checkpoint, ASaveThatFailsInTheBackgroundLeavesTheEarlierOneAndTheRun) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  auto whole = save(on(2, config(2, true)), path);
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, config(2, true), group);
    train(engine, *net, 3);
    // Somebody moves the folder away under the save, unless that is complete before.
    std::string message;
    for (int64_t step = 3; message.find("run.partial") == std::string::npos; ++step) {
      ASSERT_LT(step, 50) << message;
      train(engine, *net, 1, step);
      auto states = states_of(engine);
      engine.save(path, {}, {.background = true});
      std::error_code ignored;
      if (group->rank() == 0)
        fs::rename(path.string() + ".partial", folder.path() / std::to_string(step), ignored);
      message = message_of<CheckpointError>([&] { engine.complete_save(); });
      if (group->rank() == 0 && message == "nothing was thrown") whole = std::move(states);
    }
    train(engine, *net, 1);
    engine.save(folder.path() / "next");
  });
  EXPECT_EQ(damage(path), "nothing was thrown");
  EXPECT_EQ(damage(folder.path() / "next"), "nothing was thrown");
  expect_same(run_at(on(2, config(2, true)), [&](Engine& engine, Net&) { engine.load(path); }),
              whole);
}

TEST(Checkpoint, ASaveThatOneRankCannotBeginIsBegunByNone) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{.lr = 1e-2}, config(2, true), group);
    train(engine, *net, 1);
    const auto mine = group->rank() == 0 ? path : folder.path() / "nowhere" / "run";
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.save(mine, {}, {.background = true}); }),
                HasSubstr("nowhere"));
    EXPECT_EQ(engine.save_progress(), SaveProgress::none);
    train(engine, *net, 2, 1);
    engine.complete_save();  // nothing
    engine.save(path, {}, {.background = true});
    train(engine, *net, 1, 3);
    engine.complete_save();
  });
  EXPECT_EQ(damage(path), "nothing was thrown");
  EXPECT_EQ(read_manifest(path).steps, 3);
}

// --- What does not suit is refused.

template <class Network = Net>
std::string refusal(const fs::path& folder, const Optimizer& optimizer) {
  std::string message;
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Network>();
    Engine engine(net, optimizer, config(2, true), group);
    const auto before = weights(engine);
    auto mine = message_of<CheckpointError>([&] { engine.load(folder); });
    expect_equal(weights(engine), before);
    if (group->rank() == 0) message = std::move(mine);
  });
  return message;
}

struct Wider : nn::Module {
  Wider()
      : a(register_module("a", nn::Linear(7, 34))), b(register_module("b", nn::Linear(33, 29))) {}
  nn::Linear a, b;
};

struct Longer : Net {
  Longer() { register_parameter("d", torch::zeros({3})); }
};

template <at::ScalarType dtype>
struct Counting : Net {
  Counting() { register_buffer("count", torch::zeros({2}, dtype)); }
};

// Parameters may have another dtype (Checkpoint.LoadsBetweenPrecisionsOfParameters): only numbers
// of another kind are refused.
TEST(Checkpoint, ABufferOfAnotherKindOfNumbersIsRefusedWithBothSidesNamed) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  run_as_threads(2, [&](auto group) {
    Engine(std::make_shared<Counting<at::kLong>>(), AdamW{}, config(2), group).save(path);
  });
  EXPECT_THAT(refusal<Counting<at::kFloat>>(path, AdamW{}),
              AllOf(HasSubstr("holds buffer 'count' as Long [2]"),
                    HasSubstr("the model has it as Float [2]")));
}

TEST(Checkpoint, AnotherModelOrOptimizerIsRefusedWithBothSidesNamed) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  save(on(3, config(2, true), Lamb{}), path);
  EXPECT_THAT(refusal(path, AdamW{}),
              AllOf(HasSubstr("states of Lamb (exp_avg, exp_avg_sq)"), HasSubstr("'a.weight'"),
                    HasSubstr("trains it by AdamW (exp_avg, exp_avg_sq)")));
  EXPECT_THAT(refusal(path, Sgd{}), HasSubstr("trains it by SGD (no states)"));
  EXPECT_THAT(refusal<Wider>(path, Lamb{}),
              AllOf(HasSubstr("'a.weight'"), HasSubstr("[33,7]"), HasSubstr("[34,7]")));
  EXPECT_THAT(refusal<Longer>(path, Lamb{}), HasSubstr("no 'd'"));
  save(on(2, config(2, true), Sgd{}), path);
  EXPECT_THAT(refusal(path, Sgd{.momentum = 0.9}),
              AllOf(HasSubstr("SGD (no states)"), HasSubstr("SGD (momentum_buffer)")));
}

// --- What is not as it was written is never loaded.

struct Small : nn::Module {
  Small() : a(register_module("a", nn::Linear(3, 2))) {}
  nn::Linear a;
};

TEST(Checkpoint, EveryFlippedByteAndEveryTruncationIsFound) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  run_as_threads(2, [&](auto group) {
    Engine engine(std::make_shared<Small>(), AdamW{}, config(1, true), group);
    engine.save(path);
  });
  const std::string sound = "nothing was thrown";
  ASSERT_EQ(damage(path), sound);
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(path)) {
    const auto& file = entry.path();
    const auto name = file.filename().string();
    ++files;
    std::string bytes;
    {
      std::ifstream in(file, std::ios::binary);
      bytes.assign(std::istreambuf_iterator<char>(in), {});
    }
    const auto put = [&](const std::string& content) {
      std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
    };
    for (size_t i = 0; i < bytes.size(); ++i) {
      std::fstream in_place(file, std::ios::in | std::ios::out | std::ios::binary);
      const auto write = [&](char byte) {
        in_place.seekp(static_cast<std::streamoff>(i)).put(byte).flush();
      };
      write(static_cast<char>(bytes[i] ^ (1 << (i % 8))));
      ASSERT_THAT(damage(path), HasSubstr(name)) << "byte " << i << " of " << bytes.size();
      write(bytes[i]);
    }
    for (size_t length = bytes.size(); length-- > 0;) {
      fs::resize_file(file, length);
      ASSERT_THAT(damage(path), HasSubstr(name)) << "cut to " << length;
    }
    put(bytes + "x");
    EXPECT_THAT(damage(path), HasSubstr(name));
    fs::remove(file);
    EXPECT_THAT(damage(path), HasSubstr(name));
    put(bytes);
    EXPECT_EQ(damage(path), sound);
  }
  EXPECT_EQ(files, 3U);
}

TEST(Checkpoint, DamageIsToldOnEveryRankAndChangesNothing) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "run";
  save(on(3, config(2, true)), path);
  const auto file = path / "rank-1-of-3.safetensors";
  {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(static_cast<std::streamoff>(fs::file_size(file)) - 3);
    bytes.put('\x55');
  }
  run_as_threads(2, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(3), group);
    const auto before = weights(engine);
    EXPECT_THAT(message_of<DamagedCheckpoint>([&] { engine.load(path); }),
                HasSubstr("rank-1-of-3.safetensors"));
    expect_equal(weights(engine), before);
    if (group->rank() == 0) fs::remove(path / "manifest.json");
    group->barrier("removed");
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(path); }),
                HasSubstr("manifest.json"));
    expect_equal(weights(engine), before);
  });
}

// --- Files of others.

// It was saved by the last version without manifests, beside a file of whole tensors.
TEST(Checkpoint, WhatAnEarlierVersionSavedLoads) {
  const fs::path folder = std::string(ZERO_SOURCE) + "/tests/engine/earlier_save";
  const auto loaded = [&](int ranks, bool full) {
    States seen;
    run_as_threads(ranks, [&](auto group) {
      auto net = std::make_shared<Net>();
      auto calls = net->register_buffer("calls", torch::zeros({2}));
      Engine engine(net, AdamW{.lr = 1e-2}, config(3, true), group);
      full ? engine.load_full(folder / "full.safetensors")
           : static_cast<void>(engine.load(folder / "sharded"));
      EXPECT_EQ(engine.steps(), 3);
      if (!full) {
        EXPECT_TRUE(torch::equal(calls, torch::full({2}, 3.0)));
      }
      auto mine = states_of(engine);
      if (group->rank() == 0) seen = std::move(mine);
    });
    return seen;
  };
  expect_same(loaded(2, false), loaded(2, true));
  run_as_threads(3, [&](auto group) {
    auto net = std::make_shared<Net>();
    Engine engine(net, AdamW{}, config(3, true), group);
    EXPECT_THAT(message_of<CheckpointError>([&] { engine.load(folder / "sharded"); }),
                HasSubstr("earlier version"));
  });
}

// docs/checkpoint-format.md is enough to read one.
TEST(Checkpoint, IsReadByALittlePython) {
  const TemporaryFolder folder;
  const auto saved = save(on(3, config(2, true)), folder.path() / "run");
  for (const auto* state : {"master", "exp_avg"}) {
    const auto out = folder.path() / "values";
    const auto outcome =
        test::run({"python3", std::string(ZERO_SOURCE) + "/tests/engine/read_checkpoint.py",
                   folder.path() / "run", "b.weight", state, out});
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, fmt::format("{} (29, 33) F32, step 3\n", state));
    const auto& expected =
        saved.at(std::string(state) == "master" ? "b.weight" : "b.weight.exp_avg");
    auto values = torch::empty({29, 33});
    std::ifstream in(out, std::ios::binary);
    in.read(static_cast<char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
    EXPECT_TRUE(torch::equal(values, expected));
    EXPECT_EQ(fs::file_size(out), values.nbytes());
  }
}

}  // namespace
}  // namespace zero
