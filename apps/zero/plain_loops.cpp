#include "apps/zero/plain_loops.h"

#include "zero/base/streaming.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
// The choice of a clone is made while the program is loaded, before ThreadSanitizer's runtime that
// the instrumented choice would call.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define ZERO_EVERY_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZERO_EVERY_WIDTH
#endif

namespace zero::app::benchmarks {

ZERO_EVERY_WIDTH void triad(float* __restrict a, const float* __restrict b,
                            const float* __restrict c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) a[i] = b[i] + 3.0F * c[i];
}

void triad_past_caches(float* __restrict a, const float* __restrict b, const float* __restrict c,
                       int64_t begin, int64_t end) {
  int64_t i = begin;
#if defined(__x86_64__)
  for (; i < end && i % 4 != 0; ++i) a[i] = b[i] + 3.0F * c[i];
  const __m128 factor = _mm_set1_ps(3.0F);
  for (; i + 4 <= end; i += 4) {
    _mm_stream_ps(a + i, _mm_add_ps(_mm_loadu_ps(b + i), _mm_mul_ps(factor, _mm_loadu_ps(c + i))));
  }
  _mm_sfence();
#endif
  for (; i < end; ++i) a[i] = b[i] + 3.0F * c[i];
}

uint64_t read(const uint64_t* a, int64_t begin, int64_t end) {
  uint64_t even = 0;
  uint64_t odd = 0;
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {  // a cache line
    prefetch_to_second_level(a + i);
    even ^= a[i] ^ a[i + 2] ^ a[i + 4] ^ a[i + 6];
    odd ^= a[i + 1] ^ a[i + 3] ^ a[i + 5] ^ a[i + 7];
  }
  for (; i < end; ++i) even ^= a[i];
  return even ^ odd;
}

ZERO_EVERY_WIDTH void stream(float* __restrict p, float* __restrict m, float* __restrict v,
                             const float* __restrict g, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float x = g[i];
    p[i] += x;
    m[i] += x;
    v[i] += x;
  }
}

ZERO_EVERY_WIDTH void stream_one(float* __restrict p, float* __restrict m,
                                 const float* __restrict g, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float x = g[i];
    p[i] += x;
    m[i] += x;
  }
}

ZERO_EVERY_WIDTH void stream16_one(float* __restrict p, float* __restrict m,
                                   const uint16_t* __restrict g, uint16_t* __restrict low,
                                   int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const auto x = static_cast<float>(static_cast<int16_t>(g[i]));
    p[i] += x;
    m[i] += x;
    low[i] = g[i];
  }
}

ZERO_EVERY_WIDTH void stream16(float* __restrict p, float* __restrict m, float* __restrict v,
                               const uint16_t* __restrict g, uint16_t* __restrict low,
                               int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const auto x = static_cast<float>(static_cast<int16_t>(g[i]));
    p[i] += x;
    m[i] += x;
    v[i] += x;
    low[i] = g[i];
  }
}

}  // namespace zero::app::benchmarks
