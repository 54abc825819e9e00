#include "zero/optim/operators.h"

#include <ATen/ceil_div.h>
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
  const auto all = operands_of(*call, gradient, master, parameter, states);
  const auto& moment = call->moment;
  if (const auto* narrow = std::get_if<NarrowOperands>(&all)) {
    update(call->optimizer, moment.step, moment.lr, call->gradient_scale, *narrow);
    return;
  }
  const auto& operands = std::get<Operands>(all);
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

namespace {

// Returns the format of a state's array, which must be one of `numel` elements.
StateFormat format_of(const at::Tensor& state, const at::Tensor& gradient) {
  const auto dtype = state.scalar_type();
  const auto format = dtype == at::kByte       ? StateFormat::eight_bit
                      : dtype == at::kBFloat16 ? StateFormat::bf16
                                               : StateFormat::fp32;
  TORCH_CHECK(format != StateFormat::fp32 || dtype == at::kFloat,
              "zero::update_: a state has numbers in fp32 or bf16, or 8-bit blocks, and not ",
              dtype);
  const auto numel = format == StateFormat::eight_bit
                         ? state_bytes(format, at::round_up(gradient.numel(), kCodedBlock))
                         : gradient.numel();
  TORCH_CHECK(
      state.numel() == numel && state.device() == gradient.device() && state.is_contiguous(),
      "zero::update_: a state is no contiguous array of ", numel, " elements on ",
      gradient.device(), " beside the gradient of ", gradient.numel(), " elements");
  return format;
}

}  // namespace

std::variant<Operands, NarrowOperands> operands_of(const UpdateCall& call,
                                                   const at::Tensor& gradient,
                                                   const at::Tensor& master,
                                                   const std::optional<at::Tensor>& parameter,
                                                   at::TensorList states) {
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
  const bool own = master.scalar_type() == at::kBFloat16;
  Operands operands{.numel = gradient.numel(),
                    .device = gradient.device(),
                    .master = split || own ? nullptr : master.mutable_data_ptr<float>(),
                    .lower = split ? static_cast<uint16_t*>(master.mutable_data_ptr()) : nullptr,
                    .gradient = gradient.const_data_ptr(),
                    .gradient_dtype = gradient.scalar_type(),
                    .gradient_limit = call.gradient_limit};
  TORCH_CHECK(!split || (parameter && parameter->scalar_type() == at::kBFloat16),
              "zero::update_: the master weights are lower halves (int16), and the upper ones are "
              "no parameter in bf16");
  TORCH_CHECK(!own || !parameter,
              "zero::update_: bf16 weights that are their own master weights have no parameter "
              "beside them");
  if (parameter) {
    check(*parameter, "the parameter");
    TORCH_CHECK(parameter->scalar_type() == at::kBFloat16 || parameter->scalar_type() == at::kHalf,
                "zero::update_: the parameter is the low-precision copy, in bf16 or fp16, and not ",
                parameter->scalar_type());
    operands.parameter = parameter->mutable_data_ptr();
    operands.parameter_dtype = parameter->scalar_type();
  }
  auto format = StateFormat::fp32;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto its = format_of(states[i], gradient);
    TORCH_CHECK(i == 0 || its == format, "zero::update_: the states have different formats");
    format = its;
  }
  if (format == StateFormat::fp32 && !own) {
    for (size_t i = 0; i < states.size(); ++i)
      operands.state[i] = states[i].mutable_data_ptr<float>();
    return operands;
  }
  NarrowOperands narrow{
      .wide = operands,
      .weights = own ? static_cast<uint16_t*>(master.mutable_data_ptr()) : nullptr,
      .state_format = format,
      .key = call.key,
      .first = call.first};
  for (size_t i = 0; i < states.size(); ++i) narrow.state[i] = states[i].mutable_data_ptr();
  return narrow;
}

bool has_kernels(c10::DeviceType type) {
  const auto key = c10::computeDispatchKey(std::nullopt, std::nullopt, c10::Device(type));
  auto& dispatcher = c10::Dispatcher::singleton();
  return dispatcher.findSchemaOrThrow("zero::update_", "").hasComputedKernelForDispatchKey(key);
}

bool updates_on_devices(const Optimizer& optimizer) {
  return reach(optimizer) == Reach::element || std::holds_alternative<Muon>(optimizer);
}

namespace {

// Calls zero::update_ with tensors over the operands' arrays: `master` is of `master_dtype`.
void call_update(const c10::intrusive_ptr<UpdateCall>& call, const Operands& operands,
                 const void* master, at::ScalarType master_dtype,
                 const std::vector<at::Tensor>& states) {
  static const auto op =
      operator_of<void(const c10::intrusive_ptr<UpdateCall>&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, at::TensorList)>("zero::update_");
  const auto tensor = [&](const void* data, at::ScalarType dtype) {
    return tensor_at(const_cast<void*>(data), operands.numel, dtype, operands.device);
  };
  std::optional<at::Tensor> parameter;
  if (operands.parameter != nullptr)
    parameter = tensor(operands.parameter, operands.parameter_dtype);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  op.call(call, tensor(operands.gradient, operands.gradient_dtype), tensor(master, master_dtype),
          parameter, states);
}

c10::intrusive_ptr<UpdateCall> call_of(const Optimizer& optimizer, const Moment& moment,
                                       double gradient_scale, const Operands& operands) {
  auto call = c10::make_intrusive<UpdateCall>();
  call->optimizer = optimizer;
  call->moment = moment;
  call->gradient_scale = gradient_scale;
  call->gradient_limit = operands.gradient_limit;
  return call;
}

[[noreturn]] void refuse_update(const Optimizer& optimizer, const Operands& operands) {
  throw ConfigError(
      fmt::format("{} cannot be updated on {}: only element-wise optimizers can, and Muon in two "
                  "sweeps with states in fp32.",
                  name(optimizer), operands.device.str()));
}

}  // namespace

void enqueue_update(const Optimizer& optimizer, const Moment& moment, double gradient_scale,
                    const Operands& operands) {
  if (operands.numel == 0) return;
  const bool has_weights = operands.master != nullptr || operands.lower != nullptr;
  if (!has_weights || !updates_on_devices(optimizer) ||
      (moment.sweep == Sweep::whole) != (reach(optimizer) == Reach::element)) {
    refuse_update(optimizer, operands);
  }
  std::vector<at::Tensor> states;
  for (auto* state : operands.state) {
    if (state != nullptr)
      states.push_back(tensor_at(state, operands.numel, at::kFloat, operands.device));
  }
  const bool split = operands.lower != nullptr;
  call_update(call_of(optimizer, moment, gradient_scale, operands), operands,
              split ? static_cast<void*>(operands.lower) : operands.master,
              split ? at::kShort : at::kFloat, states);
}

void enqueue_update(const Optimizer& optimizer, const Moment& moment, double gradient_scale,
                    const NarrowOperands& operands) {
  const auto& wide = operands.wide;
  if (wide.numel == 0) return;
  if (!updates_on_devices(optimizer) || reach(optimizer) != Reach::element)
    refuse_update(optimizer, wide);
  const bool coded = operands.state_format == StateFormat::eight_bit;
  const auto dtype = coded                                        ? at::kByte
                     : operands.state_format == StateFormat::bf16 ? at::kBFloat16
                                                                  : at::kFloat;
  const int64_t places =
      coded ? state_bytes(operands.state_format, at::round_up(wide.numel, kCodedBlock))
            : wide.numel;
  std::vector<at::Tensor> states;
  for (auto* state : operands.state) {
    if (state != nullptr) states.push_back(tensor_at(state, places, dtype, wide.device));
  }
  auto call = call_of(optimizer, moment, gradient_scale, wide);
  call->key = operands.key;
  call->first = operands.first;
  if (operands.weights != nullptr) {
    call_update(call, wide, operands.weights, at::kBFloat16, states);
  } else if (wide.lower != nullptr) {
    call_update(call, wide, wide.lower, at::kShort, states);
  } else {
    call_update(call, wide, wide.master, at::kFloat, states);
  }
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
