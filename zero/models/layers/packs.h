// Neighbouring numbers of an array that a device's thread reads and writes at once, in plain C++:
// Note [Kernels in plain C++] in zero/optim/device_elements.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "zero/optim/device_elements.h"

namespace zero::packs {

using optim::device::Pack;

/// Holds kCount numbers in fp32.
template <class Numbers, int kCount>
constexpr Pack<float, kCount> widened(const Pack<typename Numbers::Stored, kCount>& stored) {
  Pack<float, kCount> values{};
  for (int i = 0; i < kCount; ++i) values.values[i] = Numbers::widen(stored.values[i]);
  return values;
}
template <class Numbers, int kCount>
constexpr Pack<float, kCount> widened(const typename Numbers::Stored* from) {
  return widened<Numbers, kCount>(optim::device::load<kCount>(from));
}

/// How many numbers are 16 bytes, the most that a thread reads at once.
template <class Numbers>
inline constexpr int kWidth = 16 / sizeof(typename Numbers::Stored);

/// Returns whether packs of kWidth of all these arrays may be read: each begins at a multiple of 16
/// bytes.
template <class... Pointer>
bool aligned(const Pointer*... arrays) {
  return ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...);
}

}  // namespace zero::packs
