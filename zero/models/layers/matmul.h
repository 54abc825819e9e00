// Matrix products by the fastest of the libraries that LibTorch brings.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero {

/// `a` (M, K) times `b` (K, N), plus `bias` (N) on each row where it is defined -> a new (M, N).
/// Not differentiable: for the insides of autograd functions. Equal to at::mm up to the order of
/// the sums; see Note [Which library multiplies].
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {});

/// Does the same into `result` (M, N), which may have any strides, or adds to what it holds.
void product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);
void add_product(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);

/// Returns the rows that an output projection (V, C) should have for its products: V, and on a GPU
/// the next multiple of 64.
///
/// Note [A vocabulary of a multiple of 64]
/// A vocabulary is often of an odd size, GPT-2's is of 50257 tokens. A GPU's libraries take two to
/// seven times as long for products with a dimension that is no multiple of 8 numbers, wherever
/// rows begin: 13 ms against 2.7 for the three of 8192 rows on an H200. So there they are made with
/// a copy of the weight that has rows of zeros at its end, which takes 0.06 ms.
int64_t padded_rows(const at::Tensor& weight);

/// Does the same by at::mm and at::addmm alone.
at::Tensor product_reference(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {});

}  // namespace zero
