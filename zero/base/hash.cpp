#include "zero/base/hash.h"

// With this header the library chooses the widest instruction set at run time.
#if __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

namespace zero {

uint64_t hash_of(std::span<const std::byte> memory) {
  return XXH3_64bits(memory.data(), memory.size());
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
