#include "zero/store/hash.h"

// With it the library chooses the widest instruction set at run time.
#if __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

namespace zero::store {

uint64_t hash_of(std::span<const std::byte> memory) {
  return XXH3_64bits(memory.data(), memory.size());
}

}  // namespace zero::store
