// Batches of sequences for each rank.
//
// Note [Order of samples]
// A source of n tokens gives S = (n - 1) / T sequences; sequence s has the inputs [sT, sT + T) and
// the targets one further. Samples are counted through all epochs: sample g is sequence
// permutation(seed, g / S)(g mod S). Of a mixture without weights S is the sum over the sources,
// whose sequences are numbered one source after the other. With weights sample g is sample h of
// source k, as Note [Mixtures] in mixture.h says, and with that source's S it is its sequence
// permutation(seed + k, h / S)(h mod S): each source has epochs of its own. At N ranks with
// micro-batch B, micro-step b takes the samples [bNB, (b + 1)NB), and rank r of them [bNB + rB, bNB
// + (r + 1)B). So the order of samples depends neither on the number of ranks nor on the
// micro-batch, an epoch visits each sequence once, no sample is dropped where epochs meet, and the
// position of a run is one number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/data/dataset.h"
#include "zero/data/mixture.h"

namespace zero {

/// The position of a run in its data. It fits any number of ranks and any micro-batch.
struct LoaderState {
  int64_t sample = 0;    ///< samples that all ranks have consumed together
  int64_t sequence = 0;  ///< T of the run
  int64_t sequences =
      0;  ///< S of the run: at another length or with other data a sample means something else
  uint64_t seed = 0;
  std::vector<int64_t> sources{};  ///< of a mixture: S of each
  std::vector<int64_t> shares{};   ///< of a mixture with weights: of each, Mixture::counts

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

  /// Throws DataError when a source is shorter than one sequence and its target, when the split has
  /// fewer sequences than ranks x micro-batch, or holds a token outside of the vocabulary (the
  /// first 16 Mi tokens are looked at here, the rest as they are read); and where `documents` are
  /// asked for, and a source does not say where they begin. Throws ConfigError for options that
  /// make no sense. A split of several sources is a mixture.
  TokenLoader(Split split, const LoaderOptions& options);

  /// Returns this rank's next micro-batch. The tensors are reused by a later call once nobody else
  /// refers to them. Throws DataError for a token outside of the vocabulary.
  Batch next();

  /// Returns whether batches have positions in documents.
  bool documents() const { return options_.documents; }

  /// Returns S, the sequences of an epoch, over all ranks and sources.
  int64_t sequences() const { return ends_.empty() ? 0 : ends_.back(); }
  /// Returns the epoch of the next sample. With weights a sequence may come more than once in it,
  /// or not at all.
  int64_t epoch() const { return sample_ / sequences(); }

  LoaderState state() const;
  /// Goes on where `state` was taken. Throws DataError when it was taken with another sequence
  /// length, seed, amount of data or mixture.
  void restore(const LoaderState& state);
  /// Goes back to the first sample.
  void rewind() { sample_ = 0; }

 private:
  // A sequence and its last target: the first token is `begin` of the file.
  struct Place {
    const TokenRange& source;
    int64_t begin = 0;
  };
  Place place_of(int64_t sample) const;
  Place place(size_t source, int64_t sequence) const;
  void check_source(const TokenRange& source);
  void check_token(const TokenRange& source, int64_t largest, int64_t begin, int64_t count) const;
  void follow_marks(const Place& place, int64_t row);

  Split split_;
  LoaderOptions options_;
  std::optional<Mixture> mixture_;  // with weights
  std::vector<int64_t> ends_;       // of each source's sequences, one source after the other
  int64_t sample_ = 0;
  Batch batch_;
  std::vector<int64_t> row_;
  std::vector<uint8_t> marks_;  // of a row's tokens and its last target; empty without marks
};

}  // namespace zero
