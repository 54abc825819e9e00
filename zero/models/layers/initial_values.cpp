#include "zero/models/layers/initial_values.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "zero/paging/page.h"

namespace zero {
namespace {

thread_local int scopes_without_values = 0;

c10::StorageImpl& storage_behind(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace

WithoutValues::WithoutValues() { ++scopes_without_values; }
WithoutValues::~WithoutValues() { --scopes_without_values; }

WithValues::WithValues() : scopes_(std::exchange(scopes_without_values, 0)) {}
WithValues::~WithValues() { scopes_without_values = scopes_; }

at::Tensor normal_values(at::IntArrayRef sizes, double deviation) {
  if (scopes_without_values > 0) return absent_values(sizes, at::kFloat);
  return at::empty(sizes).normal_(0.0, deviation);
}

at::Tensor uniform_values(at::IntArrayRef sizes, double bound) {
  if (scopes_without_values > 0) return absent_values(sizes, at::kFloat);
  return at::empty(sizes).uniform_(-bound, bound);
}

at::Tensor absent_values(at::IntArrayRef sizes, at::ScalarType dtype) {
  auto tensor = at::empty(sizes, dtype);  // memory that nothing was written to, given back at once
  paging::orphan(storage_behind(tensor),
                 "The model was built without values (zero::WithoutValues). Give it to an Engine "
                 "(NamedTensors::values_follow) and call load_pretrained.");
  return tensor;
}

bool has_absent_values(const at::Tensor& tensor) {
  return tensor.numel() > 0 &&
         storage_behind(tensor)._mutable_data_ptr_no_checks().get() == nullptr;
}

}  // namespace zero
