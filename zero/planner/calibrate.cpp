#include "zero/planner/calibrate.h"

#include <algorithm>

namespace zero::plan {
namespace {

// Multiplies a part of a speed, which is at most 1: beyond that the speed itself grows.
void scale(double& part, double& speed, double factor) {
  const double scaled = part * factor;
  part = std::min(1.0, scaled);
  speed *= scaled / part;
}

}  // namespace

Cluster calibrated(const Question& question, const std::vector<MeasuredStep>& steps) {
  auto asked = question;
  asked.cluster.measured = false;
  std::vector<double> factors;
  for (const auto& step : steps) {
    const auto predicted = evaluate(asked, step.config, step.micro_batch, step.recompute);
    if (!predicted.fits()) continue;
    const auto& time = predicted.time;
    const double scales = time.compute + (asked.cluster.device.cpu ? time.update : 0);
    const double took = step.seconds - (time.seconds - scales);
    if (took > 0) factors.push_back(scales / took);
  }
  if (factors.empty()) return asked.cluster;
  const auto middle = factors.begin() + static_cast<std::ptrdiff_t>(factors.size() / 2);
  std::ranges::nth_element(factors, middle);
  auto& device = asked.cluster.device;
  double both = 1;
  scale(device.products, both, *middle);
  device.flops *= both;
  device.flops_fp32 *= both;
  device.attention = std::min(1.0, device.attention * *middle / both);
  scale(device.streams, device.bandwidth, *middle);
  return asked.cluster;
}

}  // namespace zero::plan
