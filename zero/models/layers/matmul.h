// Matrix products by the fastest of the libraries that LibTorch brings.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// `a` (M, K) times `b` (K, N), plus `bias` (N) on each row where it is defined -> a new (M, N).
/// Not differentiable: for the insides of autograd functions. Equal to at::mm up to the order of
/// the sums; see Note [Which library multiplies].
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {});

/// The same into `result` (M, N), of any strides; or added to what it holds.
void product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);
void add_product(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);

/// The same by at::mm and at::addmm alone.
at::Tensor product_reference(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {});

}  // namespace zero
