// A number that tells memory apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zero::store {

/// XXH3's 64 bits of `memory`: some GB/s, and equal for equal bytes. Not against forgery.
uint64_t hash_of(std::span<const std::byte> memory);

}  // namespace zero::store
