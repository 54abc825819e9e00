// A parameter's values lie somewhere in the weights that other programs read and write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zero {

/// The place of a parameter's values in a tensor of another program's files.
struct TensorPlace {
  std::string tensor;            ///< the name there
  std::vector<int64_t> sizes;    ///< of the whole tensor there
  std::vector<int64_t> offsets;  ///< where the values begin, in each of its dimensions
  bool transposed = false;       ///< the values are those of the transposed parameter
};

}  // namespace zero
