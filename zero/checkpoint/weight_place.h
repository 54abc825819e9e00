// A tensor of a file of weights: what describes it, and how it is read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "zero/checkpoint/safetensors.h"

namespace zero {

struct WeightPlace {
  TensorInfo info;
  std::filesystem::path file;
  std::function<at::Tensor()> read;
  std::function<at::Tensor(int64_t, int64_t)> read_part;  // empty: only the whole

  /// Returns the elements [begin, begin + count), in row-major order, as a 1-D tensor. Throws
  /// CheckpointError if the tensor does not have them.
  at::Tensor range(int64_t begin, int64_t count) const;
};

/// The tensors of one model, by their names.
using WeightPlaces = std::map<std::string, WeightPlace, std::less<>>;

}  // namespace zero
