// The vector kernel behind nf4.h. Note [Same bits everywhere] in kernels.h holds.
#pragma once

#include <cstdint>

namespace zero::optim::kernels {

enum class Nf4Target : uint8_t { fp32, bf16, fp16 };

/// Writes the values of whole blocks, by their codes and scales. Serial.
void nf4_decode(const uint8_t* codes, const float* scales, int64_t blocks, void* values,
                Nf4Target target);

}  // namespace zero::optim::kernels
