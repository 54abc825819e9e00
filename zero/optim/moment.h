// Says which update is made, and how far it goes.
#pragma once

#include <cstdint>

namespace zero::optim {

/// An update, or one of its two sweeps: Note [Two sweeps] in sweeps.h.
enum class Sweep : uint8_t { whole, first, second };

/// One update, as all elements of a parameter see it.
struct Moment {
  int64_t step = 1;  ///< 1 for the first
  double lr = 0;
  double ratio = 1;  ///< result of the first sweep, if there is one
  Sweep sweep = Sweep::whole;
};

}  // namespace zero::optim
