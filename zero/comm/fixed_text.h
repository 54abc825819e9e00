// A text with room of its own, for records and for code that must not allocate.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

namespace zero::comm {

/// A text of at most N-1 bytes; a longer one is cut.
template <size_t N>
struct FixedText {
  std::array<char, N> bytes{};

  FixedText() = default;
  explicit FixedText(std::string_view text) { text.copy(bytes.data(), N - 1); }
  std::string_view view() const { return {bytes.data(), strnlen(bytes.data(), N)}; }
  bool operator==(const FixedText& other) const { return view() == other.view(); }
};

}  // namespace zero::comm
