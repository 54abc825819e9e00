// The time and the money that a number of tokens takes.
#pragma once

#include <cstdint>

namespace zero::plan {

/// A training whose speed is known.
struct Training {
  double tokens = 0;
  double tokens_per_second = 0;
  int64_t devices = 1;
  double price = 0;    ///< of one device for an hour, in any currency
  double goodput = 1;  ///< the part of the time that is training (goodput.h)

  double seconds() const { return tokens / (tokens_per_second * goodput); }
  double device_hours() const { return seconds() / 3600 * static_cast<double>(devices); }
  double cost() const { return device_hours() * price; }
};

}  // namespace zero::plan
