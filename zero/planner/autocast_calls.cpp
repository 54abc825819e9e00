#include "zero/planner/autocast_calls.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <utility>

#include "zero/planner/value_tensors.h"

namespace zero::plan {
namespace {

// Ends autocast's kernel where it calls the operator.
struct Reached {};

thread_local AutocastCall* asked = nullptr;

c10::DispatchKey key_of(c10::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

}  // namespace

bool autocast_casts(const c10::OperatorHandle& op, c10::DeviceType device) {
  return at::autocast::is_autocast_enabled(device) && op.hasKernelForDispatchKey(key_of(device));
}

bool AutocastCall::asks() { return asked != nullptr; }

void AutocastCall::answer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  asked->called(op, stack);
}

AutocastCall::AutocastCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> inputs,
                           c10::DeviceType device)
    : op_(op), device_(device) {
  for (const auto& input : inputs) {
    inputs_.push_back(with_tensors(input, [&](const at::Tensor& tensor) {
      return tensor.is_meta() ? stand_in(tensor, tensor.scalar_type()) : tensor;
    }));
  }
  struct Scope {
    explicit Scope(AutocastCall* call) { asked = call; }
    ~Scope() { asked = nullptr; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };
  auto stack = inputs_;
  try {
    const Scope scope(this);
    op.redispatchBoxed(c10::DispatchKeySet(key_of(device)), &stack);
  } catch (const Reached&) {
    return;  // op_ and inputs_ are those of the call
  }
}

// Returns a tensor of the device that has no memory.
at::Tensor AutocastCall::stand_in(const at::Tensor& original, at::ScalarType dtype) {
  const bool cpu = device_ == at::kCPU;
  const c10::Device device(device_, static_cast<c10::DeviceIndex>(cpu ? -1 : 0));
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(original.sizes());
  stand_ins_.push_back({.tensor = tensor, .original = original});
  return tensor;
}

const at::Tensor* AutocastCall::original(const at::Tensor& tensor) const {
  const auto found = std::ranges::find_if(
      stand_ins_, [&](const StandIn& each) { return each.tensor.is_same(tensor); });
  return found == stand_ins_.end() ? nullptr : &found->original;
}

void AutocastCall::called(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto inputs = torch::jit::last(*stack, arguments.size());
  if (op.schema().name() == "aten::to") {
    const auto dtype = std::ranges::find(arguments, "dtype", &c10::Argument::name);
    const auto* of = original(inputs[0].toTensor());
    if (dtype == arguments.end() || of == nullptr) throw Reached();  // another conversion
    const auto wanted = inputs[static_cast<size_t>(dtype - arguments.begin())].toScalarType();
    auto cast = stand_in(at::Tensor(*of), wanted);
    torch::jit::drop(*stack, arguments.size());
    torch::jit::push(*stack, std::move(cast));
    return;
  }
  if (op.schema().name() == op_.schema().name()) {
    op_ = op;
    inputs_ = inputs.vec();
  }
  throw Reached();
}

}  // namespace zero::plan
