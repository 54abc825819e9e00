#include "zero/data/round_trip.h"

#include <fmt/format.h>

#include <algorithm>

#include "zero/data/utf8.h"

namespace zero {
namespace {

constexpr size_t kContext = 24;  // bytes that a message shows on each side
constexpr std::string_view kBlank = "\xE2\x96\x81";

// Returns the text without the rest of a character at its beginning.
std::string_view whole_from(std::string_view text) {
  while (!text.empty() && (static_cast<unsigned char>(text.front()) & 0xC0) == 0x80)
    text.remove_prefix(1);
  return text;
}

// Returns the text without the beginning of a character at its end, unless that is all of it.
std::string_view whole_to(std::string_view text) {
  const size_t good = valid_utf8(text);
  return good > 0 && text.size() - good < 4 ? text.substr(0, good) : text;
}

}  // namespace

void RoundTrip::look_ahead() {
  if (text_.size() - at_ >= kContext) return;
  const size_t passed = at_ - std::min(at_, kContext);
  text_.erase(0, passed);
  at_ -= passed;
  begin_ += passed;
  while (!ended_ && text_.size() - at_ < kContext) {
    const auto piece = read_();
    ended_ = piece.empty();
    text_ += piece;
  }
}

bool RoundTrip::feed(std::string_view decoded) {
  while (!differs_ && !decoded.empty()) {
    look_ahead();
    const auto expected = std::string_view(text_).substr(at_);
    const auto same =
        std::mismatch(expected.begin(), expected.end(), decoded.begin(), decoded.end()).first -
        expected.begin();
    at_ += static_cast<size_t>(same);
    decoded.remove_prefix(static_cast<size_t>(same));
    if (same > 0) continue;
    if (decoded.front() == ' ' && expected.starts_with(kBlank)) {
      at_ += kBlank.size();
      decoded.remove_prefix(1);
      continue;
    }
    differs_ = true;
    decoded_ = decoded.substr(0, kContext);
  }
  return !differs_;
}

bool RoundTrip::finish() {
  look_ahead();
  differs_ |= at_ < text_.size();
  return !differs_;
}

std::string RoundTrip::difference() const {
  const auto text = std::string_view(text_);
  const auto before =
      whole_from(text.substr(at_ - std::min(at_, kContext), std::min(at_, kContext)));
  const auto show = [&](std::string_view after) {
    return in_quotes(std::string(before).append(whole_to(after)));
  };
  return fmt::format("{} would become {} (byte {} of the text)", show(text.substr(at_, kContext)),
                     show(decoded_), begin_ + at_);
}

}  // namespace zero
