// Shows kernels that LibTorch's dispatcher does not see to observers of operators (profilers,
// zero::AnomalyWatch).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

namespace zero {

/// Runs `kernel`, which reads the tensors `inputs` and writes `outputs`, as an operator called
/// `name`. If nobody observes, it only calls `kernel`.
template <size_t Inputs, size_t Outputs, class Kernel>
void observed(std::string_view name, const std::array<at::Tensor, Inputs>& inputs,
              const std::array<at::Tensor, Outputs>& outputs, const Kernel& kernel) {
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!observers) return kernel();
  at::RecordFunction range(std::move(*observers));
  const std::array<c10::IValue, Inputs> values = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<c10::IValue, Inputs>{c10::IValue(inputs[I])...};
  }
  (std::make_index_sequence<Inputs>());
  if (range.needsInputs()) {
    range.before(name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  } else {
    range.before(name);
  }
  kernel();
  if (range.needsOutputs())
    range.setOutputs(std::vector<c10::IValue>(outputs.begin(), outputs.end()));
}

}  // namespace zero
