// The messages of look-ups in a tied weight.
#pragma once

#include <cstdint>

namespace zero {

/// They have at most this part of the weight's elements: one in so many.
inline constexpr int64_t kLookUpShare = 8;

/// The messages of a step's look-ups: the sums that go beside the tiles of a tied weight's gradient
/// (Note [Tied gradient in tiles] in tied_gradient.h), or the rows of the weight (Note [Look-ups by
/// rows] in row_look_ups.h).
struct LookUpMessages {
  int64_t unit = -1;  ///< the weight's; -1: there were none
  int64_t numel = 0;  ///< the elements of their reduce-scatters or all-gathers, all slices
};

/// A look-up of a model's loss in a tied weight (V, C).
struct TiedLookUp {
  int64_t parameter = -1;  ///< the weight; -1: there is none
  int64_t rows = 0;        ///< that one rank looks up, at most
  int64_t columns = 0;
};

}  // namespace zero
