// The sequences of a validation.
#pragma once

#include <cstdint>

#include "zero/data/token_loader.h"

namespace zero::train {

// Note [Validation]
// A validation of n tokens takes ceil(n / T) of the S sequences of T tokens that the text has (all
// where n is larger): sequence i is the one in the middle of the i-th of as many equal parts of the
// text. Each passes the model by itself, and the mean of their losses is summed in fp64 in the
// order of the text. So the result depends neither on the number of ranks nor on the micro-batch:
// a matrix product over several sequences may add in another order than one over a single one.
// That costs nothing at stage 3: a rank's sequences, a micro-batch of them at a time, all pass one
// layer before the next.
class Validation {
 public:
  /// `tokens` of the text are to be read. Throws DataError as TokenLoader.
  Validation(TokenRange text, int64_t sequence, int64_t vocab_size, int64_t tokens);

  /// The number of sequences.
  int64_t sequences() const { return sequences_; }
  int64_t tokens() const { return sequences_ * sequence_; }
  /// Sequence `index` and its targets, (1, T) each.
  TokenLoader::Batch read(int64_t index);

 private:
  int64_t sequence_;
  TokenLoader loader_;
  int64_t sequences_;
};

}  // namespace zero::train
