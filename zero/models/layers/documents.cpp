#include "zero/models/layers/documents.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "zero/base/error.h"

namespace zero {

Documents documents_in(const at::Tensor& positions, const at::Tensor& tokens) {
  if (positions.scalar_type() != at::kLong || positions.dim() != 2 ||
      positions.sizes() != tokens.sizes()) {
    throw ConfigError(fmt::format(
        "Positions in documents are Long of the shape of the tokens, ({}), and not {} of ({}).",
        fmt::join(tokens.sizes(), ", "), c10::toString(positions.scalar_type()),
        fmt::join(positions.sizes(), ", ")));
  }
  const auto host = positions.to(at::kCPU).contiguous();
  const auto* position = host.const_data_ptr<int64_t>();
  Documents documents{.positions = positions, .lengths = {}};
  for (int64_t i = 0; i < host.numel(); ++i) {
    if (position[i] < 0) {
      throw ConfigError(fmt::format(
          "The position of token {} in its document is {}; positions begin at 0.", i, position[i]));
    }
    if (i % host.size(1) == 0 || position[i] != position[i - 1] + 1) documents.lengths.push_back(0);
    ++documents.lengths.back();
    documents.longest = std::max(documents.longest, documents.lengths.back());
    documents.end = std::max(documents.end, position[i] + 1);
  }
  return documents;
}

}  // namespace zero
