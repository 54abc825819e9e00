// Views of 1-D arrays in host memory. No version counter moves, and a view keeps nothing alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "zero/comm/copy_kernels.h"

namespace zero::comm {

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

inline int64_t width_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

inline std::span<std::byte> span_of(const at::Tensor& values) {
  return {bytes_of(values), static_cast<size_t>(values.numel() * values.element_size())};
}

/// Returns `numel` elements of `whole`, from element `begin` on.
inline at::Tensor part(const at::Tensor& whole, int64_t begin, int64_t numel) {
  return at::from_blob(bytes_of(whole) + begin * whole.element_size(), {numel},
                       at::TensorOptions(whole.scalar_type()));
}

/// Returns the memory of `bytes` as `numel` elements of `dtype`.
inline at::Tensor as_dtype(const at::Tensor& bytes, int64_t numel, at::ScalarType dtype) {
  return at::from_blob(bytes_of(bytes), {numel}, at::TensorOptions(dtype));
}

/// Copies the bytes of `values`, unless they are in their place already.
inline void copy_to(std::byte* to, const at::Tensor& values) {
  if (to != bytes_of(values))
    copy_bytes(to, bytes_of(values), static_cast<int64_t>(span_of(values).size()));
}

}  // namespace zero::comm
