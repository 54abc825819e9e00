// One case: what Engine makes of it beside what the oracle makes of it.
#pragma once

#include <string>

#include "tests/compositions/choices.h"

namespace zero::compositions {

struct Verdict {
  enum class Kind : uint8_t {
    same,     ///< the oracle's bits
    near,     ///< within the stated tolerance, where sums are added in another order by design
    refused,  ///< every rank threw a zero::Error
    failed,   ///< anything else
  };
  Kind kind = Kind::same;
  std::string why;  ///< the refusal or the failure, in one line
};

/// Runs a case on ranks that are threads. Does not return where a rank hangs.
Verdict run(const Case& given);

}  // namespace zero::compositions
