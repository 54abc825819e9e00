// Tensors among the arguments and results of an operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace zero::plan {

/// Calls visit(tensor) for each tensor of a value that is defined.
template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorList()) {
      if (each.defined()) visit(each);
    }
  } else if (value.isOptionalTensorList()) {
    const auto list = value.toOptionalTensorVector();
    for (const auto& each : list) {
      if (each && each->defined()) visit(*each);
    }
  }
}

/// Returns a value with what make(tensor) returns in the place of its tensors that are defined.
template <class Make>
c10::IValue with_tensors(const c10::IValue& value, const Make& make) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(make(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& each : value.toTensorList())
      all.push_back(each.defined() ? make(each) : each);
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& each : value.toOptionalTensorVector())
      all.push_back(each && each->defined() ? std::optional(make(*each)) : std::nullopt);
    return all;
  }
  return value;
}

}  // namespace zero::plan
