// The sequences of a validation.
#pragma once

#include <cstdint>

#include "zero/data/token_loader.h"

namespace zero::train {

// Note [Validation]
// The text is the validation splits of all sources, one after the other; weights change nothing.
// A validation of n tokens takes ceil(n / T) of the S sequences of T tokens that the text has (all
// if n is larger). The text is divided into that many equal parts; sequence i is the one in the
// middle of part i. Each sequence passes the model by itself, and the mean of their losses is
// summed in fp64 in the order of the text. So the result depends neither on the number of ranks
// (with as many threads each) nor on the micro-batch: a matrix product over several sequences may
// add in another order than one over a single sequence. Stage 3 gathers no more for it: a rank's
// sequences, a micro-batch of them at a time, all pass one layer before the next.
class Validation {
 public:
  /// Reads `tokens` tokens of the text, with `marks` and `documents` as LoaderOptions has them.
  /// Throws DataError as TokenLoader does.
  Validation(Split text, int64_t sequence, int64_t vocab_size, int64_t tokens, bool marks = true,
             bool documents = false);

  /// Returns the number of sequences.
  int64_t sequences() const { return sequences_; }
  int64_t tokens() const { return sequences_ * sequence_; }
  /// Returns sequence `index` and its targets, (1, T) each.
  TokenLoader::Batch read(int64_t index);

 private:
  int64_t sequence_;
  TokenLoader loader_;
  int64_t sequences_;
};

}  // namespace zero::train
