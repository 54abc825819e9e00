#include "zero/optim/loss_scaler.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"

namespace zero {

at::Tensor LossScaler::scale(const at::Tensor& loss) const {
  return loss.to(at::kFloat) * scale_.value();
}

void LossScaler::divide(const std::vector<at::Tensor>& parameters, Seen& seen) {
  const c10::NoGradGuard no_grad;
  looked_ = true;
  const double inverse = 1 / scale_.value();
  for (const auto& parameter : parameters) {
    auto gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.scalar_type() == at::kHalf) {
      throw ConfigError(
          "LossScaler was given a gradient in fp16, in which small gradients without the scale are "
          "zero. Keep the parameters in fp32 and compute in fp16 under autocast, or train with "
          "zero::Engine and Config::fp16, which keeps fp32 master weights.");
    }
    if (gradient.is_sparse()) gradient = gradient._values();
    seen.overflow = seen.overflow || !at::isfinite(gradient).all().item<bool>();
    gradient.mul_(inverse);
  }
}

bool LossScaler::begun(const void* optimizer) const {
  return std::any_of(seen_.begin(), seen_.end(),
                     [&](const Seen& seen) { return seen.optimizer == optimizer; });
}

LossScaler::Seen& LossScaler::begin(const void* optimizer) {
  if (begun(optimizer)) {
    throw Error(
        "LossScaler::unscale was called twice for one optimizer since the last update: its "
        "gradients are unscaled already.");
  }
  return seen_.emplace_back(Seen{optimizer});
}

bool LossScaler::may_step(const void* optimizer) {
  const auto seen = std::find_if(seen_.begin(), seen_.end(),
                                 [&](const Seen& each) { return each.optimizer == optimizer; });
  if (std::exchange(seen->stepped, true)) {
    throw Error(
        "LossScaler::step was called twice for one optimizer since the last update: call "
        "LossScaler::update after the steps of each iteration.");
  }
  return !seen->overflow && !elsewhere_;
}

bool LossScaler::overflow() const {
  return elsewhere_ ||
         std::any_of(seen_.begin(), seen_.end(), [](const Seen& seen) { return seen.overflow; });
}

void LossScaler::update() {
  if (!looked_) {
    throw Error(
        "LossScaler::update before LossScaler::step or unscale: no gradient was looked at since "
        "the last update.");
  }
  const bool lowered = scale_.update(overflow());
  seen_.clear();
  looked_ = elsewhere_ = false;
  if (!lowered) {
    throw Error(fmt::format(
        "A gradient is infinite or NaN, and the loss scale is at its minimum already, {}: it "
        "cannot be lowered any more. Lower the learning rate, look at the loss, or lower the "
        "minimum.",
        scale_.value()));
  }
}

}  // namespace zero
