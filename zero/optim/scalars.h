// A step's hyper-parameters, computed in fp64 and rounded once; shared by the vector kernels and
// the plain references.
#pragma once

#include <cstdint>
#include <string_view>

#include "zero/optim/kernels.h"
#include "zero/optim/optimizer.h"

namespace zero::optim {

kernels::AdamWScalars scalars(const AdamW& optimizer, int64_t step, double lr,
                              double gradient_scale);
kernels::SgdScalars scalars(const Sgd& optimizer, int64_t step, double lr, double gradient_scale);

/// Throws ConfigError unless `dtype` is Float, BFloat16 or Half; `what` names the array.
void check_dtype(c10::ScalarType dtype, std::string_view what);

}  // namespace zero::optim
