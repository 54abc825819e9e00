#include "zero/data/masking.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/mix.h"

namespace zero {
namespace {

// Shares of 2^32: of the tokens, those that are chosen; of these, those that become the mask, and
// those that become the mask or any token.
constexpr uint64_t share(double of) { return static_cast<uint64_t>(of * 4294967296.0); }
constexpr uint64_t kChosen = share(0.15);
constexpr uint64_t kMasked = share(0.8);
constexpr uint64_t kReplaced = share(0.9);
constexpr int64_t kIgnored = -100;

}  // namespace

Masking::Masking(int64_t mask, std::vector<int64_t> special, int64_t vocab_size, uint64_t seed)
    : mask_(mask), special_(std::move(special)), vocab_size_(vocab_size), seed_(mix(seed)) {
  if (mask < 0 || mask >= vocab_size) {
    throw ConfigError(
        fmt::format("The mask is the token {}, which the vocabulary of {} tokens does not have. "
                    "Give another --mask-token.",
                    mask, vocab_size));
  }
  special_.push_back(mask);
  std::sort(special_.begin(), special_.end());
}

void Masking::apply(int64_t sample, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  ensure(tokens.size() == targets.size(), "a target for each token");
  const uint64_t of_sample = mix(seed_ ^ static_cast<uint64_t>(sample));
  for (size_t i = 0; i < tokens.size(); ++i) {
    targets[i] = kIgnored;
    if (std::binary_search(special_.begin(), special_.end(), tokens[i])) continue;
    const uint64_t drawn = mix(of_sample ^ i);
    if (drawn >> 32 >= kChosen) continue;
    targets[i] = tokens[i];
    const uint64_t kind = drawn & 0xffffffffU;
    if (kind < kMasked) {
      tokens[i] = mask_;
    } else if (kind < kReplaced) {
      tokens[i] = static_cast<int64_t>(mix(drawn) % static_cast<uint64_t>(vocab_size_));
    }
  }
}

}  // namespace zero
