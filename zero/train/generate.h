// Text from a language model, token by token.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/comm/group.h"
#include "zero/models/gpt2.h"

namespace zero::train {

struct GenerateOptions {
  int64_t tokens = 200;
  double temperature = 0.8;  ///< 0: always the likeliest token
  int64_t seed = 1;
  int64_t window = 1024;  ///< tokens that the model looks back on; at most its context
};

/// The tokens that follow `prompt` (at least one token). Collective: at stage 3 the ranks gather
/// parameters together; all get the same tokens. Leaves the model in the mode (train or eval) in
/// which it was.
std::vector<int64_t> generate(Gpt2& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options, comm::Group& group);

}  // namespace zero::train
