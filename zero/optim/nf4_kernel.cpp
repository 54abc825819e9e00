#include "zero/optim/nf4_kernel.h"

#include <array>
#include <cstddef>
#include <cstring>

#include "zero/optim/nf4.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/optim/nf4_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/optim/elements-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::optim::kernels::HWY_NAMESPACE {

// A block has 16 different values, so each is computed once.
constexpr size_t kCodes = kNf4Values.size();

template <class Target>
HWY_INLINE std::array<typename Target::Stored, kCodes> block_values(float scale) {
  const Fp32Tag d;
  std::array<typename Target::Stored, kCodes> values;
  for (size_t i = 0; i < kCodes; i += hn::Lanes(d)) {
    const auto value = hn::Mul(hn::LoadU(d, kNf4Values.data() + i), hn::Set(d, scale));
    store(Target(), d, value, values.data() + i);
  }
  return values;
}

#if HWY_TARGET == HWY_SCALAR

template <class Target>
void decode_blocks(const uint8_t* codes, const float* scales, int64_t blocks, uint8_t* values) {
  for (int64_t b = 0; b < blocks; ++b) {
    const auto of = block_values<Target>(scales[b]);
    for (int64_t i = 0; i < kNf4BlockBytes; ++i) {
      const std::array pair{of[*codes >> 4], of[*codes & 0xF]};
      std::memcpy(values, pair.data(), sizeof(pair));
      values += sizeof(pair);
      ++codes;
    }
  }
}

#else

// Byte k of a block's values is a table of 16 bytes, and one instruction looks 16 codes up in it.
using ByteTag = hn::FixedTag<uint8_t, 16>;
using PairTag = hn::FixedTag<uint16_t, 8>;
using Bytes = hn::Vec<ByteTag>;

/// The tables of 16 numbers of 2 bytes.
struct Tables {
  Bytes low;
  Bytes high;
};
HWY_INLINE Tables tables_of(const std::array<uint16_t, kCodes>& values) {
  std::array<uint8_t, kCodes> low;
  std::array<uint8_t, kCodes> high;
  for (size_t i = 0; i < kCodes; ++i) {
    low[i] = static_cast<uint8_t>(values[i]);
    high[i] = static_cast<uint8_t>(values[i] >> 8);
  }
  return {hn::LoadU(ByteTag(), low.data()), hn::LoadU(ByteTag(), high.data())};
}

/// The numbers of 16 codes, in two vectors.
struct Numbers {
  Bytes first;
  Bytes second;
};
HWY_INLINE Numbers look_up(const Tables& tables, Bytes codes) {
  const ByteTag d;
  const auto low = hn::TableLookupBytes(tables.low, codes);
  const auto high = hn::TableLookupBytes(tables.high, codes);
  return {hn::InterleaveLower(d, low, high), hn::InterleaveUpper(d, low, high)};
}

/// Writes the values of a block in 2 bytes each.
template <class Target>
struct Writer {
  explicit HWY_INLINE Writer(float scale) : tables(tables_of(block_values<Target>(scale))) {}
  HWY_INLINE void write(Bytes codes, uint8_t* to) const {
    const auto numbers = look_up(tables, codes);
    hn::StoreU(numbers.first, ByteTag(), to);
    hn::StoreU(numbers.second, ByteTag(), to + 16);
  }
  static constexpr size_t kBytes = 2;
  Tables tables;
};

/// Writes them in 4 bytes each.
template <>
struct Writer<Fp32> {
  explicit HWY_INLINE Writer(float scale) {
    std::array<uint32_t, kCodes> bits;
    std::memcpy(bits.data(), block_values<Fp32>(scale).data(), sizeof(bits));
    std::array<uint16_t, kCodes> half;
    for (size_t i = 0; i < kCodes; ++i) half[i] = static_cast<uint16_t>(bits[i]);
    lower = tables_of(half);
    for (size_t i = 0; i < kCodes; ++i) half[i] = static_cast<uint16_t>(bits[i] >> 16);
    upper = tables_of(half);
  }
  HWY_INLINE void write(Bytes codes, uint8_t* to) const {
    const auto low = look_up(lower, codes);
    const auto high = look_up(upper, codes);
    write_words(low.first, high.first, to);
    write_words(low.second, high.second, to + 32);
  }
  static HWY_INLINE void write_words(Bytes low, Bytes high, uint8_t* to) {
    const ByteTag d;
    const PairTag pairs;
    const auto a = hn::BitCast(pairs, low);
    const auto b = hn::BitCast(pairs, high);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, a, b)), d, to);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, a, b)), d, to + 16);
  }
  static constexpr size_t kBytes = 4;
  Tables lower;
  Tables upper;
};

template <class Target>
void decode_blocks(const uint8_t* codes, const float* scales, int64_t blocks, uint8_t* values) {
  using Write = Writer<Target>;
  const ByteTag d;
  const PairTag pairs;
  const auto lower_half = hn::Set(d, 0xF);
  for (int64_t b = 0; b < blocks; ++b) {
    const Write writer(scales[b]);
    for (int64_t part = 0; part < kNf4BlockBytes; part += 16) {
      const auto packed = hn::LoadU(d, codes);
      const auto shifted = hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(pairs, packed)));
      const auto even = hn::And(shifted, lower_half);
      const auto odd = hn::And(packed, lower_half);
      writer.write(hn::InterleaveLower(d, even, odd), values);
      writer.write(hn::InterleaveUpper(d, even, odd), values + 16 * Write::kBytes);
      codes += 16;
      values += 32 * Write::kBytes;
    }
  }
}

#endif

void nf4_decode(const uint8_t* codes, const float* scales, int64_t blocks, void* values,
                Nf4Target target) {
  auto* bytes = static_cast<uint8_t*>(values);
  switch (target) {
    case Nf4Target::fp32:
      return decode_blocks<Fp32>(codes, scales, blocks, bytes);
    case Nf4Target::bf16:
      return decode_blocks<Bf16>(codes, scales, blocks, bytes);
    case Nf4Target::fp16:
      return decode_blocks<Fp16>(codes, scales, blocks, bytes);
  }
}

}  // namespace zero::optim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::optim::kernels {
HWY_EXPORT(nf4_decode);
void nf4_decode(const uint8_t* codes, const float* scales, int64_t blocks, void* values,
                Nf4Target target) {
  HWY_DYNAMIC_DISPATCH(nf4_decode)(codes, scales, blocks, values, target);
}
}  // namespace zero::optim::kernels
#endif
