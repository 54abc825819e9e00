// Checks what programs say about the weights of other programs against the parameters of an engine.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "zero/checkpoint/safetensors.h"
#include "zero/engine/pretrained.h"

namespace zero {

/// Returns the shape of a parameter's values as its tensor in a file has them.
std::vector<int64_t> shape_in(const TensorPlace& place, std::vector<int64_t> shape);

/// Throws ConfigError for a name that no parameter has, for a place where the parameter's values do
/// not lie within their tensor, and for packed bytes of another format or size. Not collective.
void check_options(const std::vector<TensorInfo>& parameters, const PretrainedOptions& options);

/// The tensors that `save_pretrained` writes, and the factors of products, which it does not.
struct WrittenTensors {
  std::vector<TensorInfo> tensors;  ///< in the order in which they are complete
  std::set<std::string> factors;
};

/// `buffers` come behind the parameters. Throws as the other function does; also for products whose
/// matrices do not fit, for tensors whose parts overlap or leave a gap, and for two tensors of one
/// name. `dtype` is the engine's for parameters. Not collective.
WrittenTensors written_tensors(const std::vector<TensorInfo>& parameters,
                               const std::vector<TensorInfo>& buffers,
                               const SavePretrainedOptions& options, at::ScalarType dtype);

}  // namespace zero
