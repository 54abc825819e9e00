// Says which source of a mixture gives each sample.
//
// Note [Mixtures]
// Samples are counted in blocks of 4096. Weights are rounded to numbers of samples in a block,
// which add up to 4096, by the largest remainder; each source has at least one, which the source
// with the most gives up where it must. Within a block the sources take turns: each sample is of
// the source that is furthest behind its share, the first of those that are equally far. So a
// source is never a whole sample ahead of its share, and sample g is sample
// (g / 4096) * (samples in a block) + (those before it in the block) of its source. All of it is
// whole numbers once the weights are rounded: hosts, ranks and micro-batches change nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero {

class Mixture {
 public:
  static constexpr int64_t kBlock = 4096;

  struct Place {
    size_t source = 0;
    int64_t sample = 0;  ///< of that source, counted through all epochs
  };

  /// `weights` need not add up to 1. Throws ConfigError unless they are of 1 to 4096 sources, and
  /// each is finite and above 0.
  explicit Mixture(const std::vector<double>& weights);

  /// Returns the samples of each source in a block.
  const std::vector<int64_t>& counts() const { return counts_; }
  /// Returns where sample `sample` of the run comes from.
  Place operator()(int64_t sample) const;

 private:
  std::vector<int64_t> counts_;
  std::vector<uint16_t> sources_;  // of each sample of a block
  std::vector<uint16_t> before_;   // samples of that source before it in the block
};

}  // namespace zero
