#include "zero/optim/operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <optional>
#include <variant>
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
  const auto& moment = call->moment;
  switch (moment.sweep) {
    case Sweep::whole:
      update(call->optimizer, moment.step, moment.lr, call->gradient_scale, operands);
      break;
    case Sweep::first: {
      Findings findings{.direction = operands.master};
      first_sweep(call->optimizer, moment.step, call->gradient_scale, operands, findings);
      break;
    }
    case Sweep::second:
      second_sweep(call->optimizer, moment.step, moment.lr, moment.ratio, operands);
  }
}

void squared_norm_on_cpu(const at::Tensor& values, const at::Tensor& sums) {
  const auto norm = squared_norm(values.const_data_ptr(), values.scalar_type(), values.numel());
  auto* const into = sums.mutable_data_ptr<double>();
  into[0] = norm.sum;
  into[1] = norm.finite ? 0 : 1;
}

void one_by_one(at::TensorList values, const at::Tensor& sums) {
  for (size_t i = 0; i < values.size(); ++i)
    squared_norm(values[i], sums.select(0, static_cast<int64_t>(i)));
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
  library.def("squared_norms_(Tensor[] values, Tensor(a!) sums) -> ()");
}

TORCH_LIBRARY_IMPL(zero, CompositeExplicitAutograd, library) {
  library.impl("squared_norms_", &one_by_one);
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
  const bool split = master.scalar_type() == at::kShort;
  Operands operands{.numel = gradient.numel(),
                    .device = gradient.device(),
                    .master = split ? nullptr : master.mutable_data_ptr<float>(),
                    .lower = split ? static_cast<uint16_t*>(master.mutable_data_ptr()) : nullptr,
                    .gradient = gradient.const_data_ptr(),
                    .gradient_dtype = gradient.scalar_type(),
                    .gradient_limit = call.gradient_limit};
  for (size_t i = 0; i < states.size(); ++i) {
    check(states[i], "a state");
    operands.state[i] = states[i].mutable_data_ptr<float>();
  }
  TORCH_CHECK(!split || (parameter && parameter->scalar_type() == at::kBFloat16),
              "zero::update_: the master weights are lower halves (int16), and the upper ones are "
              "no parameter in bf16");
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

bool updates_on_devices(const Optimizer& optimizer) {
  return reach(optimizer) == Reach::element || std::holds_alternative<Muon>(optimizer);
}

void enqueue_update(const Optimizer& optimizer, const Moment& moment, double gradient_scale,
                    const Operands& operands) {
  if (operands.numel == 0) return;
  const bool has_weights = operands.master != nullptr || operands.lower != nullptr;
  if (!has_weights || !updates_on_devices(optimizer) ||
      (moment.sweep == Sweep::whole) != (reach(optimizer) == Reach::element)) {
    throw ConfigError(
        fmt::format("{} cannot be updated on {}: only element-wise optimizers of fp32 "
                    "master weights can, and Muon in two sweeps.",
                    name(optimizer), operands.device.str()));
  }
  static const auto op =
      operator_of<void(const c10::intrusive_ptr<UpdateCall>&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, at::TensorList)>("zero::update_");
  const auto tensor = [&](const void* data, at::ScalarType dtype) {
    return tensor_at(const_cast<void*>(data), operands.numel, dtype, operands.device);
  };
  auto call = c10::make_intrusive<UpdateCall>();
  call->optimizer = optimizer;
  call->moment = moment;
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
          operands.lower != nullptr ? tensor(operands.lower, at::kShort)
                                    : tensor(operands.master, at::kFloat),
          parameter, states);
}

void squared_norm(const at::Tensor& values, const at::Tensor& sums) {
  static const auto op =
      operator_of<void(const at::Tensor&, const at::Tensor&)>("zero::squared_norm_");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  op.call(values, sums);
}

void squared_norms(at::TensorList values, const at::Tensor& sums) {
  static const auto op =
      operator_of<void(at::TensorList, const at::Tensor&)>("zero::squared_norms_");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  op.call(values, sums);
}

}  // namespace zero::optim
