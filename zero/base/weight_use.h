// Lets layers use some rows of a weight before the others are here, or without them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace zero {

/// Some rows of a weight (V, C).
struct WeightRows {
  int64_t begin = 0;  ///< the first row
  at::Tensor rows{};  ///< (n, C), with the bits that the weight will have there
};

/// Takes rows that are here. Returns how many of them it used, so that it need not read them again.
using UseRows = std::function<int64_t(const WeightRows& here)>;

/// Calls `rest` while all of `weight` is here; inside, operators read it. Whoever brings the weight
/// takes the whole call for one operator. If some rows are here and others still on their way,
/// `early` is called with them first, and the way goes on meanwhile. `early` must not read `weight`
/// itself.
void use_weight(const at::Tensor& weight, const UseRows& early, const std::function<void()>& rest);

/// Returns rows of `weight`, as at::embedding does, if whoever brings the weight brings these rows
/// alone: indices (...) int64 -> (..., C). Otherwise the result is undefined, and `weight` is to be
/// read. Not differentiable.
at::Tensor look_up_rows(const at::Tensor& weight, const at::Tensor& indices);

/// A LookUpRows does the work of `look_up_rows`, a UseWeight that of `use_weight`.
using LookUpRows = at::Tensor (*)(const at::Tensor& weight, const at::Tensor& indices);
using UseWeight = void (*)(const at::Tensor& weight, const UseRows& early,
                           const std::function<void()>& rest);
/// Lets `use_weight` and `look_up_rows` call these from now on. The pager calls it once, when the
/// library is loaded.
void serve_weight_uses(UseWeight use, LookUpRows look_up);

}  // namespace zero
