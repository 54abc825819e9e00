#include "zero/train/generate_texts.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <map>
#include <ranges>
#include <span>
#include <utility>

#include "zero/base/autocast.h"
#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/train/evaluation.h"
#include "zero/train/task.h"

namespace zero::train {
namespace {

using Tokens = std::vector<int64_t>;

/// Returns a number that other prompts and options do not have. Throws ConfigError for those that
/// cannot be used.
uint64_t fingerprint(const std::vector<Tokens>& prompts, const GenerateTextsOptions& options,
                     int64_t vocabulary) {
  const auto& each = options.each;
  check(each);
  if (options.batch < 1)
    throw ConfigError(
        fmt::format("The batch is {} texts; it must be at least one.", options.batch));
  Hash hash;
  const auto add = [&](const Tokens& tokens) {
    hash.add(static_cast<int64_t>(tokens.size()));
    for (const auto token : tokens) hash.add(token);
  };
  hash.add(options.batch).add(each.tokens).add(each.context).add(each.top_k).add(each.vocabulary);
  hash.add(std::bit_cast<int64_t>(each.temperature)).add(std::bit_cast<int64_t>(each.top_p));
  hash.add(std::bit_cast<int64_t>(each.seed)).add(static_cast<int64_t>(prompts.size()));
  add(each.stop_tokens);
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto& prompt = prompts[i];
    if (prompt.empty()) {
      throw ConfigError(
          fmt::format("Prompt {} of {} is empty; text is generated after at least one token.",
                      i + 1, prompts.size()));
    }
    for (const auto token : prompt) {
      if (token >= 0 && token < vocabulary) continue;
      throw ConfigError(
          fmt::format("Prompt {} has the token {}, and the model knows those from 0 to {}. Use the "
                      "model's own tokenizer.",
                      i + 1, token, vocabulary - 1));
    }
    add(prompt);
  }
  return hash.value();
}

void check_texts(Engine& engine, LanguageModel& model, const std::vector<Tokens>& prompts,
                 const GenerateTextsOptions& options) {
  auto& group = engine.group();
  const auto mine = comm::agree<ConfigError>(group, "Reading the prompts", [&] {
    return fingerprint(prompts, options, model.config().vocab_size());
  });
  const auto all = comm::gather_records(group, mine, "prompts");
  const auto other = std::ranges::find_if(all, [&](auto value) { return value != all.front(); });
  if (other == all.end()) return;
  throw ConfigError(fmt::format(
      "Rank {} was given other prompts or options than rank 0. Give all ranks the same.",
      other - all.begin()));
}

/// A text that this rank continues.
struct Growing {
  Growing(const Tokens& prompt, const GenerateOptions& options, uint64_t seed)
      : text(prompt, options, seed) {}
  GrowingText text;
  CachedText cached;
};

class TextGenerator {
 public:
  TextGenerator(Engine& engine, LanguageModel& model, const std::vector<Tokens>& prompts,
                GenerateTextsOptions options)
      : engine_(engine),
        group_(engine.group()),
        model_(model),
        prompts_(prompts),
        options_(std::move(options)),
        batch_(std::min(static_cast<size_t>(options_.batch), prompts.size())),
        added_(prompts.size()),
        running_(static_cast<size_t>(group_.size())) {
    options_.each.context = std::min(options_.each.context, model.config().context());
  }

  std::vector<Tokens> run() {
    if (options_.each.tokens == 0) next_ = prompts_.size();
    while (begin_texts() && advance()) tell_ended();
    tell_ended();
    return std::move(added_);
  }

 private:
  // These stand in the exchange after each token: one at its head, the last at the place of a text.
  static constexpr int64_t kGoesOn = 0, kStops = 1, kFailed = 2, kEnded = -1;

  size_t rank() const { return static_cast<size_t>(group_.rank()); }

  /// Gives ranks with room the next prompts. Returns whether a text is left to continue.
  bool begin_texts() {
    for (; next_ < prompts_.size(); ++next_) {
      const auto least = std::ranges::min_element(running_, {}, std::ranges::size);
      if (least->size() == batch_) break;
      least->push_back(next_);
      if (least == running_.begin() + group_.rank())
        mine_.try_emplace(next_, prompts_[next_], options_.each, options_.each.seed + next_);
    }
    return most() > 0;
  }

  size_t most() const { return std::ranges::max_element(running_, {}, std::ranges::size)->size(); }

  /// Adds a token to each text of every rank. Returns false where a rank has stopped.
  bool advance() {
    std::vector<int64_t> drawn(1 + batch_, kEnded);
    std::exception_ptr failure;
    const auto logits = pass();
    drawn[0] = options_.each.stop && options_.each.stop() ? kStops : kGoesOn;
    try {
      for (size_t i = 0; i < running_[rank()].size(); ++i)
        drawn[1 + i] = mine_.at(running_[rank()][i]).text.grow(logits[i]).value_or(kEnded);
    } catch (const Error&) {
      failure = std::current_exception();
      drawn[0] = kFailed;
    }
    const auto all = comm::gather_arrays<int64_t>(group_, drawn, "tokens");
    bool stops = false;
    bool failed = false;
    for (size_t r = 0; r < running_.size(); ++r) {
      stops = stops || all[r * drawn.size()] == kStops;
      failed = failed || all[r * drawn.size()] == kFailed;
    }
    if (failed) comm::share_failure(group_, "Generating text", failure);
    if (stops) return false;
    for (size_t r = 0; r < running_.size(); ++r)
      add(running_[r], std::span(all).subspan(r * drawn.size() + 1, batch_));
    return true;
  }

  /// Returns the logits of the token behind each of this rank's texts.
  std::vector<at::Tensor> pass() {
    std::vector<at::Tensor> tokens;
    std::vector<KeyValueCache*> caches;
    const auto take = [&](const at::Tensor& unseen, KeyValueCache& cache) {
      tokens.push_back(on_device({unseen}, group_.device()).front());
      caches.push_back(&cache);
    };
    for (const auto text : running_[rank()]) {
      auto& growing = mine_.at(text);
      take(growing.cached.unseen(growing.text.seen()), growing.cached.cache());
    }
    const bool together = group_.size() > 1 && engine_.pager() != nullptr;
    std::vector<KeyValueCache> of_nobody(together ? most() - tokens.size() : 0);
    for (auto& cache : of_nobody) take(at::zeros({1, 1}, at::kLong), cache);
    if (tokens.empty()) return {};
    const Autocast casts(engine_.config().autocast_dtype(), group_.device().type());
    return model_.logits_next_of(tokens, caches);
  }

  void add(std::vector<size_t>& texts, std::span<const int64_t> tokens) {
    std::vector<size_t> left;
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto text = texts[i];
      auto& added = added_[text];
      if (tokens[i] != kEnded) {
        added.push_back(tokens[i]);
        if (options_.on_token) options_.on_token(text, tokens[i]);
      }
      const auto limit = static_cast<size_t>(options_.each.tokens);
      if (tokens[i] != kEnded && added.size() < limit) {
        left.push_back(text);
      } else {
        mine_.erase(text);
      }
    }
    texts = std::move(left);
  }

  void tell_ended() {
    size_t first = next_;  // that goes on
    for (const auto& texts : running_) {
      if (!texts.empty()) first = std::min(first, texts.front());
    }
    for (; told_ < first; ++told_) {
      if (options_.on_text) options_.on_text(told_, added_[told_]);
    }
  }

  Engine& engine_;
  comm::Group& group_;
  LanguageModel& model_;
  const std::vector<Tokens>& prompts_;
  GenerateTextsOptions options_;
  size_t batch_;
  std::vector<Tokens> added_;                 // by text
  std::vector<std::vector<size_t>> running_;  // the texts of each rank, ascending
  size_t next_ = 0;                           // the first text that nobody has begun
  size_t told_ = 0;                           // the first that on_text does not know
  std::map<size_t, Growing> mine_;
};

}  // namespace

std::vector<Tokens> generate_texts(Engine& engine, LanguageModel& model,
                                   const std::vector<Tokens>& prompts,
                                   const GenerateTextsOptions& options) {
  check_texts(engine, model, prompts, options);
  const EvaluationMode evaluation(model.module());
  return TextGenerator(engine, model, prompts, options).run();
}

}  // namespace zero::train
