// The error of numbers that are infinite or NaN.
#pragma once

#include "zero/base/error.h"

namespace zero {

/// A loss or a gradient is infinite or NaN, and nothing was updated because of it. Names what made
/// it, if that is known.
class NotFinite : public Error {
  using Error::Error;
};

}  // namespace zero
