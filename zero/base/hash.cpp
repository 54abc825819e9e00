#include "zero/base/hash.h"

// With this header, the library chooses the widest instruction set at run time.
#if __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

namespace zero {

uint64_t hash_of(std::span<const std::byte> memory) {
  return XXH3_64bits(memory.data(), memory.size());
}

struct PieceHash::State {
  XXH3_state_t* of = XXH3_createState();
  State() { XXH3_64bits_reset(of); }
  ~State() { XXH3_freeState(of); }
};

PieceHash::PieceHash() : state_(std::make_unique<State>()) {}
PieceHash::~PieceHash() = default;

void PieceHash::add(std::span<const std::byte> piece) {
  XXH3_64bits_update(state_->of, piece.data(), piece.size());
}

uint64_t PieceHash::take() {
  const uint64_t value = XXH3_64bits_digest(state_->of);
  XXH3_64bits_reset(state_->of);
  return value;
}

Hash& Hash::add(int64_t number) {
  value_ = XXH3_64bits_withSeed(&number, sizeof number, value_);
  return *this;
}

Hash& Hash::add(std::string_view text) {
  value_ = XXH3_64bits_withSeed(text.data(), text.size(), value_);
  return *this;
}

}  // namespace zero
