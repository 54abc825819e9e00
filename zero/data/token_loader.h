// Batches of sequences for each rank.
//
// Note [Order of samples]
// A split of n tokens gives S = (n - 1) / T sequences; sequence s has the inputs [sT, sT + T) and
// the targets one further. Samples are counted through all epochs: sample g is sequence
// permutation(seed, g / S)(g mod S). At N ranks with micro-batch B, micro-step b takes the samples
// [bNB, (b + 1)NB), and rank r of them [bNB + rB, bNB + (r + 1)B). So the order of samples depends
// neither on the number of ranks nor on the micro-batch, an epoch visits each sequence once, no
// sample is dropped where epochs meet, and the position of a run is one number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "zero/data/dataset.h"

namespace zero {

/// The position of a run in its data. It fits any number of ranks and any micro-batch.
struct LoaderState {
  int64_t sample = 0;    ///< samples that all ranks have consumed together
  int64_t sequence = 0;  ///< T of the run
  int64_t sequences =
      0;  ///< S of the run: at another length or with other data a sample means something else
  uint64_t seed = 0;

  std::string to_json() const;
  /// Throws DataError when a value is missing or of the wrong kind.
  static LoaderState from_json(std::string_view json);
  bool operator==(const LoaderState&) const = default;
};

/// Throws DataError unless a position of `saved` means the same in data that are at `now`.
void check_same_data(const LoaderState& saved, const LoaderState& now);

struct LoaderOptions {
  int64_t sequence = 0;     ///< T
  int64_t micro_batch = 1;  ///< B, sequences a rank takes at a time
  int64_t rank = 0;
  int64_t world_size = 1;
  uint64_t seed = 0;
  bool shuffle = true;     ///< false: in the order of the file, as for validation
  int64_t vocab_size = 0;  ///< the model's; a token at or above it is refused. 0 checks nothing
  bool marks = true;       ///< follow the marks of the tokens where there are some
  /// Tell where documents begin, which the marks say: a document predicts nothing of the next.
  bool documents = false;
};

class TokenLoader {
 public:
  struct Batch {
    at::Tensor tokens;  ///< (B, T) int64
    /// (B, T) int64; -100 where the marks say that a token is not supervised, and, of `documents`,
    /// that it begins one.
    at::Tensor targets;
    /// (B, T) int64, of `documents`: the place of each token in its document, of which a row has
    /// what lies in it. Otherwise undefined.
    at::Tensor positions;
  };

  /// Throws DataError when the split is shorter than one sequence and its target, has fewer
  /// sequences than ranks x micro-batch, or holds a token outside of the vocabulary (the first 16
  /// Mi tokens are looked at here, the rest as they are read); and where `documents` are asked for,
  /// and no marks say where they begin. Throws ConfigError for options that make no sense.
  TokenLoader(TokenRange tokens, const LoaderOptions& options);

  /// Returns this rank's next micro-batch. The tensors are reused by a later call once nobody else
  /// refers to them. Throws DataError for a token outside of the vocabulary.
  Batch next();

  /// Returns whether batches have positions in documents.
  bool documents() const { return options_.documents; }

  /// Returns S, the sequences of an epoch, over all ranks.
  int64_t sequences() const { return sequences_; }
  /// Returns the epoch of the next sample.
  int64_t epoch() const { return sample_ / sequences_; }

  LoaderState state() const;
  /// Goes on where `state` was taken. Throws DataError when it was taken with another sequence
  /// length, seed or amount of data.
  void restore(const LoaderState& state);
  /// Goes back to the first sample.
  void rewind() { sample_ = 0; }

 private:
  int64_t sequence_of(int64_t sample) const;
  void check_token(int64_t largest, int64_t begin, int64_t count) const;
  void check_documents() const;
  void follow_marks(int64_t begin, int64_t row);

  TokenRange tokens_;
  LoaderOptions options_;
  int64_t sequences_ = 0;
  int64_t sample_ = 0;
  Batch batch_;
  std::vector<int64_t> row_;
  std::vector<uint8_t> marks_;  // of a row's tokens and its last target; empty without marks
};

}  // namespace zero
