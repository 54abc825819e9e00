#include "zero/train/validation.h"

#include <algorithm>
#include <utility>

namespace zero::train {

Validation::Validation(Split text, int64_t sequence, int64_t vocab_size, int64_t tokens, bool marks,
                       bool documents)
    : sequence_(sequence),
      loader_(std::move(text), {.sequence = sequence,
                                .shuffle = false,
                                .vocab_size = vocab_size,
                                .marks = marks,
                                .documents = documents}),
      sequences_(std::min((tokens - 1) / sequence + 1, loader_.sequences())) {}

TokenLoader::Batch Validation::read(int64_t index) {
  auto state = loader_.state();
  state.sample = (2 * index + 1) * loader_.sequences() / (2 * sequences_);
  loader_.restore(state);
  return loader_.next();
}

}  // namespace zero::train
