#include "zero/train/loss_spikes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace zero::train {

namespace {

/// Says how a number differs from the `usual` one; an empty text if it does not.
std::string changed(std::string_view what, double now, double usual) {
  constexpr double kNotable = 2;
  if (!(usual > 0) || !(now > 0)) return {};
  const double times = now / usual;
  if (times < kNotable && times > 1 / kNotable) return {};
  return fmt::format(" The {} is {:.3g}, {:.2g} times the usual {:.3g}.", what, now, times, usual);
}

}  // namespace

std::string LossSpikes::add(const LossSample& sample, const std::vector<float>& losses, int ranks) {
  if (count_ >= kWindow) {
    double mean = 0;
    for (const auto& each : samples_) mean += each.loss / kWindow;
    double square = 0;
    for (const auto& each : samples_) square += (each.loss - mean) * (each.loss - mean) / kWindow;
    const double deviation = std::sqrt(square);
    const bool spike = sample.loss > mean + kDeviations * deviation && sample.loss > kTimes * mean;
    spikes_ = spike ? spikes_ + 1 : 0;
    if (spike && spikes_ <= kWindow) return told_of(sample, mean, deviation, losses, ranks);
    if (spike) {  // the level has changed, so the window begins anew
      count_ = 0;
      spikes_ = 0;
    }
  }
  samples_[count_++ % kWindow] = sample;
  return {};
}

std::vector<LossSample> LossSpikes::samples() const {
  std::vector<LossSample> all;
  for (size_t i = count_ > kWindow ? count_ - kWindow : 0; i < count_; ++i)
    all.push_back(samples_[i % kWindow]);
  return all;
}

void LossSpikes::restore(const std::vector<LossSample>& samples) {
  count_ = spikes_ = 0;
  for (const auto& sample : samples) samples_[count_++ % kWindow] = sample;
}

std::string LossSpikes::told_of(const LossSample& sample, double mean, double deviation,
                                const std::vector<float>& losses, int ranks) const {
  auto text = fmt::format("The loss {:.4f} is a spike: the mean of the {} steps before is {:.4f}",
                          sample.loss, kWindow, mean);
  text += deviation > 0 ? fmt::format(", {:.0f} standard deviations below it.",
                                      (sample.loss - mean) / deviation)
                        : ".";
  const auto highest = std::max_element(losses.begin(), losses.end());
  if (losses.size() > 1) {
    double rest = 0;
    for (const float loss : losses) rest += loss;
    rest = (rest - *highest) / static_cast<double>(losses.size() - 1);
    const auto at = highest - losses.begin();
    text += rest < kTimes * mean
                ? fmt::format(
                      " It is one batch: rank {}'s micro-batch {} has {:.4f}, the others {:.4f}.",
                      at % ranks, at / ranks + 1, *highest, rest)
                : fmt::format(
                      " All batches are higher ({:.4f} without the highest): the weights "
                      "have moved.",
                      rest);
  }
  const auto usual = [&](double LossSample::*value) {
    double sum = 0;
    for (const auto& each : samples_) sum += each.*value / kWindow;
    return sum;
  };
  text += changed("gradient norm of the update before", sample.grad_norm,
                  usual(&LossSample::grad_norm));
  text += changed("loss scale", sample.loss_scale, usual(&LossSample::loss_scale));
  text += changed("learning rate", sample.lr, usual(&LossSample::lr));
  return text;
}

}  // namespace zero::train
