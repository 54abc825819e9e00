// Makes text with a language model, a token at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace zero {

class LanguageModel;

struct GenerateOptions {
  int64_t tokens = 256;      ///< how many to generate
  int64_t context = 1024;    ///< the model sees at most so many tokens, the last ones
  double temperature = 1.0;  ///< logits are divided by it; 0 takes the likeliest token
  int64_t top_k = 0;         ///< only the likeliest so many can be drawn; 0 means all
  /// Only the likeliest tokens can be drawn whose probabilities, after temperature and top_k, add
  /// up to so much; in (0, 1]. The token that reaches it is among them.
  double top_p = 1.0;
  std::vector<int64_t> stop_tokens{};  ///< the text ends before the first of them
  uint64_t seed =
      0;  ///< of a generator of its own, so that equal logits give equal tokens on every rank
  std::function<bool()> stop{};  ///< asked before each token: whether to leave it at those so far
  std::function<void(int64_t)> on_token{};  ///< told each token
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
