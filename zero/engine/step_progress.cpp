#include "zero/engine/step_progress.h"

#include <fmt/format.h>

#include "zero/base/error.h"

namespace zero {

// The loss is divided by the micro-batches before backward, as DeepSpeed does in fp16, where
// micro-batches may add up.
double StepProgress::loss_factor() const {
  return loss_scale_ ? loss_scale_->value() / static_cast<double>(of_step()) : 1;
}

double StepProgress::mean_scale() const {
  const auto& placement = plan_.placement();
  const double divided =
      plan_.config().gradient_predivisor(placement.ranks(), placement.sharded.gradients);
  return divided / (static_cast<double>(placement.ranks() * of_step()) * loss_factor());
}

namespace {

// Clips as torch::nn::utils::clip_grad_norm_: the small constant keeps the quotient below one.
double factor_of(double norm, double largest) {
  return largest > 0 && norm > largest ? std::min(1.0, largest / (norm + 1e-6)) : 1;
}

}  // namespace

double StepProgress::clipping_factor(double norm) const {
  const auto& config = plan_.config();
  if (!config.clip_by_previous_norm) return factor_of(norm, config.gradient_clipping);
  if (in_backward_) return *in_backward_;
  return last_norm_ ? factor_of(*last_norm_, config.gradient_clipping) : 1;
}

void StepProgress::begin_updates() {
  in_backward_.reset();
  if (plan_.config().clip_by_previous_norm) in_backward_ = clipping_factor(0);
}

void StepProgress::check_gradients_kept() const {
  if (!plan_.timing().in_backward) return;
  throw ConfigError(
      "With update_in_backward gradients are used as they come and are not kept. Switch it off to "
      "read or write them.");
}

void StepProgress::check_at_boundary(std::string_view what) const {
  if (micro_batches_ == 0) return;
  throw Error(
      fmt::format("{} in the middle of an accumulation ({} of {} micro-batches): gradients are not "
                  "saved. Call it after the step.",
                  what, micro_batches_, of_step()));
}

void StepProgress::check_whole_step() const {
  if (passed_ && micro_batches_left() <= 1) return;
  throw Error(fmt::format(
      "Engine::group_norms is of a whole step, between its last backward and Engine::step; {} of "
      "its {} micro-batches have been passed.",
      micro_batches_ + (passed_ ? 1 : 0), of_step()));
}

}  // namespace zero
