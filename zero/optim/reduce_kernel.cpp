#include <algorithm>

#include "zero/optim/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/reduce_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

template <class Source>
void accumulate_range(float* HWY_RESTRICT destination,
                      const typename Source::Stored* HWY_RESTRICT source, int64_t begin,
                      int64_t end) {
  const Fp32Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, destination + i), load(Source(), d, source + i)), d,
               destination + i);
  }
  if (i == end) return;
  const auto count = static_cast<size_t>(end - i);
  Tail<float> to(destination + i, count);
  const Tail<typename Source::Stored> from(source + i, count);
  for (size_t j = 0; j < kMaxLanes; j += static_cast<size_t>(lanes)) {
    hn::StoreU(hn::Add(hn::LoadU(d, to.values + j), load(Source(), d, from.values + j)), d,
               to.values + j);
  }
  to.write(destination + i, count);
}

void accumulate(float* destination, const void* source, c10::ScalarType dtype, int64_t begin,
                int64_t end) {
  if (dtype == c10::ScalarType::Float) {
    accumulate_range<Fp32>(destination, static_cast<const float*>(source), begin, end);
  } else if (dtype == c10::ScalarType::BFloat16) {
    accumulate_range<Bf16>(destination, static_cast<const uint16_t*>(source), begin, end);
  } else {
    accumulate_range<Fp16>(destination, static_cast<const uint16_t*>(source), begin, end);
  }
}

/// Adds the squares of `rows` rows of kNormLanes elements to kNormLanes partial sums. The square of
/// an fp32 value is exact in fp64, so MulAdd gives the same bits whether it is fused or not.
template <class Source>
HWY_INLINE void add_squares(const typename Source::Stored* HWY_RESTRICT values, int64_t rows,
                            double* HWY_RESTRICT partial) {
  const hn::CappedTag<double, kMaxLanes / 2> d;
  const hn::Rebind<float, decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const auto value = [&](const typename Source::Stored* from)
                         HWY_ATTR { return hn::PromoteTo(d, load(Source(), d32, from)); };
  // Four sums are made at a time, which hides the latency of the additions.
  for (size_t j = 0; j < static_cast<size_t>(kNormLanes); j += 4 * lanes) {
    auto a = hn::Load(d, partial + j);
    auto b = hn::Load(d, partial + j + lanes);
    auto c = hn::Load(d, partial + j + 2 * lanes);
    auto e = hn::Load(d, partial + j + 3 * lanes);
    const auto* row = values + j;
    for (int64_t r = 0; r < rows; ++r, row += kNormLanes) {
      const auto va = value(row);
      const auto vb = value(row + lanes);
      const auto vc = value(row + 2 * lanes);
      const auto ve = value(row + 3 * lanes);
      a = hn::MulAdd(va, va, a);
      b = hn::MulAdd(vb, vb, b);
      c = hn::MulAdd(vc, vc, c);
      e = hn::MulAdd(ve, ve, e);
    }
    hn::Store(a, d, partial + j);
    hn::Store(b, d, partial + j + lanes);
    hn::Store(c, d, partial + j + 2 * lanes);
    hn::Store(e, d, partial + j + 3 * lanes);
  }
}

template <class Source>
double squares(const typename Source::Stored* values, int64_t begin, int64_t end) {
  // Narrow vectors go over the same rows several times, so that these should stay in the first
  // cache level.
  constexpr int64_t kRows = 64;
  HWY_ALIGN double partial[kNormLanes] = {};
  int64_t i = begin;
  while (i + kNormLanes <= end) {
    const int64_t rows = std::min(kRows, (end - i) / kNormLanes);
    add_squares<Source>(values + i, rows, partial);
    i += rows * kNormLanes;
  }
  if (i < end) {
    // Zeros in the padding leave a sum of squares as it is.
    typename Source::Stored tail[kNormLanes] = {};
    std::memcpy(tail, values + i, static_cast<size_t>(end - i) * sizeof(tail[0]));
    add_squares<Source>(tail, 1, partial);
  }
  double sum = 0;
  for (const double p : partial) sum += p;
  return sum;
}

double squared_norm_block(const void* values, c10::ScalarType dtype, int64_t begin, int64_t end) {
  if (dtype == c10::ScalarType::Float) {
    return squares<Fp32>(static_cast<const float*>(values), begin, end);
  }
  if (dtype == c10::ScalarType::BFloat16) {
    return squares<Bf16>(static_cast<const uint16_t*>(values), begin, end);
  }
  return squares<Fp16>(static_cast<const uint16_t*>(values), begin, end);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::optim::kernels {
HWY_EXPORT(accumulate);
HWY_EXPORT(squared_norm_block);
void accumulate(float* destination, const void* source, c10::ScalarType dtype, int64_t begin,
                int64_t end) {
  HWY_DYNAMIC_DISPATCH(accumulate)(destination, source, dtype, begin, end);
}
double squared_norm_block(const void* values, c10::ScalarType dtype, int64_t begin, int64_t end) {
  return HWY_DYNAMIC_DISPATCH(squared_norm_block)(values, dtype, begin, end);
}
}  // namespace zero::optim::kernels
#endif
