// The dispatcher learns of the device here: the fallback for all operators, the few that need a
// kernel of their own because they make memory or views, and those whom a composite would hide.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string>

#include "tests/device/allocators.h"
#include "tests/device/copies.h"
#include "tests/device/device.h"
#include "tests/device/operators.h"

namespace zero::simulated {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> on,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(type),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> on, std::optional<bool> /*pinned*/) {
  const c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys,
                                           c10::dtype_or_default(type));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, sizes, format);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::set_storage_meta__symint(self, std::move(storage), offset,
                                              c10::fromIntArrayRefSlow(sizes),
                                              c10::fromIntArrayRefSlow(strides));
}
at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const c10::Storage none(c10::Storage::use_byte_size_t(), 0, &device_allocator(), true);
  return set_storage(self, none, 0, {0}, {1});
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}

// Module::to replaces a parameter's data, from the CPU's to the device's.
bool replaceable(const at::Tensor& /*self*/, const at::Tensor& /*by*/) { return true; }

void register_kernels(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("view", &at::native::view);
  aten.impl("as_strided", &at::native::as_strided_tensorimpl);
  aten.impl("_reshape_alias", &at::native::_reshape_alias);
  aten.impl("unfold", &at::native::unfold);
  aten.impl("resize_", &resize);
  aten.impl("set_", &set_nothing);
  aten.impl("set_.source_Tensor", &at::native::set_tensor_);
  aten.impl("set_.source_Storage", &set_whole_storage);
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("record_stream", &record_stream);
  aten.impl("_has_compatible_shallow_copy_type", &replaceable);
}

// Note [Composites that hide the fallback]
// A composite kernel comes before a backend's fallback. Where the CPU has a kernel of its own
// beside it (layer norm), the device would compute something else than the CPU. Those operators get
// the fallback's kernel explicitly; so do the convolutions that LibTorch asks this kind of device
// for.
void register_hidden(torch::Library& aten) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto give = [&](const c10::OperatorName& name) {
    aten.impl(toString(name).c_str() + std::string("aten::").size(),
              torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  };
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    const bool hidden = has(c10::DispatchKey::CompositeExplicitAutograd) ||
                        has(c10::DispatchKey::CompositeImplicitAutograd);
    if (hidden && has(c10::DispatchKey::CPU) && !has(c10::DispatchKey::PrivateUse1)) give(name);
  }
  for (const char* name : {"convolution_overrideable", "convolution_backward_overrideable"}) {
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
}

// The registrations stay until the process ends, like LibTorch's own kernels.
struct Registration {
  Registration() {
    register_kernels(aten);
    register_hidden(aten);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    own.def("reports", [] { return take_reports(); });
  }
  // For Python: torch.ops.simulated.reports().
  torch::Library own =
      torch::Library(torch::Library::DEF, "simulated", std::nullopt, __FILE__, __LINE__);
  torch::Library aten = torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                       __FILE__, __LINE__);
  torch::Library all =
      torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
};
const Registration registration;

}  // namespace

}  // namespace zero::simulated
