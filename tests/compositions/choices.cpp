#include "tests/compositions/choices.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <sstream>

#include "tests/compositions/network.h"
#include "zero/base/error.h"
#include "zero/optim/sweeps.h"

namespace zero::compositions {

namespace {

using Word = Choice::Word;

/// Returns a word that sets a value of the configuration.
template <class Value>
Word sets(std::string_view word, int weight, Value Config::*member, Value value) {
  return {word, weight, [=](Setup& s) { s.config.*member = value; }};
}

Word world(std::string_view word, int weight, int hosts, int ranks_a_host) {
  return {word, weight, [=](Setup& s) {
            s.hosts = hosts;
            s.ranks_a_host = ranks_a_host;
          }};
}

Word optimizer(std::string_view word, int weight, const Optimizer& optimizer, bool beyond = false) {
  return {word, weight, [=](Setup& s) {
            s.optimizer = optimizer;
            s.beyond_plain |= beyond;
          }};
}

Word states(std::string_view word, int weight, OffloadOptimizer section) {
  if (section.device == OffloadDevice::nvme) section.nvme_path = kFolder;
  return {word, weight, [=](Setup& s) { s.config.offload_optimizer = section; }};
}

Word parameters(std::string_view word, int weight, OffloadParam section) {
  if (section.device == OffloadDevice::nvme) section.nvme_path = kFolder;
  return {word, weight, [=](Setup& s) { s.config.offload_param = section; }};
}

/// Returns a word of what numbers are rounded to, which PlainZero has none of.
Word rounding(std::string_view word, int weight, std::function<void(Config&)> apply,
              bool beyond = true) {
  return {word, weight, [=](Setup& s) {
            apply(s.config);
            s.beyond_plain |= beyond;
          }};
}

Choice block(std::string_view name) {
  Choice choice{name, {}};
  for (const auto word : Network::words()) {
    choice.words.push_back({word, word == "none" ? 6 : 1, [=](Setup& s) {
                              s.blocks.push_back(word);
                              s.beyond_plain |= word == "aliased";
                            }});
  }
  return choice;
}

/// Returns a row that says what happens in a step beside its micro-batches; run.cpp has the words.
Choice step(std::string_view name, bool may_be_none) {
  Choice choice{name, {}};
  const auto add = [&](std::string_view word, int weight, bool beyond = false) {
    choice.words.push_back({word, weight, [=](Setup& s) {
                              if (word != "none") s.steps.push_back(word);
                              s.beyond_plain |= beyond;
                            }});
  };
  if (may_be_none) add("none", 3);
  add("train", 10);
  add("two_losses", 1);
  add("loss_backward", 2);
  add("zero_grad", 1);
  add("drop_gradients", 1);
  add("evaluate", 1);
  add("skip_blocks", 2);
  add("skip_blocks_on_one_rank", 1);
  add("infinite", 1);
  add("no_update", 1);
  add("half_lr", 1);
  add("read_gradient", 1);
  add("read_parameter", 1);
  add("gathered", 1);
  add("save", 1);
  add("save_beside", 2);
  add("load", 2);
  add("save_full", 1);
  add("load_full", 1);
  add("set_parameter", 1, true);
  add("write", 1, true);
  add("write_gathered", 1, true);
  add("set_gradient", 1, true);
  add("throw", 1);
  add("new_engine", 1, true);
  add("group_norms", 1);
  add("record_schedule", 1);
  return choice;
}

std::vector<Choice> make_choices() {
  std::vector<Choice> all;
  all.push_back({"stage",
                 {sets("0", 1, &Config::stage, 0), sets("1", 2, &Config::stage, 1),
                  sets("2", 3, &Config::stage, 2), sets("3", 5, &Config::stage, 3)}});
  all.push_back(
      {"ranks",
       {world("1", 2, 1, 1), world("2", 4, 1, 2), world("3", 2, 1, 3), world("4", 2, 1, 4),
        world("2x1", 2, 2, 1), world("2x2", 3, 2, 2), world("3x1", 1, 3, 1)}});
  all.push_back({"sum_block", {{"0", 8}, {"2", 1, [](Setup& s) { s.sum_block = 2; }}}});
  all.push_back(block("block1"));
  all.push_back(block("block2"));
  all.push_back(block("block3"));
  all.push_back(block("block4"));
  all.push_back({"recompute", {{"no", 3}, {"yes", 1, [](Setup& s) { s.recomputes = true; }}}});
  all.push_back({"precision",
                 {{"fp32", 4},
                  rounding(
                      "bf16", 4, [](Config& c) { c.bf16 = true; }, false),
                  rounding("split", 2, [](Config& c) { c.bf16 = c.split_master_weights = true; }),
                  rounding("bf16_masters", 1,
                           [](Config& c) { c.bf16 = c.bf16_master_weights_and_grads = true; }),
                  rounding("bf16_masters_and_moments", 1,
                           [](Config& c) {
                             c.bf16 = c.bf16_master_weights_and_grads = true;
                             c.bf16_optimizer_states = true;
                           }),
                  rounding("fp16", 1,
                           [](Config& c) {
                             c.fp16 = true;
                             c.loss_scaling = {.initial_power = 18, .window = 4, .hysteresis = 1};
                           }),
                  rounding("autocast", 1, [](Config& c) { c.autocast.enabled = true; })}});
  all.push_back(
      {"moments",
       {{"fp32", 8},
        rounding("bf16", 1, [](Config& c) { c.optimizer_states = optim::StateFormat::bf16; }),
        rounding("8bit", 1,
                 [](Config& c) { c.optimizer_states = optim::StateFormat::eight_bit; })}});
  all.push_back(
      {"sums",
       {{"usual", 12},
        rounding("model_dtype", 1,
                 [](Config& c) { c.accumulation_dtype = AccumulationDtype::model; }),
        rounding("sent_as_fp32", 1, [](Config& c) { c.communication_dtype = DtypeName::fp32; }),
        rounding("sent_as_bf16", 1, [](Config& c) { c.communication_dtype = DtypeName::bf16; }),
        rounding("prescaled", 1, [](Config& c) { c.prescale_gradients = true; }),
        rounding("predivided", 1, [](Config& c) { c.gradient_predivide_factor = 2; })}});
  all.push_back({"micro_batches",
                 {sets<int64_t>("1", 3, &Config::gradient_accumulation_steps, 1),
                  sets<int64_t>("2", 2, &Config::gradient_accumulation_steps, 2),
                  sets<int64_t>("3", 1, &Config::gradient_accumulation_steps, 3)}});
  all.push_back({"clipping",
                 {sets("0", 2, &Config::gradient_clipping, 0.0),
                  sets("0.05", 1, &Config::gradient_clipping, 0.05),
                  rounding("by_previous_norm", 1,
                           [](Config& c) {
                             c.gradient_clipping = 0.05;
                             c.clip_by_previous_norm = true;
                           }),
                  rounding("by_value", 1, [](Config& c) { c.gradient_clipping_value = 1e-3; })}});
  all.push_back(
      {"optimizer",
       {optimizer("adamw", 6, AdamW{.lr = 1e-2}),
        optimizer("adam", 1, AdamW{.lr = 1e-2, .weight_decay = 0.1, .decoupled = false}),
        optimizer("sgd", 2, Sgd{.lr = 0.1}),
        optimizer("momentum", 1, Sgd{.lr = 0.1, .momentum = 0.9}),
        optimizer("nesterov", 1,
                  Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}),
        optimizer("adagrad", 1, Adagrad{.lr = 1e-2, .initial_accumulator_value = 0.1}),
        optimizer("lion", 1, Lion{.lr = 1e-3, .weight_decay = 0.1}),
        optimizer("lamb", 1, Lamb{.lr = 1e-2}, true), optimizer("muon", 1, Muon{}, true),
        optimizer("adafactor", 1, Adafactor{}, true),
        optimizer("apollo", 1, Apollo{.rank = 3, .update_proj_gap = 2}, true),
        optimizer("schedule_free", 1,
                  ScheduleFreeAdamW{.lr = 1e-2, .weight_decay = 0.1, .warmup_steps = 2})}});
  all.push_back(
      {"states",
       {{"device", 6},
        states("host", 2, {.device = OffloadDevice::cpu}),
        states("half_on_host", 1, {.device = OffloadDevice::cpu, .ratio = 0.5}),
        states("disk", 2, {.device = OffloadDevice::nvme}),
        states("half_on_disk", 1, {.device = OffloadDevice::nvme, .ratio = 0.5}),
        states("disk_one_buffer", 1,
               {.device = OffloadDevice::nvme,
                .buffer_count = 1,
                .pipeline_read = false,
                .pipeline_write = false}),
        states("disk_with_gradients", 1, {.device = OffloadDevice::nvme, .gradients = true})}});
  all.push_back(
      {"parameters",
       {{"device", 6},
        parameters("host", 1, {.device = OffloadDevice::cpu}),
        parameters("disk", 2, {.device = OffloadDevice::nvme}),
        parameters("half_on_disk", 1, {.device = OffloadDevice::nvme, .max_in_cpu = 200})}});
  all.push_back(
      {"update",
       {{"in_step", 8},
        sets("in_backward", 2, &Config::update_in_backward, true),
        sets("not_in_forward", 1, &Config::update_in_forward, false),
        {"delayed", 1, [](Setup& s) { s.config.offload_optimizer.delayed_update_after = 1; }},
        {"delayed_later", 1,
         [](Setup& s) { s.config.offload_optimizer.delayed_update_after = 2; }}}});
  all.push_back({"order",
                 {{"micro_batch_major", 5},
                  sets("layer_major", 1, &Config::layer_major_accumulation, true)}});
  all.push_back({"sharded_over",
                 {{"all", 7},
                  sets<int64_t>("1", 1, &Config::mics_shard_size, 1),
                  sets<int64_t>("2", 2, &Config::mics_shard_size, 2)}});
  all.push_back({"kept_on_host", {{"no", 6}, {"yes", 1, [](Setup& s) {
                                                s.config.hpz_partition_size = s.ranks_a_host;
                                              }}}});
  all.push_back(
      {"links",
       {{"plain", 5},
        sets("packed_exponents", 1, &Config::packed_exponents, true),
        rounding("quantised_weights", 1, [](Config& c) { c.quantised.weights = true; }),
        rounding("quantised_gradients", 1, [](Config& c) { c.quantised.gradients = true; })}});
  all.push_back(
      {"groups", {{"one", 4}, {"two", 1, [](Setup& s) { s.two_groups = s.beyond_plain = true; }}}});
  all.push_back({"unit_bytes",
                 {sets<int64_t>("1500", 4, &Config::unit_bytes, 1500),
                  sets<int64_t>("1", 1, &Config::unit_bytes, 1),
                  sets<int64_t>("400", 2, &Config::unit_bytes, 400),
                  sets<int64_t>("1048576", 2, &Config::unit_bytes, 1 << 20)}});
  all.push_back({"live",
                 {{"all", 4},
                  sets<int64_t>("0", 2, &Config::max_live_parameters, 0),
                  sets<int64_t>("300", 2, &Config::max_live_parameters, 300)}});
  all.push_back({"gathers",
                 {{"in_place", 4},
                  sets("matched", 1, &Config::one_sided_gather, false),
                  sets<int64_t>("copied", 1, &Config::device_memory, 1 << 30),
                  sets<int64_t>("within_a_budget", 1, &Config::memory_budget, 1 << 30)}});
  all.push_back({"ahead",
                 {{"usual", 4},
                  sets<int64_t>("0", 1, &Config::prefetch_bucket_size, 0),
                  {"chosen", 1, [](Setup& s) {
                     s.config.prefetch_speeds = {
                         .compute = 1e9, .link = 1e8, .pcie = 1e9, .disk = 1e8};
                   }}}});
  all.push_back({"disk_queue", {{"uring", 2}, {"threads", 1, [](Setup& s) {
                                                 s.config.aio.use_io_uring = false;
                                               }}}});
  all.push_back(step("step1", false));
  for (const auto name : {"step2", "step3", "step4", "step5", "step6"})
    all.push_back(step(name, true));
  return all;
}

}  // namespace

const std::vector<Choice>& choices() {
  static const auto all = make_choices();
  return all;
}

namespace {

Case draw_one(std::mt19937_64& random) {
  Case drawn;
  for (const auto& row : choices()) {
    int left = 0;
    for (const auto& word : row.words) left += word.weight;
    left = static_cast<int>(random() % static_cast<uint64_t>(left));
    size_t at = 0;
    while (left >= row.words[at].weight) left -= row.words[at++].weight;
    drawn.push_back(at);
  }
  return drawn;
}

bool is_valid(const Case& given) {
  const auto setup = setup_of(given);
  const auto& config = setup.config;
  const bool narrow =
      config.bf16_master_weights_and_grads || config.optimizer_states != optim::StateFormat::fp32;
  if (narrow && optim::reach(setup.optimizer) != optim::Reach::element) return false;
  if (config.mics_shard_size > 0 && setup.ranks() % config.mics_shard_size != 0) return false;
  const auto& states = config.offload_optimizer;
  const bool apart = states.device != config.offload_param.device || states.ratio < 1;
  if (config.split_master_weights && states.device != OffloadDevice::nvme && apart) return false;
  if (config.stage == 3 && std::ranges::count(setup.steps, "new_engine") > 0) return false;
  try {
    config.validate();
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

}  // namespace

// Few of the cases are of configurations that are refused at once.
Case draw(uint64_t seed, uint64_t number) {
  std::seed_seq from{seed, seed >> 32, number, number >> 32};
  std::mt19937_64 random(from);
  for (;;) {
    auto drawn = draw_one(random);
    if (random() % 64 == 0 || is_valid(drawn)) return drawn;
  }
}

std::string text_of(const Case& given) {
  std::string text;
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i] == 0) continue;
    const auto& row = choices()[i];
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", row.name, row.words[given[i]].word);
  }
  return text;
}

Case parse(std::string_view text) {
  Case parsed(choices().size(), 0);
  std::istringstream words{std::string(text)};
  for (std::string pair; words >> pair;) {
    const auto equals = pair.find('=');
    const auto name = pair.substr(0, equals);
    size_t row = 0;
    while (row < choices().size() && choices()[row].name != name) ++row;
    if (row == choices().size()) throw ConfigError(fmt::format("There is no choice '{}'.", name));
    const auto& words_of_row = choices()[row].words;
    size_t at = 0;
    while (at < words_of_row.size() &&
           (equals == std::string::npos || words_of_row[at].word != pair.substr(equals + 1)))
      ++at;
    if (at == words_of_row.size())
      throw ConfigError(fmt::format("'{}' is no word of the choice '{}'.", pair, name));
    parsed[row] = at;
  }
  return parsed;
}

Setup setup_of(const Case& given) {
  Setup setup;
  setup.config.gradient_clipping = 0;
  for (size_t i = 0; i < given.size(); ++i) choices()[i].words[given[i]].apply(setup);
  return setup;
}

}  // namespace zero::compositions
