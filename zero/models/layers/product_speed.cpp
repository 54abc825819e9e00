#include "zero/models/layers/product_speed.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "zero/device/stream.h"
#include "zero/models/layers/matmul.h"

namespace zero {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A device draws less power for numbers that are all the same, and is faster than a model finds it.
at::Tensor matrix(int64_t size, double value, at::ScalarType dtype, c10::Device device) {
  if (!is_asynchronous(device)) return at::full({size, size}, value, dtype);
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(size));
  const auto row = at::randn({size}, generator, at::TensorOptions(at::kFloat)).to(device);
  return row.unsqueeze(0).mul(row.unsqueeze(1)).mul_(value).to(dtype);
}

// So many are enqueued at once that the host's part does not show.
int products_at_once(c10::Device device) { return is_asynchronous(device) ? 8 : 1; }

}  // namespace

ProductSpeed::ProductSpeed(at::ScalarType dtype, int64_t size, c10::Device device)
    : a_(matrix(size, 0.5, dtype, device)), b_(matrix(size, 0.25, dtype, device)) {}

void ProductSpeed::measure() {
  const c10::NoGradGuard no_grad;
  const auto size = static_cast<double>(a_.size(0));
  const int count = products_at_once(a_.device());
  wait_for_device(a_.device());
  const auto begin = Clock::now();
  for (int i = 0; i < count; ++i) (void)product(a_, b_);
  wait_for_device(a_.device());
  best_ = std::max(best_, count * 2 * size * size * size / seconds_since(begin));
}

double best_product_speed(at::ScalarType dtype, c10::Device device) {
  constexpr double kSecondsEach = 0.1;
  constexpr int kLeastRounds = 2;  // the first makes what the library keeps
  const std::vector<int64_t> sizes = is_asynchronous(device)
                                         ? std::vector<int64_t>{2048, 4096, 8192}
                                         : std::vector<int64_t>{512, 1024, 1536};
  double best = 0;
  for (const int64_t size : sizes) {
    ProductSpeed speed(dtype, size, device);
    const auto begin = Clock::now();
    for (int round = 0; round < kLeastRounds || seconds_since(begin) < kSecondsEach; ++round)
      speed.measure();
    best = std::max(best, speed.best());
  }
  return best;
}

}  // namespace zero
