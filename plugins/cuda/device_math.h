// Functions of a device that the C++ library has otherwise: what the element functions of
// zero/models/layers take as `Math`. To be included by files that nvcc compiles.
#pragma once

#include <cmath>

namespace zero::cuda {

// The compiler wants functions of the host too, where a function that may run there calls them.
struct DeviceMath {
  static __host__ __device__ float exp2(float x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));  // one instruction
    return result;
#else
    return ::exp2f(x);
#endif
  }
  static __host__ __device__ double log(double x) { return ::log(x); }
};

}  // namespace zero::cuda
