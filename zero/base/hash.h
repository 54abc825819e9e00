// 64-bit hashes (XXH3) that tell data apart. Equal data have equal hashes in every process and on
// every host. They do not protect against forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace zero {

/// Returns the hash of `memory`, at some GB a second.
uint64_t hash_of(std::span<const std::byte> memory);

/// Hashes memory that comes in pieces: the result is that of `hash_of` for all pieces together.
class PieceHash {
 public:
  PieceHash();
  ~PieceHash();
  void add(std::span<const std::byte> piece);
  /// Returns the hash of what was added since the last call.
  uint64_t take();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Hashes a sequence of numbers and texts. Their order matters.
class Hash {
 public:
  Hash& add(int64_t number);
  Hash& add(std::string_view text);
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

}  // namespace zero
