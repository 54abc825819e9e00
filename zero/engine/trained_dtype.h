// The dtypes that parameters may have.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace zero {

/// Throws ConfigError, naming the parameter, for a dtype that no Engine trains or keeps.
void check_trained_dtype(const std::string& parameter, c10::ScalarType dtype);

}  // namespace zero
