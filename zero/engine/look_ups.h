// Look-ups in a weight that need some of its rows, and their messages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zero {

/// Messages of rows have at most this part of the weight's elements: one in so many.
inline constexpr int64_t kLookUpShare = 8;
/// Returns whether messages of `numel` elements are few enough beside a unit of `whole` elements.
constexpr bool are_few(int64_t numel, int64_t whole) { return kLookUpShare * numel <= whole; }

/// The use of a weight in a step, as far as its rows may travel without it.
enum class LookUpUse : uint8_t {
  none,   ///< the weight is gathered, and its gradient is reduced, whole
  alone,  ///< each pass looks rows up, once: Note [Gradients by rows] in look_up_gradient.h
  tied,   ///< an output projection uses it, too: Note [Tied gradient in tiles] there
};

/// The messages of a step's look-ups in one weight: the sums of the rows of its gradient (the notes
/// in look_up_gradient.h), or the rows of the weight (Note [Look-ups by rows] in row_look_ups.h).
struct RowMessages {
  int64_t unit = -1;     ///< the weight's
  int64_t numel = 0;     ///< the elements of their reduce-scatters or all-gathers, all slices
  int64_t replaces = 0;  ///< so many passes had them in the place of messages of the whole unit
};

/// Returns those of a unit, or none.
inline RowMessages messages_of(const std::vector<RowMessages>& all, int64_t unit) {
  const auto found = std::ranges::find(all, unit, &RowMessages::unit);
  return found != all.end() ? *found : RowMessages{};
}

/// A weight (V, C) in which all ranks expect look-ups.
struct ExpectedLookUp {
  int64_t parameter = -1;
  int64_t columns = 0;  ///< C
  LookUpUse use = LookUpUse::none;
};

/// A model's look-up in a weight (V, C), once in each pass.
struct PlannedLookUp {
  int64_t parameter = -1;  ///< the weight; -1: there is none
  LookUpUse use = LookUpUse::none;
  int64_t rows = 0;     ///< that one rank looks up in a pass, at most
  int64_t columns = 0;  ///< C
};

}  // namespace zero
