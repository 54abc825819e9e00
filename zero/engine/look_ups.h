// The messages of look-ups beside a tied gradient in tiles.
#pragma once

#include <cstdint>

namespace zero {

/// They have at most this part of the weight's elements: one in so many.
inline constexpr int64_t kLookUpShare = 8;

/// The sums of a step's look-ups that go beside the tiles of a tied weight's gradient: Note [Tied
/// gradient in tiles] in tied_gradient.h.
struct LookUpMessages {
  int64_t unit = -1;  ///< the weight's; -1: there were none
  int64_t numel = 0;  ///< the elements of their reduce-scatters, all slices
};

}  // namespace zero
