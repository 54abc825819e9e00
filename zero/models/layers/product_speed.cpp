#include "zero/models/layers/product_speed.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>

#include "zero/models/layers/matmul.h"

namespace zero {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

ProductSpeed::ProductSpeed(at::ScalarType dtype, int64_t size)
    : a_(at::full({size, size}, 0.5, dtype)), b_(at::full({size, size}, 0.25, dtype)) {}

void ProductSpeed::measure() {
  const c10::NoGradGuard no_grad;
  const auto size = static_cast<double>(a_.size(0));
  const auto begin = Clock::now();
  (void)product(a_, b_);
  best_ = std::max(best_, 2 * size * size * size / seconds_since(begin));
}

double best_product_speed(at::ScalarType dtype) {
  constexpr double kSecondsEach = 0.1;
  constexpr int kLeastRounds = 2;  // the first makes what the library keeps
  double best = 0;
  for (const int64_t size : {512, 1024, 1536}) {
    ProductSpeed speed(dtype, size);
    const auto begin = Clock::now();
    for (int round = 0; round < kLeastRounds || seconds_since(begin) < kSecondsEach; ++round)
      speed.measure();
    best = std::max(best, speed.best());
  }
  return best;
}

}  // namespace zero
