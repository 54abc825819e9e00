// Says where a parameter's values lie in the weights that other programs read and write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zero {

/// The place of a parameter's values in a tensor of another program's files.
struct TensorPlace {
  std::string tensor;            ///< its name there
  std::vector<int64_t> sizes;    ///< sizes of that whole tensor
  std::vector<int64_t> offsets;  ///< begin of the values, in each of its dimensions
  bool transposed = false;       ///< the values are those of the transposed parameter
};

}  // namespace zero
