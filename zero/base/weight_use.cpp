#include "zero/base/weight_use.h"

#include <atomic>

namespace zero {

namespace {

constinit std::atomic<UseWeight> served{nullptr};

}  // namespace

void use_weight(const at::Tensor& weight, const UseRows& early, const std::function<void()>& rest) {
  if (const auto use = served.load(std::memory_order_relaxed)) return use(weight, early, rest);
  rest();
}

void serve_weight_uses(UseWeight use) { served.store(use, std::memory_order_relaxed); }

}  // namespace zero
