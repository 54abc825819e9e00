#include "tests/compositions/run.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "tests/compositions/network.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"
#include "zero/engine/gathered.h"
#include "zero/engine/plain.h"
#include "zero/train/layer_major.h"

namespace zero::compositions {

namespace {

bool is_save(std::string_view word) { return word == "save" || word == "save_beside"; }

/// One rank's results.
struct Outcome {
  std::vector<float> losses;
  std::vector<double> norms;  ///< one for each step that updated
  std::vector<at::Tensor> weights;
  std::string error;     ///< the message that ended it
  bool refused = false;  ///< the error is a zero::Error
};

/// One rank that trains: by an Engine, or by the plain ZeRO.
class Learner {
 public:
  Learner(const Setup& setup, std::shared_ptr<comm::Group> group)
      : setup_(setup), group_(std::move(group)) {
    make_network();
  }
  virtual ~Learner() = default;
  Learner(const Learner&) = delete;
  Learner& operator=(const Learner&) = delete;
  /// Makes a step of the word given, number `index` of the case.
  virtual void step(std::string_view word, int64_t index) = 0;
  virtual std::vector<at::Tensor> weights() = 0;
  Outcome& outcome() { return outcome_; }

 protected:
  void make_network() {
    network_ = std::make_shared<Network>(setup_.blocks, setup_.together ? 0 : group_->rank(),
                                         group_->rank(), setup_.config.parameter_dtype(),
                                         setup_.recomputes);
  }
  void begin(std::string_view word, int64_t index) {
    network_->step = index;
    network_->skips = word == "skip_blocks" || (word == "skip_blocks_on_one_rank" &&
                                                (setup_.together || group_->rank() == 0));
  }
  int64_t micro_batches() const { return setup_.config.gradient_accumulation_steps; }
  bool layer_major() const { return setup_.config.layer_major_accumulation; }
  void record(const at::Tensor& loss) {
    if (records_) outcome_.losses.push_back(loss.item<float>());
  }
  /// Returns the loss of the next micro-batch.
  at::Tensor loss(bool other = false) {
    const Autocast casts(setup_.config.autocast_dtype());
    auto value = network_->loss(number_++, other);
    record(value);
    return value;
  }
  /// Returns the same where it may be infinite: on the last rank, in a step that is to overflow.
  at::Tensor loss_in(std::string_view word) {
    const bool overflows =
        word == "infinite" && !layer_major() && group_->rank() + 1 == group_->size();
    const auto value = loss();
    return overflows ? value * std::numeric_limits<float>::infinity() : value;
  }
  void evaluate() {
    const torch::NoGradGuard no_grad;
    loss();
  }

  const Setup& setup_;
  std::shared_ptr<comm::Group> group_;
  std::shared_ptr<Network> network_;
  Outcome outcome_;
  int64_t number_ = 0;  // the next micro-batch
  bool records_ = true;
};

class ByEngine final : public Learner {
 public:
  ByEngine(const Setup& setup, std::shared_ptr<comm::Group> group, std::string folder)
      : Learner(setup, std::move(group)), folder_(std::move(folder)), engine_(make()) {}

  void step(std::string_view word, int64_t index) override {
    begin(word, index);
    if (word == "evaluate") evaluate();
    if (word == "half_lr") engine_->set_lr(engine_->lr() / 2);
    if (word == "drop_gradients") engine_->drop_gradients();
    if (word == "zero_grad") {
      engine_->backward(loss());
      if (micro_batches() > 1 && !layer_major()) engine_->step();
      engine_->zero_grad();
    }
    if (word == "throw") {
      network_->throws = true;
      const auto value = loss();
      network_->throws = false;
      try {
        engine_->backward(value);
        engine_->zero_grad();  // there was nothing to throw
      } catch (const Network::Thrown&) {
      }
    }
    StepResult result;
    if (layer_major()) {
      const Autocast casts(setup_.config.autocast_dtype());
      for (const auto& value :
           backward_layer_major(*engine_, network_->layers(number_, micro_batches())))
        record(value);
      number_ += micro_batches();
      result = finish(word);
    } else {
      for (int64_t i = 0; i < micro_batches(); ++i) {
        if (word == "loss_backward") {
          engine_->scale(loss()).backward();
        } else {
          engine_->backward(loss_in(word));
        }
        if (word == "two_losses") engine_->backward(loss(true));
        result = i + 1 < micro_batches() ? engine_->step() : finish(word);
      }
    }
    if (result.updated) outcome_.norms.push_back(result.grad_norm);
    after(word);
  }

  std::vector<at::Tensor> weights() override {
    std::vector<at::Tensor> all;
    std::vector<at::Tensor> known;
    for (const auto& [name, tensor] : network_->named_parameters().pairs()) {
      const auto is_it = [&](const at::Tensor& other) { return other.is_same(tensor); };
      if (!tensor.requires_grad() || std::ranges::any_of(known, is_it)) continue;
      known.push_back(tensor);
      all.push_back(engine_->parameter(name));
    }
    if (!engine_->diverged_parameters().empty())
      throw std::runtime_error("replicas of parameters have come to differ");
    return all;
  }

 private:
  std::unique_ptr<Engine> make() {
    std::vector<ParameterGroup> groups{{.optimizer = setup_.optimizer, .rest = true}};
    if (setup_.two_groups) {
      auto other = setup_.optimizer;
      std::visit([](auto& each) { each.lr /= 3; }, other);
      groups.push_back({{}, other, [](std::string_view, const at::Tensor& parameter) {
                          return parameter.dim() < 2;
                        }});
    }
    return std::make_unique<Engine>(network_, groups, setup_.config, group_);
  }
  StepResult finish(std::string_view word) {
    if (word == "group_norms") engine_->group_norms();
    if (word == "read_gradient") engine_->gradient("head");
    if (word == "set_gradient") engine_->set_gradient("head", torch::full({1, 7}, 0.01));
    return engine_->step(word != "no_update");
  }
  void after(std::string_view word) {
    if (word == "record_schedule" && setup_.config.stage == 3 && engine_->pager() != nullptr)
      engine_->record_schedule();
    if (word == "read_parameter") engine_->parameter("head");
    if (word == "set_parameter") engine_->set_parameter("head", torch::full({1, 7}, 0.3));
    if (word == "gathered") {
      const Gathered scope(*engine_, {network_->named_parameters()["head"]});
    }
    if (word == "write_gathered") {
      const auto head = network_->named_parameters()["head"];
      const Gathered scope(*engine_, {head}, Gathered::Access::write);
      const torch::NoGradGuard no_grad;
      head.fill_(0.25);
    }
    if (word == "write") {
      const torch::NoGradGuard no_grad;
      network_->named_parameters()["head"].add_(0.25);
    }
    if (word == "new_engine") {
      engine_->complete_save();
      engine_ = make();
    }
    if (is_save(word)) {
      engine_->save(folder_ + "/sharded", {},
                    {.background = word == "save_beside", .staging_bytes = 300});
      saved_ = true;
    }
    if (word == "load" && saved_) engine_->load(folder_ + "/sharded");
    if (word == "save_full") {
      engine_->save_full(folder_ + "/full");
      saved_full_ = true;
    }
    if (word == "load_full" && saved_full_) engine_->load_full(folder_ + "/full");
  }

  std::string folder_;
  std::unique_ptr<Engine> engine_;
  bool saved_ = false;
  bool saved_full_ = false;
};

/// The plain ZeRO. What it does not have is made of what it has: a load trains anew up to the save,
/// and a delayed update shows the passes weights of before.
class ByPlain final : public Learner {
 public:
  ByPlain(const Setup& setup, std::shared_ptr<comm::Group> group)
      : Learner(setup, std::move(group)), lr_(optim::lr(setup.optimizer)) {
    make();
  }

  void step(std::string_view word, int64_t index) override {
    if (word == "half_lr") lr_ /= 2;
    const Done now{word, index, number_, lr_};
    make_step(now);
    history_.push_back(now);
    if (is_save(word)) saved_ = history_;
    if (word == "save_full") saved_full_ = history_;
    const auto& from = word == "load" ? saved_ : word == "load_full" ? saved_full_ : std::nullopt;
    if (from) train_anew(*from);
    // A file of whole tensors has the weights after a delayed update alone.
    if ((from && word == "load_full") || word == "read_parameter") {
      shown_.clear();
      history_.back().completes = true;
    }
  }

  std::vector<at::Tensor> weights() override { return zero_->weights(); }

 private:
  /// A step that was made.
  struct Done {
    std::string_view word;
    int64_t index = 0;
    int64_t number = 0;  // its first micro-batch
    double lr = 0;
    bool completes = false;  // a delayed update under way
  };

  void make() {
    zero_ = std::make_unique<PlainZero>(
        named_tensors(*network_), setup_.optimizer,
        PlainZero::Options{.stage = setup_.config.stage,
                           .bf16 = setup_.config.bf16,
                           .micro_batches = micro_batches(),
                           .gradient_clipping = setup_.config.gradient_clipping,
                           .unit_bytes = setup_.config.unit_bytes},
        group_);
  }

  void train_anew(const std::vector<Done> steps) {
    const auto number = number_;
    make_network();
    make();
    updates_ = 0;
    shown_.clear();
    records_ = false;
    for (const auto& each : steps) {
      number_ = each.number;
      make_step(each);
      if (each.completes) shown_.clear();
    }
    records_ = true;
    number_ = number;
    history_ = steps;
  }

  void make_step(const Done& now) {
    const auto word = now.word;
    begin(word, now.index);
    zero_->set_lr(now.lr);
    std::vector<PlainZero::Pass> passes;
    const auto drop = [this] {
      for (const auto& parameter : network_->parameters()) parameter.mutable_grad() = at::Tensor();
    };
    if (word == "evaluate") passes.emplace_back([this] { evaluate(); });
    if (word == "zero_grad" || word == "throw") {
      passes.emplace_back([=, this] {
        loss().backward();
        drop();
      });
    }
    for (int64_t i = 0; i < micro_batches(); ++i) {
      passes.emplace_back([=, this] {
        loss_in(word).backward();
        if (word == "no_update") drop();
      });
      if (word == "two_losses" && !layer_major())
        passes.emplace_back([this] { loss(true).backward(); });
    }
    std::vector<at::Tensor> newest;  // before this step
    std::vector<PlainZero::Pass> with_shown;
    for (const auto& pass : passes) {
      with_shown.emplace_back([&, pass] {
        newest = copies();
        if (!shown_.empty()) put(shown_);
        pass();
        if (!shown_.empty()) put(newest);
      });
    }
    const auto result = zero_->step(with_shown);
    shown_.clear();
    if (!result.updated || word == "no_update") return;
    if (records_) outcome_.norms.push_back(result.grad_norm);
    const int64_t after = setup_.config.offload_optimizer.delayed_update_after;
    if (after > 0 && updates_ >= after) shown_ = newest;
    ++updates_;
  }

  std::vector<at::Tensor> copies() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : network_->parameters()) all.push_back(parameter.detach().clone());
    return all;
  }
  void put(const std::vector<at::Tensor>& values) const {
    const auto parameters = network_->parameters();
    for (size_t i = 0; i < values.size(); ++i) parameters[i].data().copy_(values[i]);
  }

  double lr_;
  std::unique_ptr<PlainZero> zero_;
  int64_t updates_ = 0;
  std::vector<at::Tensor>
      shown_;  // the weights that passes see while an update is under way; or none
  std::vector<Done> history_;
  std::optional<std::vector<Done>> saved_;
  std::optional<std::vector<Done>> saved_full_;
};

/// Trains on all ranks, and returns what each saw. Whatever a rank throws is in its outcome.
template <class Make>
std::vector<Outcome> train(const Setup& setup, const Make& make) {
  std::mutex mutex;
  std::vector<Outcome> outcomes(static_cast<size_t>(setup.ranks()));
  const auto on_rank = [&](const std::shared_ptr<comm::Group>& group) {
    Outcome outcome;
    const auto keep = [&] {
      const std::lock_guard lock(mutex);
      outcomes[static_cast<size_t>(group->rank())] = std::move(outcome);
    };
    std::unique_ptr<Learner> learner;
    const auto failed = [&](const std::exception& error, bool refused) {
      if (learner) outcome = std::move(learner->outcome());
      outcome.error = error.what();
      outcome.refused = refused;
      keep();
    };
    try {
      learner = make(group);
      int64_t index = 0;
      for (const auto word : setup.steps) learner->step(word, index++);
      learner->outcome().weights = learner->weights();
      outcome = std::move(learner->outcome());
      learner.reset();
      keep();
    } catch (const Error& error) {
      failed(error, true);
      throw;
    } catch (const std::exception& error) {
      failed(error, false);
      throw;
    }
  };
  const comm::GroupOptions options{.timeout = std::chrono::seconds(20),
                                   .sum_block = setup.sum_block};
  try {
    if (setup.hosts > 1) {
      comm::run_as_hosts(setup.hosts, setup.ranks_a_host, on_rank, options);
    } else {
      comm::run_as_threads(setup.ranks(), on_rank, options);
    }
  } catch (const std::exception&) {  // it is in the outcomes
  }
  return outcomes;
}

/// Returns whether states are sharded over one rank, too: as the engine's sharded_states has it.
bool shards_over_one(const Config& config) {
  return config.offload_param.device != OffloadDevice::none ||
         config.offload_optimizer.device == OffloadDevice::cpu ||
         config.offload_optimizer.on_disk_with_gradients() || config.update_in_backward;
}

bool shards_nothing(const Config& config) {
  return config.mics_shard_size == 1 && !shards_over_one(config);
}

/// The same case with nothing that decides where and when alone.
Setup oracle_of(Setup setup) {
  auto& config = setup.config;
  Config plain;
  plain.stage = config.stage;
  plain.bf16 = config.bf16;
  plain.fp16 = config.fp16;
  plain.loss_scaling = config.loss_scaling;
  plain.split_master_weights = config.split_master_weights;
  plain.bf16_master_weights_and_grads = config.bf16_master_weights_and_grads;
  plain.bf16_optimizer_states = config.bf16_optimizer_states;
  plain.optimizer_states = config.optimizer_states;
  plain.accumulation_dtype = config.accumulation_dtype;
  plain.communication_dtype = config.communication_dtype;
  plain.prescale_gradients = config.prescale_gradients;
  plain.gradient_predivide_factor = config.gradient_predivide_factor;
  plain.gradient_accumulation_steps = config.gradient_accumulation_steps;
  plain.gradient_clipping = config.gradient_clipping;
  plain.gradient_clipping_value = config.gradient_clipping_value;
  plain.clip_by_previous_norm = config.clip_by_previous_norm;
  plain.unit_bytes = config.unit_bytes;
  plain.autocast = config.autocast;
  plain.quantised = config.quantised;
  plain.layer_major_accumulation = config.layer_major_accumulation;
  const int64_t after = config.offload_optimizer.delayed_update_after;
  plain.offload_optimizer.delayed_update_after = after;
  // Blocks that shard add up first, and then they are added: on one host in blocks of that size.
  const int64_t size = config.mics_shard_size;
  if (size > 0 && setup.hosts == 1 && size < setup.ranks()) {
    setup.sum_block = size > 1 ? static_cast<int>(size) : setup.sum_block;
  }
  if (shards_nothing(config)) plain.stage = 0;
  if (config.layer_major_accumulation && !setup.beyond_plain) plain.stage = 0;
  config = plain;
  return setup;
}

/// Returns whether the engine adds in another order than the oracle, by design.
bool adds_in_another_order(const Setup& setup) {
  const auto& config = setup.config;
  // Sums over replicas of several micro-batches are made once, of what each block has added up.
  const bool deferred = config.mics_shard_size > 0 && config.mics_shard_size < setup.ranks() &&
                        config.stage >= 2 && config.gradient_accumulation_steps > 1 &&
                        !config.layer_major_accumulation && !shards_nothing(config);
  // A second loss may come when the sum of the first has been made: Note [Early reductions].
  const bool late = setup.hosts > 1 && std::ranges::count(setup.steps, "two_losses") > 0 &&
                    (config.stage < 2 || shards_nothing(config));
  return deferred || late;
}

template <class Number>
std::string difference(std::string_view what, const std::vector<Number>& actual,
                       const std::vector<Number>& expected, double tolerance) {
  if (actual.size() != expected.size())
    return fmt::format("{} {} in place of {}", actual.size(), what, expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double b = expected[i];
    const bool same = tolerance > 0 ? std::abs(a - b) <= tolerance * (1 + std::abs(b))
                                    : std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
    if (!same && !(std::isnan(a) && std::isnan(b)))
      return fmt::format("{} {} is {} in place of {}", what, i, a, b);
  }
  return "";
}

std::string difference(const Outcome& actual, const Outcome& expected, double tolerance) {
  if (auto found = difference("losses", actual.losses, expected.losses, tolerance); !found.empty())
    return found;
  if (auto found = difference("norms", actual.norms, expected.norms, tolerance); !found.empty())
    return found;
  if (actual.weights.size() != expected.weights.size())
    return fmt::format("{} weights in place of {}", actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < actual.weights.size() && tolerance == 0; ++i) {
    if (!torch::equal(actual.weights[i], expected.weights[i]))
      return fmt::format("weight {} differs", i);
  }
  return "";
}

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

}  // namespace

Verdict run(const Case& given) {
  using Kind = Verdict::Kind;
  auto setup = setup_of(given);
  setup.together =
      setup.config.stage == 3 &&
      (setup.hosts > 1 || !setup.config.one_sided_gather || setup.config.device_memory > 0 ||
       setup.config.offload_param.device != OffloadDevice::none);
  const TemporaryFolder folder;
  for (auto* path :
       {&setup.config.offload_optimizer.nvme_path, &setup.config.offload_param.nvme_path}) {
    if (*path == kFolder) *path = folder.path().string();
  }
  const auto by_engine = [&](const Setup& with, const std::string& name) {
    const auto saves = folder / name;
    std::filesystem::create_directories(saves);
    return train(with, [&](const std::shared_ptr<comm::Group>& group) -> std::unique_ptr<Learner> {
      return std::make_unique<ByEngine>(with, group, saves.string());
    });
  };
  const auto actual = by_engine(setup, "engine");
  const auto refused = std::ranges::count_if(actual, [](const auto& o) { return o.refused; });
  for (size_t rank = 0; rank < actual.size(); ++rank) {
    const auto& error = actual[rank].error;
    if (!error.empty() && !actual[rank].refused)
      return {Kind::failed, one_line(fmt::format("rank {} threw {}", rank, error))};
  }
  if (refused == setup.ranks()) {
    for (const auto& each : actual) {
      if (each.error.find("has not arrived") != std::string::npos)
        return {Kind::failed, one_line("a rank waited in vain: " + each.error)};
    }
    const auto names = [](const auto& o) {
      return o.error.find(" failed: ") == std::string::npos &&
             o.error.find("rail") == std::string::npos;
    };
    const auto named = std::ranges::find_if(actual, names);
    return {Kind::refused, one_line((named == actual.end() ? actual.front() : *named).error)};
  }
  if (refused > 0) {
    const auto first = std::ranges::find_if(actual, [](const auto& o) { return o.refused; });
    return {Kind::failed, one_line(fmt::format("{} of {} ranks were refused: {}", refused,
                                               actual.size(), first->error))};
  }
  const auto oracle = oracle_of(setup);
  const auto expected =
      setup.beyond_plain
          ? by_engine(oracle, "oracle")
          : train(oracle,
                  [&](const std::shared_ptr<comm::Group>& group) -> std::unique_ptr<Learner> {
                    return std::make_unique<ByPlain>(oracle, group);
                  });
  const bool narrow = setup.config.parameter_dtype() != at::kFloat ||
                      setup.config.communication_dtype == DtypeName::bf16;
  const double tolerance = !adds_in_another_order(setup) ? 0 : narrow ? 3e-2 : 1e-3;
  for (size_t rank = 0; rank < actual.size(); ++rank) {
    if (!expected[rank].error.empty())
      return {Kind::failed, one_line("the oracle threw " + expected[rank].error)};
    const auto found = difference(actual[rank], expected[rank], tolerance);
    if (!found.empty()) return {Kind::failed, fmt::format("rank {}: {}", rank, found)};
  }
  return {tolerance > 0 ? Kind::near : Kind::same, ""};
}

}  // namespace zero::compositions
