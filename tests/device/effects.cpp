#include "tests/device/effects.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "tests/device/machine.h"

namespace zero::simulated {

namespace {

// An operator and its arguments, but for the tensors' data, as a string.
class Signature {
 public:
  explicit Signature(const c10::OperatorHandle& op) : text_(toString(op.operator_name())) {}
  const std::string& text() const { return text_; }

  /// False for a value that has no signature.
  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isNone()) return add_bytes('N', 0);
    if (value.isInt()) return add_bytes('i', value.toInt());
    if (value.isDouble()) return add_bytes('d', value.toDouble());
    if (value.isBool()) return add_bytes('b', value.toBool());
    if (value.isDevice()) return add_bytes('D', 0);
    if (value.isString()) {
      add_bytes('s', value.toStringRef().size());
      text_ += value.toStringRef();
      return true;
    }
    if (value.isList()) {
      add_bytes('L', value.toListRef().size());
      for (const auto& element : value.toListRef()) {
        if (!add(element)) return false;
      }
      return true;
    }
    return false;
  }

 private:
  template <class T>
  bool add_bytes(char kind, T value) {
    text_ += kind;
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return true;
  }
  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return add_bytes('U', 0);
    add_bytes('T', tensor.scalar_type());
    add_bytes('w', tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add_bytes('n', tensor.dim());
    for (const int64_t size : tensor.sizes()) add_bytes(',', size);
    for (const int64_t stride : tensor.strides()) add_bytes(';', stride);
    return true;
  }
  std::string text_;
};

at::Tensor zeros_of(const at::Tensor& tensor) {
  const auto bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  const auto memory = at::zeros({static_cast<int64_t>(bytes)}, at::kByte);
  auto zeros = at::empty({0}, at::TensorOptions(tensor.scalar_type()));
  zeros.set_(memory.storage(), 0, tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    zeros.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return zeros;
}

Effect shadow_run(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
  const auto& schema = op.schema();
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::DisableRecordFunctionGuard unseen;
  std::vector<at::Tensor> written;
  map_tensors(schema, arguments, [&](const at::Tensor& tensor, bool write, bool /*indexes*/) {
    auto zeros = zeros_of(tensor);
    if (write) written.push_back(zeros);
    return zeros;
  });
  call_on_cpu(op, arguments);
  Effect effect;
  for (const auto& tensor : written) effect.written.push_back(Geometry::of(tensor));
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info() != nullptr) continue;
    if (arguments[i].isTensor()) {
      effect.returned.push_back(Geometry::of(arguments[i].toTensor()));
    } else {
      for (const at::Tensor& tensor : arguments[i].toTensorVector()) {
        effect.returned.push_back(Geometry::of(tensor));
      }
    }
  }
  return effect;
}

// The effects by signature, of all threads.
struct KnownEffects {
  std::mutex mutex;
  std::unordered_map<std::string, Effect> effects;
};
KnownEffects& known_effects() {
  static auto* known = new KnownEffects;
  return *known;
}

}  // namespace

Geometry Geometry::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

// LibTorch drops the arguments from the stack before it pushes references to them as results, where
// an operator has several `out` arguments: whoever calls it boxed must own them meanwhile.
// It asks this kind of device for convolutions under names of their own.
void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& arguments) {
  auto kernel = op;
  const auto& name = op.operator_name().name;
  if (name == "aten::convolution_overrideable") {
    kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  } else if (name == "aten::convolution_backward_overrideable") {
    kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    const int64_t channels = arguments[0].toTensor().size(1);
    arguments.insert(arguments.begin() + 3, c10::List<int64_t>({channels}));  // sizes of the bias
  }
  const auto owned = arguments;
  kernel.callBoxed(&arguments);
}

// Statistics of batch norm, where it trains.
std::vector<size_t> written_unsaid(const c10::OperatorHandle& op,
                                   const torch::jit::Stack& arguments) {
  const auto& name = op.operator_name().name;
  if (name == "aten::batch_norm_update_stats") return {1, 2};
  if (name == "aten::native_batch_norm" && arguments[5].toBool()) return {3, 4};
  return {};
}

bool depends_on_data(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  // `index.Tensor_out` has no tag, but depends on data where an index is a mask.
  for (const auto& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for (const std::optional<at::Tensor>& index : value.toOptionalTensorVector()) {
      if (!index || !index->defined()) continue;
      const auto type = index->scalar_type();
      if (type == at::kBool || type == at::kByte) return true;
    }
  }
  for (const auto& result : op.schema().returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType && result.type()->str() != "Tensor[]") {
      return true;
    }
  }
  return false;
}

std::optional<Effect> effect_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                bool cacheable) {
  Signature signature(op);
  signature.add(at::GradMode::is_enabled());
  for (const auto& value : arguments) cacheable = cacheable && signature.add(value);
  auto& known = known_effects();
  if (cacheable) {
    const std::lock_guard lock(known.mutex);
    const auto found = known.effects.find(signature.text());
    if (found != known.effects.end()) return found->second;
  }
  Effect effect;
  try {
    effect = shadow_run(op, arguments);
  } catch (const std::exception&) {  // zeros are no input; or an error, which comes again
    return std::nullopt;
  }
  Machine::instance().count_shadow_run();
  if (cacheable) {
    const std::lock_guard lock(known.mutex);
    known.effects.emplace(signature.text(), effect);
  }
  return effect;
}

}  // namespace zero::simulated
