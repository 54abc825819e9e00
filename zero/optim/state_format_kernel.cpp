#include "zero/optim/state_format_kernel.h"

#include <array>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/state_format_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

using CodeTag = hn::Rebind<uint8_t, Fp32Tag>;
using IntTag = hn::Rebind<int32_t, Fp32Tag>;

template <Sign kSign>
HWY_INLINE hn::Vec<Fp32Tag> decode_vector(const uint8_t* codes, float group_unit) {
  const Fp32Tag d;
  const IntTag di;
  const auto code = hn::PromoteTo(di, hn::LoadU(CodeTag(), codes));
  const auto number = hn::And(code, hn::Set(di, top_code(kSign)));
  const auto normal =
      hn::BitCast(d, hn::Add(hn::ShiftLeft<kCodeRest>(number), hn::Set(di, int32_t{126} << 23)));
  const auto even = hn::Mul(hn::ConvertTo(d, number), hn::Set(d, 1.0F / (1 << kCodeMantissa)));
  const auto is_normal = hn::RebindMask(d, hn::Gt(number, hn::Set(di, (1 << kCodeMantissa) - 1)));
  const auto value = hn::Mul(hn::IfThenElse(is_normal, normal, even), hn::Set(d, group_unit));
  if constexpr (kSign == Sign::positive) return value;
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(di, 0x80)));
  return hn::BitCast(d, hn::Or(hn::BitCast(di, value), sign));
}

/// Writes the codes of 16 values. A random number is added to the places of a magnitude behind the
/// last place of its code, and may carry into it: see Note [Stochastic rounding] in narrow.h.
template <Sign kSign>
HWY_INLINE void encode_vector(hn::Vec<Fp32Tag> value, float inverse_unit, hn::Vec<IntTag> random,
                              uint8_t* codes) {
  const Fp32Tag d;
  const IntTag di;
  const auto zero = hn::Zero(di);
  const auto one = hn::Set(d, 1.0F);
  const auto bits = hn::BitCast(di, value);
  auto magnitude = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
  magnitude = hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(di, 0x007FFFFF)), magnitude);
  const auto scaled = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, inverse_unit));
  const auto normal = hn::Sub(hn::BitCast(di, scaled), hn::Set(di, int32_t{126} << 23));
  const auto even = hn::Sub(hn::BitCast(di, hn::Add(scaled, one)), hn::BitCast(di, one));
  const auto places = hn::IfThenElse(hn::RebindMask(di, hn::Lt(scaled, one)), even, normal);
  auto code =
      hn::Min(hn::ShiftRight<kCodeRest>(hn::Add(places, random)), hn::Set(di, top_code(kSign)));
  const auto none = hn::Eq(code, zero);
  if constexpr (kSign == Sign::positive) {
    code = hn::IfThenElse(hn::And(none, hn::Gt(magnitude, zero)), hn::Set(di, 1), code);
  } else {
    const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(di, 0x80));
    code = hn::IfThenZeroElse(none, hn::Or(code, sign));
  }
  hn::StoreU(hn::DemoteTo(CodeTag(), code), CodeTag(), codes);
}

HWY_INLINE uint32_t greatest_bits(const float* values) {
  const Fp32Tag d;
  const IntTag di;
  const auto lanes = hn::Lanes(d);
  auto greatest = hn::Zero(di);
  for (size_t i = 0; i < kCodedGroup; i += lanes) {
    const auto bits = hn::BitCast(di, hn::LoadU(d, values + i));
    greatest = hn::Max(greatest, hn::And(bits, hn::Set(di, 0x7FFFFFFF)));
  }
  return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, greatest)));
}

/// Writes 16 codes, and returns their exponent.
template <Sign kSign>
HWY_INLINE uint8_t encode_group(const float* values, uint8_t* codes, const RoundingKey* key,
                                uint32_t index) {
  const Fp32Tag d;
  const IntTag di;
  const auto exponent = group_exponent(greatest_bits(values));
  if (exponent == 0 || exponent == 255) {
    std::memset(codes, 0, kCodedGroup);
    return exponent;
  }
  const float inverse = inverse_group_unit(exponent, kSign);
  for (size_t i = 0; i < kCodedGroup; i += hn::Lanes(d)) {
    auto random = hn::Set(di, 1 << (kCodeRest - 1));
    if (key != nullptr) {
      const auto all = random_vector(d, *key, index + static_cast<uint32_t>(i));
      random = hn::BitCast(di, hn::ShiftRight<32 - kCodeRest>(all));
    }
    encode_vector<kSign>(hn::LoadU(d, values + i), inverse, random, codes + i);
  }
  return exponent;
}

template <Sign kSign>
void decode_blocks(const uint8_t* blocks, float* values, int64_t numel) {
  const Fp32Tag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < numel; i += kCodedGroup) {
    const auto* block = blocks + i / kCodedBlock * kCodedBytes;
    const auto* codes = block + 4 + i % kCodedBlock;
    const float unit = group_unit(block[i % kCodedBlock / kCodedGroup], kSign);
    HWY_ALIGN std::array<float, kCodedGroup> whole;
    const bool is_whole = i + kCodedGroup <= numel;
    auto* to = is_whole ? values + i : whole.data();
    for (int64_t j = 0; j < kCodedGroup; j += lanes)
      hn::StoreU(decode_vector<kSign>(codes + j, unit), d, to + j);
    if (!is_whole)
      std::memcpy(values + i, whole.data(), static_cast<size_t>(numel - i) * sizeof(float));
  }
}

template <Sign kSign>
void encode_blocks(const float* values, uint8_t* blocks, int64_t numel, const RoundingKey* key,
                   uint32_t index) {
  for (int64_t i = 0; i < numel; i += kCodedGroup) {
    auto* block = blocks + i / kCodedBlock * kCodedBytes;
    auto* codes = block + 4 + i % kCodedBlock;
    auto& exponent = block[i % kCodedBlock / kCodedGroup];
    const auto number = index + static_cast<uint32_t>(i);
    if (i + kCodedGroup <= numel) {
      exponent = encode_group<kSign>(values + i, codes, key, number);
      continue;
    }
    const auto count = static_cast<size_t>(numel - i);
    HWY_ALIGN std::array<float, kCodedGroup> padded{};
    std::array<uint8_t, kCodedGroup> made;
    std::memcpy(padded.data(), values + i, count * sizeof(float));
    exponent = encode_group<kSign>(padded.data(), made.data(), key, number);
    std::memcpy(codes, made.data(), count);
  }
}

void decode(const uint8_t* blocks, float* values, int64_t numel, Sign sign) {
  sign == Sign::either ? decode_blocks<Sign::either>(blocks, values, numel)
                       : decode_blocks<Sign::positive>(blocks, values, numel);
}

void encode(const float* values, uint8_t* blocks, int64_t numel, Sign sign, const RoundingKey* key,
            uint32_t index) {
  sign == Sign::either ? encode_blocks<Sign::either>(values, blocks, numel, key, index)
                       : encode_blocks<Sign::positive>(values, blocks, numel, key, index);
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::optim::kernels {
HWY_EXPORT(decode);
HWY_EXPORT(encode);
void decode(const uint8_t* blocks, float* values, int64_t numel, Sign sign) {
  HWY_DYNAMIC_DISPATCH(decode)(blocks, values, numel, sign);
}
void encode(const float* values, uint8_t* blocks, int64_t numel, Sign sign, const RoundingKey* key,
            uint32_t index) {
  HWY_DYNAMIC_DISPATCH(encode)(values, blocks, numel, sign, key, index);
}
}  // namespace zero::optim::kernels
#endif
