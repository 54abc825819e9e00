#include "zero/engine/model_shape.h"

#include "zero/optim/sweeps.h"

namespace zero {

int64_t ParameterShape::numel() const {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return numel;
}

bool ParameterShape::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

std::optional<optim::Factors> factors_of(const ParameterShape& parameter) {
  if (!parameter.trainable || optim::reach(parameter.optimizer) != optim::Reach::factors) return {};
  return optim::Factors(parameter.sizes, parameter.strides);
}

}  // namespace zero
