#include "zero/models/language/generate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "zero/base/error.h"
#include "zero/models/language/language_model.h"
#include "zero/models/layers/key_value_cache.h"

namespace zero {
namespace {

void check(std::span<const int64_t> prompt, const GenerateOptions& options) {
  if (prompt.empty())
    throw ConfigError("The prompt is empty; text is generated after at least one token.");
  if (options.tokens < 0)
    throw ConfigError(fmt::format(
        "The number of tokens to generate is {}; it must not be negative.", options.tokens));
  if (options.context <= 0)
    throw ConfigError(fmt::format("The context is {}; it must be positive.", options.context));
  if (!(options.temperature >= 0))
    throw ConfigError(
        fmt::format("The temperature is {}; it must not be negative.", options.temperature));
  if (options.top_k < 0)
    throw ConfigError(
        fmt::format("top_k is {}; it must not be negative (0 means all tokens).", options.top_k));
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw ConfigError(
        fmt::format("top_p is {}; it must be above 0 and at most 1 (all tokens).", options.top_p));
}

int64_t draw(at::Tensor logits, const GenerateOptions& options, at::Generator& generator) {
  // A logit of minus infinity is a token that the model forbids; anything else that is not finite
  // is a broken model.
  if (logits.isnan().logical_or_(logits.isposinf()).any().item<bool>()) {
    throw Error(
        "The model's logits are not finite, so there is nothing to draw from. Did the training "
        "diverge?");
  }
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  at::Tensor candidates;
  if (options.top_k > 0 && options.top_k < logits.numel())
    std::tie(logits, candidates) = logits.topk(options.top_k);
  auto probabilities = at::softmax((logits - logits.max()) / options.temperature, 0);
  if (options.top_p < 1) {
    const auto [sorted, order] = probabilities.sort(0, /*descending=*/true);
    const auto before = sorted.cumsum(0) - sorted;
    const auto kept = before.lt(options.top_p).sum().item<int64_t>();
    probabilities = sorted.narrow(0, 0, kept);
    candidates = candidates.defined() ? candidates.index_select(0, order) : order;
  }
  const auto drawn = at::multinomial(probabilities, 1, false, generator);
  return (candidates.defined() ? candidates.index_select(0, drawn) : drawn).item<int64_t>();
}

}  // namespace

std::vector<int64_t> generate(std::span<const int64_t> prompt, const LastLogits& last_logits,
                              const GenerateOptions& options) {
  check(prompt, options);
  const c10::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  std::vector<int64_t> text(prompt.begin(), prompt.end());
  for (int64_t i = 0; i < options.tokens; ++i) {
    if (options.stop && options.stop()) break;
    const auto seen = std::min(static_cast<int64_t>(text.size()), options.context);
    const auto tokens = at::empty({1, seen}, at::kLong);
    std::copy(text.end() - seen, text.end(), tokens.mutable_data_ptr<int64_t>());
    const auto logits = last_logits(tokens);
    const auto token = draw(logits.reshape({-1}).to(at::kCPU, at::kFloat), options, generator);
    const auto& ends = options.stop_tokens;
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) break;
    text.push_back(token);
    if (options.on_token) options.on_token(token);
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

LastLogits cached_logits(LanguageModel& model) {
  struct State {
    KeyValueCache cache;
    std::vector<int64_t> text;
  };
  return [&model, state = std::make_shared<State>()](const at::Tensor& tokens) {
    auto& [cache, text] = *state;
    const auto* begin = tokens.const_data_ptr<int64_t>();
    const std::vector<int64_t> now(begin, begin + tokens.numel());
    const bool grows =
        now.size() > text.size() && std::equal(text.begin(), text.end(), now.begin());
    if (!grows) {
      cache.clear();
      text.clear();
    }
    const auto known = static_cast<int64_t>(text.size());
    text = now;
    return model.logits_next(tokens.narrow(1, known, tokens.size(1) - known), cache);
  };
}

}  // namespace zero
