// Masked language modelling (Devlin et al., arXiv 1810.04805): some tokens are hidden, and are to
// be predicted.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zero {

// Note [Masked tokens]
// Each token that is not special is chosen with probability 0.15. A chosen one is a target; it
// becomes the mask in 80 of 100 cases, any token of the vocabulary in 10, and stays in 10. The
// draws depend on nothing but the seed, the number of the sample among all that the run takes (so
// each epoch has others) and the place in it. So a run has the same batches at any number of ranks,
// and when it is resumed.
class Masking {
 public:
  /// `special` are the tokens that are never chosen. ConfigError for a mask outside of the
  /// vocabulary.
  Masking(int64_t mask, std::vector<int64_t> special, int64_t vocab_size, uint64_t seed);

  /// Hides tokens of sample `sample`, and sets `targets`, as many, to what they were; the other
  /// targets to -100.
  void apply(int64_t sample, std::span<int64_t> tokens, std::span<int64_t> targets) const;

 private:
  int64_t mask_;
  std::vector<int64_t> special_;  // in order
  int64_t vocab_size_;
  uint64_t seed_;
};

}  // namespace zero
