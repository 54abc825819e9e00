// Makes text with a language model, a token at a time.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "zero/models/layers/key_value_cache.h"

namespace zero {

class LanguageModel;

struct GenerateOptions {
  int64_t tokens = 256;    ///< how many to generate
  int64_t context = 1024;  ///< the model sees at most so many tokens, the last ones
  /// Logits are divided by it. 0 takes the likeliest token, as does less than 2^-126. Finite.
  double temperature = 1.0;
  int64_t top_k = 0;  ///< only the likeliest so many can be drawn; 0 means all
  /// Only the likeliest tokens can be drawn whose probabilities, after temperature and top_k, add
  /// up to so much; in (0, 1]. The token that reaches it is among them.
  double top_p = 1.0;
  int64_t vocabulary = 0;              ///< only tokens below it can be drawn; 0 means all
  std::vector<int64_t> stop_tokens{};  ///< the text ends before the first of them
  uint64_t seed =
      0;  ///< of a generator of its own, so that equal logits give equal tokens on every rank
  std::function<bool()> stop{};  ///< asked before each token: whether to leave it at those so far
  std::function<void(int64_t)> on_token{};  ///< told each token
};

/// Throws ConfigError, naming the value, for options out of range.
void check(const GenerateOptions& options);

/// A text that grows a token at a time.
class GrowingText {
 public:
  /// Begins with `prompt`. Draws by a generator of `seed`, and else as `options` say, which are
  /// borrowed. Throws ConfigError as `generate` does.
  GrowingText(std::span<const int64_t> prompt, const GenerateOptions& options, uint64_t seed);
  /// Returns the tokens that the model is to see, the last ones of the text, (1, T) int64 in host
  /// memory.
  at::Tensor seen() const;
  /// Draws the next token by its `logits`, (1, V), and returns it; returns none where that is a
  /// stop token, and the text stays as it is. Throws zero::Error when a logit is NaN or infinite
  /// upwards.
  std::optional<int64_t> grow(const at::Tensor& logits);

 private:
  const GenerateOptions& options_;
  at::Generator generator_;
  std::vector<int64_t> tokens_;
};

/// A text of which a model keeps keys and values.
class CachedText {
 public:
  KeyValueCache& cache() { return cache_; }
  /// Returns those of `tokens`, (1, T) int64 in host memory, that the cache does not have; the
  /// model is to see them next. If they do not continue the tokens of the last time (the text
  /// slides at the context), the cache is cleared, and all of them are returned.
  at::Tensor unseen(const at::Tensor& tokens);

 private:
  KeyValueCache cache_;
  std::vector<int64_t> text_;
};

/// Maps (1, T) int64 tokens to (1, V) logits of the next token. T grows to
/// GenerateOptions::context. Called without gradients, once a token.
using LastLogits = std::function<at::Tensor(const at::Tensor& tokens)>;

/// Makes a LastLogits of a model, which is borrowed, on the CPU: it keeps keys and values, and so
/// computes only those tokens that the text has more than the last time. Once the text slides at
/// the context, each call computes all of it.
LastLogits cached_logits(LanguageModel& model);

/// Continues `prompt` and returns the new tokens, without the prompt. Throws ConfigError for an
/// empty prompt or options out of range; zero::Error when a logit is NaN or infinite upwards.
std::vector<int64_t> generate(std::span<const int64_t> prompt, const LastLogits& last_logits,
                              const GenerateOptions& options);

}  // namespace zero
