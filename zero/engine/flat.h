// Parameters as flat arrays: the elements in the order in which the storage holds them; and how the
// units that they lie in are called.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "zero/partition/layout.h"

namespace zero {

/// All elements of a dense tensor, in storage order, as a 1-D view of it.
inline at::Tensor flat_view(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

/// `value` (of `like`'s shape, any dtype) as a 1-D array of `dtype` in the storage order of `like`.
inline at::Tensor flattened(const at::Tensor& value, const at::Tensor& like, at::ScalarType dtype) {
  auto dense = at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(dtype));
  dense.copy_(value.detach());
  return dense.as_strided({like.numel()}, {1});
}

/// The 1-D array `flat`, in the storage order of `like`, as a contiguous tensor of its shape.
inline at::Tensor unflattened(const at::Tensor& flat, const at::Tensor& like) {
  return flat.as_strided(like.sizes(), like.strides(), flat.storage_offset())
      .clone(at::MemoryFormat::Contiguous);
}

/// "unit 3 (h.0.mlp.c_fc.weight)": the number and the first parameter, for people.
inline std::string unit_label(const partition::Layout& layout, int64_t unit) {
  const auto first = static_cast<size_t>(layout.unit(unit).segments.front().parameter);
  return "unit " + std::to_string(unit) + " (" + layout.parameters()[first].name + ")";
}

/// The labels of all units, each behind `prefix`.
inline std::vector<std::string> unit_labels(const partition::Layout& layout,
                                            const std::string& prefix = "") {
  std::vector<std::string> labels;
  for (int64_t u = 0; u < layout.unit_count(); ++u)
    labels.push_back(prefix + unit_label(layout, u));
  return labels;
}

}  // namespace zero
