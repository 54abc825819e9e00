// The names of classes that nobody has named.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zero {

/// Returns the names that transformers gives to `count` classes, by their numbers: LABEL_0, LABEL_1
/// and so on.
inline std::vector<std::string> class_names(int64_t count) {
  std::vector<std::string> names;
  for (int64_t number = 0; number < count; ++number)
    names.push_back(fmt::format("LABEL_{}", number));
  return names;
}

}  // namespace zero
