// Documents that lie one behind the other in the rows of a batch, and do not see each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zero {

struct Documents {
  at::Tensor positions;          ///< (B, T) int64: of each token in its document
  std::vector<int64_t> lengths;  ///< of the documents, row after row: they add up to B T
  int64_t longest = 0;           ///< of `lengths`
  int64_t end = 0;               ///< one more than the greatest position
};

/// Returns the documents that positions (B, T) tell, as transformers reads `position_ids`: a token
/// begins one at the beginning of its row, and where its position does not follow the one before.
/// Throws ConfigError for another dtype than int64, another shape than that of `tokens`, and
/// negative positions.
Documents documents_in(const at::Tensor& positions, const at::Tensor& tokens);

}  // namespace zero
