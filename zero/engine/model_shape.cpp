#include "zero/engine/model_shape.h"

#include <c10/util/accumulate.h>

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

std::optional<optim::Projection> projection_of(const ParameterShape& parameter) {
  if (!parameter.trainable) return {};
  return optim::projection_of(parameter.optimizer, parameter.sizes, parameter.strides);
}

std::vector<optim::FactoredState> factored_states_of(const ParameterShape& parameter) {
  if (!parameter.trainable) return {};
  return optim::factored_states(parameter.optimizer, parameter.sizes, parameter.strides);
}

int64_t factored_numel(const ParameterShape& parameter) {
  int64_t numel = 0;
  for (const auto& state : factored_states_of(parameter))
    numel += c10::multiply_integers(state.sizes);
  return numel;
}

}  // namespace zero
