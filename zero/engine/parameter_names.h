// Finds the parameter that a tensor is, or shows a part of. Observers of operators need it, since
// operators have no names for their inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace zero {

/// Names by storage, which a parameter keeps while its bytes come and go (stage 3).
class ParameterNames {
 public:
  /// Adds names. The first of two names of one tensor counts.
  void add(const std::vector<std::pair<std::string, at::Tensor>>& tensors);

  size_t size() const { return names_.size(); }
  const std::string& name(size_t index) const { return names_[index]; }
  /// Returns nothing if the tensor is no part of any.
  std::optional<size_t> find(const at::Tensor& tensor) const;

 private:
  struct Stretch {  // a part of a storage, in elements
    int64_t begin = 0;
    int64_t end = 0;
    size_t index = 0;
  };
  std::vector<std::string> names_;
  std::unordered_map<const void*, std::vector<Stretch>> stretches_;
};

/// Visits the tensors of an operator's argument or result, those of a list one by one.
template <class Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) {
      if (element.isTensor()) visit(element.toTensor());
    }
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) {
      if (element.isTensor()) visit(element.toTensor());
    }
  }
}

}  // namespace zero
