// Checks that tokens decode to the text that they were made from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "zero/data/filter.h"

namespace zero {

/// Compares a text with what its tokens decode to, piece by piece. U+2581, sentencepiece's sign for
/// a blank, may become one.
class RoundTrip {
 public:
  explicit RoundTrip(FilterInput text) : read_(std::move(text)) {}

  /// Takes the next piece of the decoded text. False from where it differs.
  bool feed(std::string_view decoded);
  /// False when the text goes on where the decoded text has ended, or they differ.
  bool finish();
  /// Once one of them was false: what would become of what, and where.
  std::string difference() const;

 private:
  void look_ahead();

  FilterInput read_;
  std::string text_;    // the part around at_
  size_t at_ = 0;       // of it has been compared
  uint64_t begin_ = 0;  // of text_ in the text
  bool ended_ = false;
  bool differs_ = false;
  std::string decoded_;  // instead of what is at at_
};

}  // namespace zero
