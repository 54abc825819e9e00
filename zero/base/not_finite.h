// The error that reports infinite or NaN numbers.
#pragma once

#include "zero/base/error.h"

namespace zero {

/// A loss or a gradient is infinite or NaN, and because of it nothing was updated. The message
/// names its origin, if that is known.
class NotFinite : public Error {
  using Error::Error;
};

}  // namespace zero
