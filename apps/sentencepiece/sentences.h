// Text in pieces that tokens never cross.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

namespace zero {

/// Bytes of a sentence at most.
inline constexpr size_t kMaxSentence = 8192;

/// Lines with their newline; a line that is too long is cut at a blank, or else between two
/// characters. The pieces together are the text.
class Sentences {
 public:
  /// Reads at most `size` bytes to `data`, and returns how many; 0 at the end.
  using Read = std::function<size_t(char* data, size_t size)>;
  explicit Sentences(Read read, size_t block = size_t{1} << 20)
      : read_(std::move(read)), block_(block) {}

  /// False at the end of the text.
  bool next(std::string& sentence) {
    while (true) {
      const auto newline = buffer_.find('\n', begin_);
      const size_t rest = buffer_.size() - begin_;
      size_t length = newline != std::string::npos ? newline + 1 - begin_ : 0;
      if (length == 0 && ended_) length = rest;
      if (length > kMaxSentence || (length == 0 && rest > kMaxSentence)) length = cut();
      if (length > 0) {
        sentence.assign(buffer_, begin_, length);
        begin_ += length;
        return true;
      }
      if (ended_) return false;
      fill();
    }
  }

 private:
  size_t cut() const {
    const auto blank = buffer_.rfind(' ', begin_ + kMaxSentence);
    if (blank != std::string::npos && blank > begin_) return blank - begin_;
    // A character has at most three bytes after its first; more of them are not UTF-8.
    for (size_t length = kMaxSentence; length > kMaxSentence - 4; --length) {
      if ((buffer_[begin_ + length] & 0xC0) != 0x80) return length;
    }
    return kMaxSentence;
  }
  void fill() {
    buffer_.erase(0, begin_);
    begin_ = 0;
    const size_t old = buffer_.size();
    buffer_.resize(old + block_);
    const size_t got = read_(buffer_.data() + old, buffer_.size() - old);
    buffer_.resize(old + got);
    ended_ = got == 0;
  }

  Read read_;
  size_t block_;
  std::string buffer_;
  size_t begin_ = 0;
  bool ended_ = false;
};

}  // namespace zero
