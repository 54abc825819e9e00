#include "zero/models/language/generate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>

#include "zero/base/error.h"
#include "zero/models/language/language_model.h"

namespace zero {
namespace {

int64_t draw(at::Tensor logits, const GenerateOptions& options, at::Generator& generator) {
  // A logit of minus infinity is a token that the model forbids; anything else that is not finite
  // is a broken model.
  if (logits.isnan().logical_or_(logits.isposinf()).any().item<bool>()) {
    throw Error(
        "The model's logits are not finite, so there is nothing to draw from. Did the training "
        "diverge?");
  }
  // Logits are divided in fp32. Below its least normal number nothing but the likeliest is left.
  using Number = std::numeric_limits<float>;
  if (options.temperature < Number::min()) return logits.argmax().item<int64_t>();
  const double temperature = std::min<double>(options.temperature, Number::max());
  at::Tensor candidates;
  if (options.top_k > 0 && options.top_k < logits.numel())
    std::tie(logits, candidates) = logits.topk(options.top_k);
  auto probabilities = at::softmax((logits - logits.max()) / temperature, 0);
  if (options.top_p < 1) {
    const auto [sorted, order] = probabilities.sort(0, /*descending=*/true);
    const auto before = sorted.cumsum(0) - sorted;
    // The likeliest is there however small top_p is.
    const auto kept = std::max<int64_t>(1, before.lt(options.top_p).sum().item<int64_t>());
    probabilities = sorted.narrow(0, 0, kept);
    candidates = candidates.defined() ? candidates.index_select(0, order) : order;
  }
  const auto drawn = at::multinomial(probabilities, 1, false, generator);
  return (candidates.defined() ? candidates.index_select(0, drawn) : drawn).item<int64_t>();
}

}  // namespace

void check(const GenerateOptions& options) {
  if (options.tokens < 0)
    throw ConfigError(fmt::format(
        "The number of tokens to generate is {}; it must not be negative.", options.tokens));
  if (options.context <= 0)
    throw ConfigError(fmt::format("The context is {}; it must be positive.", options.context));
  if (!(options.temperature >= 0 && std::isfinite(options.temperature)))
    throw ConfigError(fmt::format(
        "The temperature is {}; it must be a number that is not negative (0 takes the likeliest "
        "token).",
        options.temperature));
  if (options.top_k < 0)
    throw ConfigError(
        fmt::format("top_k is {}; it must not be negative (0 means all tokens).", options.top_k));
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw ConfigError(
        fmt::format("top_p is {}; it must be above 0 and at most 1 (all tokens).", options.top_p));
  if (options.vocabulary < 0)
    throw ConfigError(fmt::format(
        "The vocabulary is {}; it must not be negative (0 means all tokens).", options.vocabulary));
}

std::vector<int64_t> generate(std::span<const int64_t> prompt, const LastLogits& last_logits,
                              const GenerateOptions& options) {
  const c10::NoGradGuard no_grad;
  GrowingText text(prompt, options, options.seed);
  std::vector<int64_t> added;
  for (int64_t i = 0; i < options.tokens; ++i) {
    if (options.stop && options.stop()) break;
    const auto token = text.grow(last_logits(text.seen()));
    if (!token) break;
    added.push_back(*token);
    if (options.on_token) options.on_token(*token);
  }
  return added;
}

GrowingText::GrowingText(std::span<const int64_t> prompt, const GenerateOptions& options,
                         uint64_t seed)
    : options_(options),
      generator_(at::detail::createCPUGenerator(seed)),
      tokens_(prompt.begin(), prompt.end()) {
  if (prompt.empty())
    throw ConfigError("The prompt is empty; text is generated after at least one token.");
  check(options);
}

at::Tensor GrowingText::seen() const {
  const auto count = std::min(static_cast<int64_t>(tokens_.size()), options_.context);
  const auto tokens = at::empty({1, count}, at::kLong);
  std::copy(tokens_.end() - count, tokens_.end(), tokens.mutable_data_ptr<int64_t>());
  return tokens;
}

std::optional<int64_t> GrowingText::grow(const at::Tensor& logits) {
  auto known = logits.reshape({-1}).to(at::kCPU, at::kFloat);
  if (options_.vocabulary > 0)
    known = known.narrow(0, 0, std::min(options_.vocabulary, known.numel()));
  const auto token = draw(known, options_, generator_);
  const auto& ends = options_.stop_tokens;
  if (std::find(ends.begin(), ends.end(), token) != ends.end()) return std::nullopt;
  tokens_.push_back(token);
  return token;
}

at::Tensor CachedText::unseen(const at::Tensor& tokens) {
  const auto* begin = tokens.const_data_ptr<int64_t>();
  std::vector<int64_t> now(begin, begin + tokens.numel());
  const bool grows =
      now.size() > text_.size() && std::equal(text_.begin(), text_.end(), now.begin());
  if (!grows) {
    cache_.clear();
    text_.clear();
  }
  const auto known = static_cast<int64_t>(text_.size());
  text_ = std::move(now);
  return tokens.narrow(1, known, tokens.size(1) - known);
}

LastLogits cached_logits(LanguageModel& model) {
  return [&model, text = std::make_shared<CachedText>()](const at::Tensor& tokens) {
    return model.logits_next(text->unseen(tokens), text->cache());
  };
}

}  // namespace zero
