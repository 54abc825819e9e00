// Finds the casts that autocast makes for an operator whose tensors have shapes alone.
//
// Note [Casts in a trace]
// Autocast has kernels for the operators that it casts for, by device, and none for meta. So the
// traced device's own kernel is asked, which knows its lists. It is called with tensors of that
// device that have no memory: it asks for casts of them and calls the operator, which both come to
// the trace's fallback and end there. That says which tensors had been cast, and to what. The trace
// then casts its own ones.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

namespace zero::plan {

/// Returns whether autocast of `device` is on and has a kernel of its own for the operator.
bool autocast_casts(const c10::OperatorHandle& op, c10::DeviceType device);

/// The call that autocast of `device`, which is kCPU or kCUDA, makes of another one.
class AutocastCall {
 public:
  /// Asks for `op` with `inputs`. Throws what autocast's kernel throws, as for an operator that is
  /// unsafe in 16 bits. Needs a fallback that sees every operator and calls answer() for those that
  /// come while asks() is true.
  AutocastCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> inputs,
               c10::DeviceType device);
  AutocastCall(const AutocastCall&) = delete;
  AutocastCall& operator=(const AutocastCall&) = delete;
  ~AutocastCall() = default;

  /// Another overload of the operator than was asked for, where autocast sets a result's dtype.
  const c10::OperatorHandle& op() const { return op_; }
  /// The tensors of the call that were on meta are others of the dtypes that they are to have.
  const std::vector<c10::IValue>& inputs() const { return inputs_; }
  /// Returns the tensor on meta that one of `inputs` stands for; null for another tensor.
  const at::Tensor* original(const at::Tensor& tensor) const;

  static bool asks();
  static void answer(const c10::OperatorHandle& op, torch::jit::Stack* stack);

 private:
  struct StandIn {
    at::Tensor tensor, original;
  };
  at::Tensor stand_in(const at::Tensor& original, at::ScalarType dtype);
  void called(const c10::OperatorHandle& op, torch::jit::Stack* stack);

  c10::OperatorHandle op_;
  c10::DeviceType device_;
  std::vector<c10::IValue> inputs_;
  std::vector<StandIn> stand_ins_;
};

}  // namespace zero::plan
