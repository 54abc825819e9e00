#include "zero/engine/parameter_names.h"

#include <algorithm>

namespace zero {

namespace {

const void* storage_address(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace

void ParameterNames::add(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || !tensor.has_storage()) continue;
    const int64_t begin = tensor.storage_offset();
    auto& all = stretches_[storage_address(tensor)];
    const bool tied = std::any_of(all.begin(), all.end(),
                                  [&](const Stretch& other) { return other.begin == begin; });
    if (tied) continue;
    all.push_back({begin, begin + tensor.numel(), names_.size()});
    names_.push_back(name);
  }
}

std::optional<size_t> ParameterNames::find(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  const auto found = stretches_.find(storage_address(tensor));
  if (found == stretches_.end()) return std::nullopt;
  const int64_t offset = tensor.storage_offset();
  for (const auto& stretch : found->second) {
    if (offset >= stretch.begin && offset < std::max(stretch.end, stretch.begin + 1))
      return stretch.index;
  }
  return std::nullopt;
}

}  // namespace zero
