// Checks what the sizes of every model must be.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "zero/base/error.h"

namespace zero {

/// The largest sizes of a model. The number of its elements, and of their bytes, fits 63 bits.
struct LargestSizes {
  static constexpr int64_t vocabulary = INT32_MAX;
  static constexpr int64_t context = INT32_MAX;
  static constexpr int64_t width = 1 << 20;
  static constexpr int64_t inner = 1 << 24;
  static constexpr int64_t heads = 1 << 14;
  static constexpr int64_t head_dim = 1 << 12;
  static constexpr int64_t layers = 10'000;
};

/// Throws ConfigError, which names the model and the key, unless `value` is from 1 to `most`.
inline void check_size(std::string_view model, const char* key, int64_t value, int64_t most) {
  if (value <= 0)
    throw ConfigError(fmt::format("{}'s {} is {}; it must be positive.", model, key, value));
  if (value > most) {
    throw ConfigError(fmt::format("{}'s {} is {}; it may be at most {}.", model, key, value, most));
  }
}

/// A size by its key, and the most that it may be.
struct NamedSize {
  const char* key;
  int64_t value;
  int64_t most;
};
/// Does what check_size does for each of a model's sizes, in their order.
inline void check_sizes(std::string_view model, std::initializer_list<NamedSize> sizes) {
  for (const auto& size : sizes) check_size(model, size.key, size.value, size.most);
}

/// Throws ConfigError, which names the model and the key, unless `value` is in [0, 1).
inline void check_probability(std::string_view model, const char* key, double value) {
  if (value >= 0 && value < 1) return;
  throw ConfigError(
      fmt::format("{}'s {} is {}; it must be at least 0 and less than 1.", model, key, value));
}

}  // namespace zero
