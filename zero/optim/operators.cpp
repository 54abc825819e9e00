#include "zero/optim/operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "zero/base/error.h"
#include "zero/device/memory.h"
#include "zero/optim/algorithm.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {

namespace {

void update_on_cpu(const c10::intrusive_ptr<UpdateCall>& call, const at::Tensor& gradient,
                   const at::Tensor& master, const std::optional<at::Tensor>& parameter,
                   at::TensorList states) {
  const auto operands = operands_of(*call, gradient, master, parameter, states);
  update(call->optimizer, call->step, call->lr, call->gradient_scale, operands);
}

void squared_norm_on_cpu(const at::Tensor& values, const at::Tensor& sums) {
  const auto norm = squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
  auto* const into = sums.mutable_data_ptr<double>();
  into[0] = norm.sum;
  into[1] = norm.finite ? 0 : 1;
}

template <class Kernel>
c10::TypedOperatorHandle<Kernel> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Kernel>();
}

}  // namespace

TORCH_LIBRARY(zero, library) {
  library.class_<UpdateCall>("UpdateCall");
  library.def(
      "update_(__torch__.torch.classes.zero.UpdateCall call, Tensor gradient, Tensor(a!) master, "
      "Tensor(b!)? parameter, Tensor(c!)[] states) -> ()");
  library.def("squared_norm_(Tensor values, Tensor(a!) sums) -> ()");
}

TORCH_LIBRARY_IMPL(zero, CPU, library) {
  library.impl("update_", &update_on_cpu);
  library.impl("squared_norm_", &squared_norm_on_cpu);
}

Operands operands_of(const UpdateCall& call, const at::Tensor& gradient, const at::Tensor& master,
                     const std::optional<at::Tensor>& parameter, at::TensorList states) {
  const auto check = [&](const at::Tensor& array, const char* what) {
    TORCH_CHECK(array.numel() == gradient.numel() && array.device() == gradient.device() &&
                    array.is_contiguous(),
                "zero::update_: ", what, " is no contiguous array of ", gradient.numel(),
                " elements on ", gradient.device(), " as the gradient is");
  };
  const auto count = state_names(call.optimizer).size();
  TORCH_CHECK(states.size() == count, "zero::update_: ", name(call.optimizer), " has ", count,
              " states, and ", states.size(), " are given");
  check(gradient, "the gradient");
  check_dtype(gradient.scalar_type(), "gradient");
  check(master, "the master weights' array");
  Operands operands{.numel = gradient.numel(),
                    .device = gradient.device(),
                    .master = master.mutable_data_ptr<float>(),
                    .gradient = gradient.const_data_ptr(),
                    .gradient_dtype = gradient.scalar_type(),
                    .gradient_limit = call.gradient_limit};
  for (size_t i = 0; i < states.size(); ++i) {
    check(states[i], "a state");
    operands.state[i] = states[i].mutable_data_ptr<float>();
  }
  if (parameter) {
    check(*parameter, "the parameter");
    TORCH_CHECK(parameter->scalar_type() == at::kBFloat16 || parameter->scalar_type() == at::kHalf,
                "zero::update_: the parameter is the low-precision copy, in bf16 or fp16, and not ",
                parameter->scalar_type());
    operands.parameter = parameter->mutable_data_ptr();
    operands.parameter_dtype = parameter->scalar_type();
  }
  return operands;
}

bool has_kernels(c10::DeviceType type) {
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(type));
  auto& dispatcher = c10::Dispatcher::singleton();
  return dispatcher.findSchemaOrThrow("zero::update_", "").hasComputedKernelForDispatchKey(key);
}

void enqueue_update(const Optimizer& optimizer, int64_t step, double lr, double gradient_scale,
                    const Operands& operands) {
  if (operands.master == nullptr || reach(optimizer) != Reach::element) {
    throw ConfigError(
        fmt::format("{} cannot be updated on {}: only element-wise optimizers of fp32 "
                    "master weights can.",
                    name(optimizer), operands.device.str()));
  }
  if (operands.numel == 0) return;
  static const auto op =
      operator_of<void(const c10::intrusive_ptr<UpdateCall>&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, at::TensorList)>("zero::update_");
  const auto tensor = [&](const void* data, at::ScalarType dtype) {
    return tensor_at(const_cast<void*>(data), operands.numel, dtype, operands.device);
  };
  auto call = c10::make_intrusive<UpdateCall>();
  call->optimizer = optimizer;
  call->step = step;
  call->lr = lr;
  call->gradient_scale = gradient_scale;
  call->gradient_limit = operands.gradient_limit;
  std::optional<at::Tensor> parameter;
  if (operands.parameter != nullptr)
    parameter = tensor(operands.parameter, operands.parameter_dtype);
  std::vector<at::Tensor> states;
  for (auto* state : operands.state) {
    if (state != nullptr) states.push_back(tensor(state, at::kFloat));
  }
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  op.call(call, tensor(operands.gradient, operands.gradient_dtype),
          tensor(operands.master, at::kFloat), parameter, states);
}

void squared_norm(const at::Tensor& values, const at::Tensor& sums) {
  static const auto op =
      operator_of<void(const at::Tensor&, const at::Tensor&)>("zero::squared_norm_");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  op.call(values, sums);
}

}  // namespace zero::optim
