#include "zero/models/layers/gelu_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/models/layers/gelu_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// These come after highway.h, once for each target.
#include <hwy/contrib/math/math-inl.h>

#include "zero/optim/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace elements = zero::optim::kernels::HWY_NAMESPACE;

using Tag = elements::Fp32Tag;
using Vector = hn::Vec<Tag>;

constexpr float kTwice = 1.5957691216057308F;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715F;

// Beyond these arguments of the logistic function s, it is 0 or 1 in fp32 for all that follows, and
// the exponential or x^3 may overflow.
constexpr float kSaturated = 87.0F;

struct Logistic {
  Vector z;
  Vector s;
};

HWY_INLINE Logistic logistic(Tag d, Vector x) {
  const auto square = hn::Mul(x, x);
  const auto z = hn::Mul(x, hn::MulAdd(square, hn::Set(d, kTwice * kCubic), hn::Set(d, kTwice)));
  const auto one = hn::Set(d, 1.0F);
  const auto e = hn::Exp(d, hn::Neg(hn::Max(z, hn::Set(d, -kSaturated))));
  const auto s = hn::Div(one, hn::Add(one, e));
  return {z, hn::IfThenZeroElse(hn::Lt(z, hn::Set(d, -kSaturated)), s)};
}

HWY_INLINE Vector value(Tag d, Vector x) { return hn::Mul(x, logistic(d, x).s); }

HWY_INLINE Vector slope(Tag d, Vector x) {
  const auto [z, s] = logistic(d, x);
  const auto dz = hn::MulAdd(hn::Mul(x, x), hn::Set(d, 3.0F * kTwice * kCubic), hn::Set(d, kTwice));
  // The slope is s + x s (1 - s) z'.
  const auto inner = hn::Mul(hn::Mul(x, dz), hn::Sub(hn::Set(d, 1.0F), s));
  const auto inside = hn::MulAdd(s, inner, s);
  return hn::IfThenElse(hn::Gt(hn::Abs(z), hn::Set(d, kSaturated)), s, inside);
}

template <class Format>
void forward_range(const typename Format::Stored* x, typename Format::Stored* y, int64_t begin,
                   int64_t end) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes)
    elements::store(Format(), d, value(d, elements::load(Format(), d, x + i)), y + i);
  if (i == end) return;
  const auto rest = static_cast<size_t>(end - i);
  elements::Tail<typename Format::Stored> tail(x + i, rest);
  elements::store(Format(), d, value(d, elements::load(Format(), d, tail.values)), tail.values);
  tail.write(y + i, rest);
}

template <class Format>
void backward_range(const typename Format::Stored* x, const typename Format::Stored* dy,
                    typename Format::Stored* dx, int64_t begin, int64_t end) {
  const Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto run = [&](const typename Format::Stored* input, const typename Format::Stored* from,
                       typename Format::Stored* to) {
    const auto product =
        hn::Mul(elements::load(Format(), d, from), slope(d, elements::load(Format(), d, input)));
    elements::store(Format(), d, product, to);
  };
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) run(x + i, dy + i, dx + i);
  if (i == end) return;
  const auto rest = static_cast<size_t>(end - i);
  const elements::Tail<typename Format::Stored> input(x + i, rest);
  elements::Tail<typename Format::Stored> tail(dy + i, rest);
  run(input.values, tail.values, tail.values);
  tail.write(dx + i, rest);
}

void Forward(const void* x, void* y, int64_t begin, int64_t end, bool bf16) {
  if (bf16) {
    forward_range<elements::Bf16>(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(y), begin,
                                  end);
  } else {
    forward_range<elements::Fp32>(static_cast<const float*>(x), static_cast<float*>(y), begin, end);
  }
}

void Backward(const void* x, const void* dy, void* dx, int64_t begin, int64_t end, bool bf16) {
  if (bf16) {
    backward_range<elements::Bf16>(static_cast<const uint16_t*>(x),
                                   static_cast<const uint16_t*>(dy), static_cast<uint16_t*>(dx),
                                   begin, end);
  } else {
    backward_range<elements::Fp32>(static_cast<const float*>(x), static_cast<const float*>(dy),
                                   static_cast<float*>(dx), begin, end);
  }
}

}  // namespace zero::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

void gelu_forward(const void* x, void* y, int64_t begin, int64_t end, bool bf16) {
  HWY_DYNAMIC_DISPATCH(Forward)(x, y, begin, end, bf16);
}

void gelu_backward(const void* x, const void* dy, void* dx, int64_t begin, int64_t end, bool bf16) {
  HWY_DYNAMIC_DISPATCH(Backward)(x, dy, dx, begin, end, bf16);
}

}  // namespace zero
#endif
