// Regular expressions of tokenizers, by the library PCRE2.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace zero::tokenizers {

/// Receives the begin and end of a match, in bytes.
using OnMatch = std::function<void(size_t begin, size_t end)>;

/// A pattern as Hugging Face's tokenizers take it (Oniguruma's syntax). The classes L, N, P, S and
/// M are those of Unicode 16, whatever PCRE2 has. Any number of threads may use it at once.
class Regex {
 public:
  /// Throws Error for a pattern that PCRE2 refuses, or that has something that means another thing
  /// there than in Oniguruma.
  explicit Regex(std::string_view pattern);

  /// Calls `on_match` for the matches in turn, without empty ones. `text` must be UTF-8. Throws
  /// DataError if the pattern takes too long on this text.
  void each(std::string_view text, const OnMatch& on_match) const;

 private:
  std::shared_ptr<const void> code_;
};

/// Reads {"String": text} or {"Regex": pattern}.
class Pattern {
 public:
  explicit Pattern(const nlohmann::json& json);
  void each(std::string_view text, const OnMatch& on_match) const;

 private:
  std::string text_;
  std::shared_ptr<const Regex> regex_;
};

}  // namespace zero::tokenizers
