// Notices losses that are far above those of the steps before.
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
  /// The gradient norm of the update before, which made the weights of this loss.
  double grad_norm = 0;
  double loss_scale = 0;  ///< 0 if losses are not scaled
  double lr = 0;
};

/// Keeps the last kWindow losses with their mean and deviation. All ranks that add the same numbers
/// decide alike.
class LossSpikes {
 public:
  static constexpr size_t kWindow = 32;
  /// A loss is a spike if it is this many standard deviations above the mean, and this many times
  /// the mean.
  static constexpr double kDeviations = 6;
  static constexpr double kTimes = 1.1;

  /// Adds a step. If its loss is a spike, returns a sentence that says what changed with it, and
  /// forgets the loss, so that the next one is compared with those before; otherwise returns an
  /// empty text. `losses` are those of `ranks` ranks, by micro-batch and then by rank; the sentence
  /// names the highest. The first kWindow steps are never spikes. After kWindow spikes in a row the
  /// new level is the usual one.
  std::string add(const LossSample& sample, const std::vector<float>& losses, int ranks);

  /// Return the samples, the oldest first, for a checkpoint; and set them to those of one.
  std::vector<LossSample> samples() const;
  void restore(const std::vector<LossSample>& samples);

 private:
  std::string told_of(const LossSample& sample, double mean, double deviation,
                      const std::vector<float>& losses, int ranks) const;

  std::array<LossSample, kWindow> samples_{};
  size_t count_ = 0;   // the number of losses that were added
  size_t spikes_ = 0;  // in a row
};

}  // namespace zero::train
