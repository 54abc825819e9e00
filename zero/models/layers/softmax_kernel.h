// The vector kernel behind softmax_cross_entropy_.
#pragma once

#include <cstdint>

namespace zero {

/// One row of `vocabulary` fp32 logits: returns log(sum(exp(logits))) - logits[target], or NaN when
/// a logit is NaN or the largest is infinite. With `gradient` the row becomes (softmax -
/// onehot(target)) * scale. Vectorised with run-time dispatch.
double softmax_row(float* logits, int64_t vocabulary, int64_t target, float scale, bool gradient);

}  // namespace zero
