// The vector kernel behind softmax_cross_entropy_.
#pragma once

#include <cstdint>

namespace zero {

/// Returns the loss of one row of `vocabulary` fp32 logits as softmax_cross_entropy_ defines it, or
/// NaN when a logit is NaN or the largest is infinite. With `gradient` the row becomes its gradient
/// times `scale`. Vectorised with run-time dispatch.
double softmax_row(float* logits, int64_t vocabulary, int64_t target, float scale, bool gradient,
                   double smoothing);

}  // namespace zero
