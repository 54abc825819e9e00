#include "zero/planner/goodput.h"

#include <cmath>

namespace zero::plan {

double youngs_interval(const Failures& f) { return std::sqrt(2 * f.checkpoint * f.of_job()); }

double best_interval(const Failures& f) {
  const double between = f.of_job();
  if (f.checkpoint >= 2 * between) return between;
  const double ratio = f.checkpoint / (2 * between);
  return youngs_interval(f) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - f.checkpoint;
}

double goodput(const Failures& f, double interval) {
  const double between = f.of_job();
  // The expected time until `interval` seconds and their checkpoint have passed without a failure.
  const double expected =
      between * std::exp(f.restart / between) * std::expm1((interval + f.checkpoint) / between);
  return interval / expected;
}

}  // namespace zero::plan
