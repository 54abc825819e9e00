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

  /// Takes the next piece of the decoded text. Returns false as soon as the two texts differ.
  bool feed(std::string_view decoded);
  /// Ends the comparison. Returns false if the texts differ, or if the text goes on where the
  /// decoded text has ended.
  bool finish();
  /// Returns a description of the first difference, after `feed` or `finish` has returned false:
  /// the place, the text there, and the text that its tokens would give.
  std::string difference() const;

 private:
  void look_ahead();

  FilterInput read_;
  std::string text_;    // a part of the text
  size_t at_ = 0;       // bytes of text_ that have been compared
  uint64_t begin_ = 0;  // the byte of the text at which text_ begins
  bool ended_ = false;
  bool differs_ = false;
  std::string decoded_;  // the decoded text at the first difference
};

}  // namespace zero
