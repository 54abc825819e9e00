// Parameters as flat arrays, with the elements in the order of the storage; and labels of units.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "zero/partition/layout.h"

namespace zero {

/// Returns all elements of a dense tensor as a 1-D view, in storage order.
inline at::Tensor flat_view(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

/// Returns `value` (of `like`'s shape, any dtype) as a 1-D array of `dtype` in the storage order of
/// `like`.
inline at::Tensor flattened(const at::Tensor& value, const at::Tensor& like, at::ScalarType dtype) {
  auto dense = at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(dtype));
  dense.copy_(value.detach());
  return dense.as_strided({like.numel()}, {1});
}

/// Returns the 1-D array `flat`, in the storage order of `like`, as a contiguous tensor of its
/// shape.
inline at::Tensor unflattened(const at::Tensor& flat, const at::Tensor& like) {
  return flat.as_strided(like.sizes(), like.strides(), flat.storage_offset())
      .clone(at::MemoryFormat::Contiguous);
}

/// Returns "unit 3 (h.0.mlp.c_fc.weight)", for people: the number and the first parameter.
inline std::string unit_label(const partition::Layout& layout, int64_t unit) {
  const auto first = static_cast<size_t>(layout.unit(unit).segments.front().parameter);
  return "unit " + std::to_string(unit) + " (" + layout.parameters()[first].name + ")";
}

/// Returns the labels of all units, each after `prefix`.
inline std::vector<std::string> unit_labels(const partition::Layout& layout,
                                            const std::string& prefix = "") {
  std::vector<std::string> labels;
  for (int64_t u = 0; u < layout.unit_count(); ++u)
    labels.push_back(prefix + unit_label(layout, u));
  return labels;
}

}  // namespace zero
