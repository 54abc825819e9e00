// Rotary position embeddings as a device's threads compute them: Note [Kernels in plain C++] in
// zero/optim/device_elements.h. A thread turns a pack of a head's first half with the same columns
// of its second half. Backward turns by the opposite angle.
#pragma once

#include <cstdint>

#include "zero/models/layers/packs.h"

namespace zero::rotary_elements {

/// Heads in one array without gaps, each of `width` numbers; `heads` of them have one position. The
/// table has a row of `width` numbers for each of `positions` positions, which repeat.
template <class Numbers>
struct Heads {
  const typename Numbers::Stored* x;
  typename Numbers::Stored* y;
  const typename Numbers::Stored *cosines, *sines;
  int64_t count;  ///< of heads, over all positions
  int64_t heads, width, positions;
  bool back;
};

/// Returns how many packs of kCount a thread each are turned.
template <int kCount, class Numbers>
constexpr int64_t packs_of(const Heads<Numbers>& heads) {
  return heads.count * (heads.width / 2 / kCount);
}

/// Turns pack `index`.
template <int kCount, class Numbers>
constexpr void turn(const Heads<Numbers>& heads, int64_t index) {
  using Stored = typename Numbers::Stored;
  const int64_t half = heads.width / 2;
  const int64_t a_head = half / kCount;
  const int64_t head = index / a_head;
  const int64_t first = head * heads.width + index % a_head * kCount;
  const int64_t row = head / heads.heads % heads.positions * heads.width + index % a_head * kCount;
  const auto read = [](const Stored* from) { return packs::widened<Numbers, kCount>(from); };
  const auto a = read(heads.x + first), b = read(heads.x + first + half);
  const auto cos_a = read(heads.cosines + row), cos_b = read(heads.cosines + row + half);
  const auto sin_a = read(heads.sines + row), sin_b = read(heads.sines + row + half);
  packs::Pack<Stored, kCount> to_a{}, to_b{};
  for (int i = 0; i < kCount; ++i) {
    if (heads.back) {
      to_a.values[i] =
          Numbers::narrow(a.values[i] * cos_a.values[i] + b.values[i] * sin_b.values[i]);
      to_b.values[i] =
          Numbers::narrow(b.values[i] * cos_b.values[i] - a.values[i] * sin_a.values[i]);
    } else {
      to_a.values[i] =
          Numbers::narrow(a.values[i] * cos_a.values[i] - b.values[i] * sin_a.values[i]);
      to_b.values[i] =
          Numbers::narrow(b.values[i] * cos_b.values[i] + a.values[i] * sin_b.values[i]);
    }
  }
  optim::device::store(to_a, heads.y + first);
  optim::device::store(to_b, heads.y + first + half);
}

}  // namespace zero::rotary_elements
