// Numbers that look random and are decided by what they are made of.
#pragma once

#include <cstdint>

namespace zero {

/// SplitMix64's finalizer: every bit of the input reaches every bit of the output.
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace zero
