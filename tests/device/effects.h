// Finds the effect of an operator on the geometry of tensors, without the data.
//
// Note [Shadow runs]
// To enqueue an operator its results must be allocated, so their sizes and strides must be known
// before it has run. Meta kernels are not enough: many operators have none in C++. So the CPU's
// kernel is run once on zeros of the same geometry, and the answer is kept by the operator's
// signature (geometries, and values of its other arguments). A training step costs it once.
// Operators for whom zeros are no input, or whose results depend on data, wait for their result
// instead.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace zero::simulated {

struct Geometry {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type = at::kFloat;
  static Geometry of(const at::Tensor& tensor);
  bool operator==(const Geometry&) const = default;
};

struct Effect {
  std::vector<Geometry> written;   ///< of the arguments that it writes, afterwards
  std::vector<Geometry> returned;  ///< of its fresh results
};

bool on_device(const at::Tensor& tensor);

/// Replaces each tensor among the arguments by what `f(tensor, written, indexes)` returns;
/// `written` is the schema's word, `indexes` says that it stands in a list of indices. Devices
/// become the CPU.
template <class F>
void map_tensors(const c10::FunctionSchema& schema, torch::jit::Stack& arguments, F f) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    c10::IValue& value = arguments[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = f(value.toTensor(), written, false);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) {
        list.push_back(t.defined() ? f(t, written, false) : t);
      }
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        list.push_back(t && t->defined() ? std::optional(f(*t, written, true)) : t);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }
}

/// Runs the CPU's kernel of the operator on arguments of the CPU and leaves its results there.
void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& arguments);

/// The numbers of the arguments that it writes though its schema does not say so.
std::vector<size_t> written_unsaid(const c10::OperatorHandle& op,
                                   const torch::jit::Stack& arguments);

/// Its results' geometry or values depend on the data of its arguments.
bool depends_on_data(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

/// The effect of the operator, by a shadow run if it is not known. Nothing where zeros are no input
/// for it. `cacheable` is false for an operator that draws random numbers: its shadow run draws
/// them from the generator among the arguments, as the operator would.
std::optional<Effect> effect_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                bool cacheable);

}  // namespace zero::simulated
