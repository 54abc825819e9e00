#include "zero/base/weight_use.h"

#include <atomic>

namespace zero {

namespace {

constinit std::atomic<UseWeight> served{nullptr};
constinit std::atomic<LookUpRows> looks_up{nullptr};

}  // namespace

void use_weight(const at::Tensor& weight, const UseRows& early, const std::function<void()>& rest) {
  if (const auto use = served.load(std::memory_order_relaxed)) return use(weight, early, rest);
  rest();
}

at::Tensor look_up_rows(const at::Tensor& weight, const at::Tensor& indices) {
  const auto look_up = looks_up.load(std::memory_order_relaxed);
  return look_up != nullptr ? look_up(weight, indices) : at::Tensor();
}

void serve_weight_uses(UseWeight use, LookUpRows look_up) {
  served.store(use, std::memory_order_relaxed);
  looks_up.store(look_up, std::memory_order_relaxed);
}

}  // namespace zero
