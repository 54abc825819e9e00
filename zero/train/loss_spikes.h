// Notices losses that leave what the steps before had.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace zero::train {

/// A step's loss, and the numbers that may have changed with it.
struct LossSample {
  double loss = 0;
  /// The gradient norm of the update before, which made the weights that this loss is of.
  double grad_norm = 0;
  double loss_scale = 0;  ///< 0 where losses are not scaled
  double lr = 0;
};

/// The mean and deviation of the last kWindow losses. All ranks that add the same numbers decide
/// alike.
class LossSpikes {
 public:
  static constexpr size_t kWindow = 32;
  /// A loss is a spike that is so many standard deviations above the mean, and so many times it.
  static constexpr double kDeviations = 6;
  static constexpr double kTimes = 1.1;

  /// Adds a step. Where its loss is a spike, returns a sentence that says what changed with it, and
  /// forgets the loss, so that the next one is compared with those before; otherwise nothing. Of
  /// `losses`, by micro-batch and then by rank, of `ranks` ranks, the highest is named. The first
  /// kWindow steps are never spikes; after as many spikes in a row the new level is the usual one.
  std::string add(const LossSample& sample, const std::vector<float>& losses, int ranks);

  /// Return what is remembered, the oldest first, for a checkpoint; and set it to what was there.
  std::vector<LossSample> samples() const;
  void restore(const std::vector<LossSample>& samples);

 private:
  std::string told_of(const LossSample& sample, double mean, double deviation,
                      const std::vector<float>& losses, int ranks) const;

  std::array<LossSample, kWindow> samples_{};
  size_t count_ = 0;   // of all that were added
  size_t spikes_ = 0;  // in a row
};

}  // namespace zero::train
