#include "tests/device/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace zero::simulated {

RandomArgument::RandomArgument(const c10::OperatorHandle& op, torch::jit::Stack& arguments)
    : random_(op.hasTag(at::Tag::nondeterministic_seeded)) {
  const auto& formal = op.schema().arguments();
  for (size_t i = 0; i < formal.size(); ++i) {
    if (formal[i].name() == "generator") index_ = i;
    // Attention draws only for its dropout.
    const auto& value = arguments[i];
    if (formal[i].name() == "dropout_p" && value.isDouble() && value.toDouble() == 0) {
      random_ = false;
    }
  }
  if (!random_ || !index_) return;
  auto& value = arguments[*index_];
  live_ = value.isNone() ? at::detail::getDefaultCPUGenerator() : value.toGenerator();
  {
    const std::lock_guard lock(live_.mutex());
    before_ = live_.clone();
  }
  value = live_;
}

void RandomArgument::use_copy(torch::jit::Stack& arguments) const {
  if (random_ && index_) arguments[*index_] = before_;
}

void RandomArgument::restore() {
  if (random_ && index_) {
    const std::lock_guard lock(live_.mutex());
    live_.unsafeGetGeneratorImpl()->set_state(*before_.unsafeGetGeneratorImpl()->get_state());
  }
}

}  // namespace zero::simulated
