// Findings say what becomes of the keys of a configuration file.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

enum class Effect : uint8_t {
  acts,     ///< the engine, the model or the program uses it
  holds,    ///< the key asks for nothing, or for something that is so anyway
  off,      ///< its section is switched off
  none,     ///< the key has no effect here
  refused,  ///< the key or its value cannot be used
};

/// One key of a file.
struct Finding {
  std::string key{};  ///< with dots between sections; empty if it is not about one key
  Effect effect = Effect::acts;
  std::string text{};  ///< why, and what to use instead; for a key that acts, a warning
};

/// How a configuration file is read.
struct ReadOptions {
  /// Top-level keys that belong to the caller and are passed over.
  std::span<const std::string> foreign{};
  /// True: features that libzero does not have, and keys that nobody knows, are warnings and no
  /// errors.
  bool lenient = false;
  /// Gets each warning, a complete sentence or several lines. Empty: they go to stderr, unless a
  /// launcher says that this process is another rank than the first.
  std::function<void(std::string_view)> warn{};
};

/// Returns `findings` as the warnings of one file: all keys without effect are one warning, with a
/// line for each reason.
std::vector<std::string> warnings_of(std::span<const Finding> findings, std::string_view origin);

}  // namespace zero
