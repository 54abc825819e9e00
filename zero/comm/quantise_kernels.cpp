#include "zero/comm/quantise_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "zero/base/error.h"

// The vector code below is compiled once for each instruction set; Highway includes this file again
// for each. It is compiled without contraction (CMakeLists.txt): the feedback's sums are not exact,
// and must not depend on the instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/comm/quantise_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "zero/comm/lanes-inl.h"

// All instruction sets share this part.
#ifndef ZERO_COMM_QUANTISE_KERNELS_ONCE
#define ZERO_COMM_QUANTISE_KERNELS_ONCE
namespace zero::comm {
namespace {

// The places of a message's parts.
struct Message {
  int64_t numel;
  int64_t block;
  bool nibbles;

  Message(const Quantisation& quantisation, int64_t of)
      : numel(of), block(quantisation.block), nibbles(quantisation.format == WireFormat::int4) {}
  int64_t blocks() const { return (numel + block - 1) / block; }
  int64_t length(int64_t b) const { return std::min(block, numel - b * block); }
  int64_t code_bytes(int64_t elements) const { return nibbles ? (elements + 1) / 2 : elements; }
  int64_t bytes() const {
    const int64_t full = numel / block;
    return blocks() * kScaleBytes + full * code_bytes(block) + code_bytes(numel - full * block);
  }
  int64_t scale_at(int64_t b) const { return b * kScaleBytes; }
  int64_t codes_at(int64_t b) const { return blocks() * kScaleBytes + b * code_bytes(block); }

  static constexpr auto kScaleBytes = static_cast<int64_t>(sizeof(float));
};

float load_scale(const std::byte* at) {
  float scale;
  std::memcpy(&scale, at, sizeof(scale));
  return scale;
}

// Returns the scale of a block. `largest` has the greatest bits of its magnitudes; NaN's are
// greater than infinity's, and those greater than any number's.
float scale_of(int32_t largest, float greatest_code) {
  constexpr int32_t kInfinity = 0x7F800000;
  if (largest >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  // The scale keeps 17 of 24 significant bits, since a code has at most 7.
  constexpr uint32_t kLower = 0x7F;
  const auto exact = std::bit_cast<uint32_t>(std::bit_cast<float>(largest) / greatest_code);
  const auto rounded = (exact + kLower / 2 + (exact >> 7 & 1)) & ~kLower;
  // With a scale beyond the second bound the greatest code would mean infinity.
  const auto most = std::bit_cast<uint32_t>(std::numeric_limits<float>::max() / greatest_code);
  return std::clamp(std::bit_cast<float>(rounded), 0x1p-117F, std::bit_cast<float>(most & ~kLower));
}

constexpr float greatest_code(WireFormat format) {
  return format == WireFormat::int8 ? 127 : format == WireFormat::int4 ? 7 : 448;
}

}  // namespace
}  // namespace zero::comm
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::comm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::ScalableTag<float>;
using IntTag = hn::RebindToSigned<Tag>;
using ByteTag = hn::Rebind<uint8_t, Tag>;
using Values = hn::Vec<Tag>;
using Codes = hn::Vec<IntTag>;  // each in the lower bits, others are zero

// Codes of whole numbers of `kBits` bits.
template <int kBits>
struct Integers {
  static HWY_INLINE Codes encode(Values scaled) {
    return hn::And(hn::NearestInt(scaled), hn::Set(IntTag(), (1 << kBits) - 1));
  }
  static HWY_INLINE Values decode(Codes codes) {
    constexpr int kOthers = 32 - kBits;
    return hn::ConvertTo(Tag(), hn::ShiftRight<kOthers>(hn::ShiftLeft<kOthers>(codes)));
  }
};

struct Floats8 {
  static HWY_INLINE Codes encode(Values scaled) {
    const Tag d;
    const IntTag di;
    const auto bits = hn::BitCast(di, scaled);
    const auto sign = hn::ShiftLeft<7>(
        hn::BitCast(di, hn::ShiftRight<31>(hn::BitCast(hn::RebindToUnsigned<Tag>(), scaled))));
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
    // Three mantissa bits stay, and the exponent's bias shrinks from 127 to 7.
    const auto odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(di, 1));
    const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(di, 0x7FFFF)));
    const auto normal = hn::Sub(hn::ShiftRight<20>(rounded), hn::Set(di, 120 << 3));
    // The spacing of fp32 numbers at 2^14 is that of the subnormal ones, so this addition rounds to
    // them.
    const auto base = hn::Set(d, 0x1p14F);
    const auto subnormal =
        hn::Sub(hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), base)), hn::BitCast(di, base));
    const auto least_normal = hn::BitCast(di, hn::Set(d, 0x1p-6F));
    return hn::Or(hn::IfThenElse(hn::Lt(magnitude, least_normal), subnormal, normal), sign);
  }
  static HWY_INLINE Values decode(Codes codes) {
    const Tag d;
    const IntTag di;
    const auto magnitude = hn::And(codes, hn::Set(di, 0x7F));
    const auto sign = hn::ShiftLeft<24>(hn::And(codes, hn::Set(di, 0x80)));
    const auto normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(di, 120 << 23));
    const auto subnormal =
        hn::BitCast(di, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-9F)));
    const auto small = hn::Lt(magnitude, hn::Set(di, 8));
    return hn::BitCast(d, hn::Or(hn::IfThenElse(small, subnormal, normal), sign));
  }
};

HWY_INLINE Codes load_codes(const uint8_t* from) {
  return hn::PromoteTo(IntTag(), hn::LoadU(ByteTag(), from));
}

HWY_INLINE void store_codes(Codes codes, uint8_t* to) {
  hn::StoreU(hn::DemoteTo(ByteTag(), codes), ByteTag(), to);
}

// Stores and loads the codes of a block, a byte each.
template <class Code>
struct Bytes {
  // `source(i)` returns elements i and on, divided by the scale.
  template <class Source>
  static HWY_INLINE void encode(const Source& source, int64_t block, uint8_t* codes) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
    for (int64_t i = 0; i < block; i += lanes) store_codes(Code::encode(source(i)), codes + i);
  }
  // `sink(i, values)` takes elements i and on, yet to be multiplied by the scale.
  template <class Sink>
  static HWY_INLINE void decode(const uint8_t* codes, int64_t block, const Sink& sink) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
    for (int64_t i = 0; i < block; i += lanes) sink(i, Code::decode(load_codes(codes + i)));
  }
};

// Stores and loads the codes of a block, half a byte each.
template <class Code>
struct Nibbles {
  template <class Source>
  static HWY_INLINE void encode(const Source& source, int64_t block, uint8_t* codes) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
    const int64_t half = block / 2;
    for (int64_t i = 0; i < half; i += lanes) {
      const auto upper = hn::ShiftLeft<4>(Code::encode(source(half + i)));
      store_codes(hn::Or(Code::encode(source(i)), upper), codes + i);
    }
  }
  template <class Sink>
  static HWY_INLINE void decode(const uint8_t* codes, int64_t block, const Sink& sink) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(Tag()));
    const int64_t half = block / 2;
    for (int64_t i = 0; i < half; i += lanes) {
      const auto both = load_codes(codes + i);
      sink(i, Code::decode(hn::And(both, hn::Set(IntTag(), 0xF))));
      sink(half + i, Code::decode(hn::ShiftRight<4>(both)));
    }
  }
};

struct Int8 : Bytes<Integers<8>> {
  static constexpr auto kFormat = WireFormat::int8;
};
struct Int4 : Nibbles<Integers<4>> {
  static constexpr auto kFormat = WireFormat::int4;
};
struct Fp8 : Bytes<Floats8> {
  static constexpr auto kFormat = WireFormat::fp8;
};

// Quantises block `b` of a message, which must be a whole block. Returns its scale.
template <class Format, class In>
HWY_INLINE float quantise_block(std::byte* bytes, const Message& message, int64_t b,
                                const typename In::Element* from) {
  const Tag d;
  const IntTag di;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto largest = hn::Zero(di);
  for (int64_t i = 0; i < message.block; i += lanes) {
    const auto magnitude = hn::And(hn::BitCast(di, In::load(d, from + i)), hn::Set(di, 0x7FFFFFFF));
    largest = hn::Max(largest, magnitude);
  }
  const float scale =
      scale_of(hn::GetLane(hn::MaxOfLanes(di, largest)), greatest_code(Format::kFormat));
  std::memcpy(bytes + message.scale_at(b), &scale, sizeof(scale));
  auto* codes = reinterpret_cast<uint8_t*>(bytes + message.codes_at(b));
  if (std::isnan(scale)) {
    std::memset(codes, 0, static_cast<size_t>(message.code_bytes(message.block)));
    return scale;
  }
  const auto inverse = hn::Set(d, 1 / scale);
  const auto source = [&](int64_t i) __attribute__((always_inline)) {
    return hn::Mul(In::load(d, from + i), inverse);
  };
  Format::encode(source, message.block, codes);
  return scale;
}

// `sink(i, values)` takes the block's elements i and on.
template <class Format, class Sink>
HWY_INLINE void dequantise_block(const std::byte* bytes, const Message& message, int64_t b,
                                 const Sink& sink) {
  const auto scale = hn::Set(Tag(), load_scale(bytes + message.scale_at(b)));
  const auto scaled = [&](int64_t i, Values codes) __attribute__((always_inline)) {
    sink(i, hn::Mul(codes, scale));
  };
  Format::decode(reinterpret_cast<const uint8_t*>(bytes + message.codes_at(b)), message.block,
                 scaled);
}

template <class Format, class In>
void quantise_blocks(std::byte* bytes, const Message& message, const typename In::Element* values,
                     BlockRange range) {
  for (int64_t b = range.begin; b < range.end; ++b)
    quantise_block<Format, In>(bytes, message, b, values + b * message.block);
}

template <class Format, class Out>
void dequantise_blocks(typename Out::Element* values, const std::byte* bytes,
                       const Message& message, BlockRange range) {
  for (int64_t b = range.begin; b < range.end; ++b) {
    auto* to = values + b * message.block;
    dequantise_block<Format>(
        bytes, message, b, [&](int64_t i, Values of) __attribute__((always_inline)) {
          hn::StoreU(Out::stored(Tag(), of), typename Out::StoredTag(), to + i);
        });
  }
}

template <class Format>
void dequantise_add_blocks(float* sum, const std::byte* bytes, const Message& message,
                           BlockRange range) {
  for (int64_t b = range.begin; b < range.end; ++b) {
    auto* to = sum + b * message.block;
    dequantise_block<Format>(
        bytes, message, b, [&](int64_t i, Values of) __attribute__((always_inline)) {
          hn::StoreU(hn::Add(hn::LoadU(Tag(), to + i), of), Tag(), to + i);
        });
  }
}

template <class Format, class In>
void feedback_blocks(std::byte* bytes, const Message& message, std::byte* error,
                     const Message& error_message, const typename In::Element* values, float beta,
                     BlockRange range) {
  const Tag d;
  const auto keep = hn::Set(d, beta), take = hn::Set(d, 1 - beta);
  HWY_ALIGN float wanted[kLargestBlock];
  HWY_ALIGN float errors[kLargestBlock];
  for (int64_t b = range.begin; b < range.end; ++b) {
    const auto* from = values + b * message.block;
    dequantise_block<Int8>(
        error, error_message, b, [&](int64_t i, Values of) __attribute__((always_inline)) {
          hn::StoreU(of, d, errors + i);
          hn::StoreU(hn::Add(In::load(d, from + i), of), d, wanted + i);
        });
    const float scale = quantise_block<Format, PlainLanes<float>>(bytes, message, b, wanted);
    if (std::isnan(scale)) continue;
    dequantise_block<Format>(
        bytes, message, b, [&](int64_t i, Values said) __attribute__((always_inline)) {
          const auto lost = hn::Sub(hn::LoadU(d, wanted + i), said);
          const auto before = hn::LoadU(d, errors + i);
          hn::StoreU(hn::Add(hn::Mul(keep, before), hn::Mul(take, lost)), d, errors + i);
        });
    quantise_block<Int8, PlainLanes<float>>(error, error_message, b, errors);
  }
}

// --- By format and dtype. Each returns false if this instruction set has no vectors for it. ---

// Half a block of 64 must be whole vectors.
HWY_INLINE bool vectors_fit() { return 32 % hn::Lanes(Tag()) == 0; }

template <class Work>
HWY_INLINE void with_format(WireFormat format, const Work& work) {
  switch (format) {
    case WireFormat::int8:
      return work(Int8());
    case WireFormat::int4:
      return work(Int4());
    case WireFormat::fp8:
      return work(Fp8());
  }
}

template <class Work>
HWY_INLINE bool with_lanes(c10::ScalarType dtype, const Work& work) {
  if (!vectors_fit()) return false;
  switch (dtype) {
    case c10::ScalarType::Float:
      work(PlainLanes<float>());
      return true;
    case c10::ScalarType::BFloat16:
      work(Bfloat16Lanes());
      return true;
#if HWY_TARGET <= HWY_AVX2
    case c10::ScalarType::Half:
      work(HalfLanes());
      return true;
#endif
    default:
      return false;
  }
}

bool QuantiseVectors(std::byte* bytes, const Message& message, const void* values,
                     c10::ScalarType dtype, WireFormat format, BlockRange range) {
  return with_lanes(dtype, [&]<class In>(In) {
    with_format(format, [&]<class Format>(Format) {
      quantise_blocks<Format, In>(bytes, message, static_cast<const typename In::Element*>(values),
                                  range);
    });
  });
}

bool DequantiseVectors(void* values, c10::ScalarType dtype, const std::byte* bytes,
                       const Message& message, WireFormat format, BlockRange range) {
  return with_lanes(dtype, [&]<class Out>(Out) {
    with_format(format, [&]<class Format>(Format) {
      dequantise_blocks<Format, Out>(static_cast<typename Out::Element*>(values), bytes, message,
                                     range);
    });
  });
}

bool DequantiseAddVectors(float* sum, const std::byte* bytes, const Message& message,
                          WireFormat format, BlockRange range) {
  if (!vectors_fit()) return false;
  with_format(format, [&]<class Format>(Format) {
    dequantise_add_blocks<Format>(sum, bytes, message, range);
  });
  return true;
}

bool FeedbackVectors(std::byte* bytes, const Message& message, std::byte* error,
                     const Message& error_message, const void* values, c10::ScalarType dtype,
                     WireFormat format, float beta, BlockRange range) {
  return with_lanes(dtype, [&]<class In>(In) {
    with_format(format, [&]<class Format>(Format) {
      feedback_blocks<Format, In>(bytes, message, error, error_message,
                                  static_cast<const typename In::Element*>(values), beta, range);
    });
  });
}

}  // namespace zero::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::comm {
namespace {

HWY_EXPORT(QuantiseVectors);
HWY_EXPORT(DequantiseVectors);
HWY_EXPORT(DequantiseAddVectors);
HWY_EXPORT(FeedbackVectors);

uint8_t encode(WireFormat format, float scaled) {
  if (format == WireFormat::fp8) return c10::Float8_e4m3fn(scaled).x;
  const auto whole = static_cast<int>(std::nearbyint(scaled));
  return static_cast<uint8_t>(format == WireFormat::int4 ? whole & 0xF : whole);
}

float decode(WireFormat format, uint8_t code) {
  if (format == WireFormat::fp8)
    return static_cast<float>(c10::Float8_e4m3fn(code, c10::Float8_e4m3fn::from_bits()));
  const auto whole = static_cast<int>(static_cast<int8_t>(code));
  return static_cast<float>(format == WireFormat::int4 && whole >= 8 ? whole - 16 : whole);
}

// Returns element `i` of the codes of a block of `length` elements, of which two may share a byte.
uint8_t code_at(const uint8_t* codes, int64_t length, bool nibbles, int64_t i) {
  if (!nibbles) return codes[i];
  const int64_t half = (length + 1) / 2;
  return i < half ? codes[i] & 0xF : codes[i - half] >> 4;
}

void put_code(uint8_t* codes, int64_t length, bool nibbles, int64_t i, uint8_t code) {
  const int64_t half = (length + 1) / 2;
  if (!nibbles || i < half) {
    codes[i] = code;
  } else {
    codes[i - half] = static_cast<uint8_t>(codes[i - half] | code << 4);
  }
}

// `value(i)` returns the block's element i. Returns the scale.
template <class Value>
float quantise_block(std::byte* bytes, const Message& message, WireFormat format, int64_t b,
                     const Value& value) {
  const int64_t length = message.length(b);
  int32_t largest = 0;
  for (int64_t i = 0; i < length; ++i)
    largest = std::max(largest, std::bit_cast<int32_t>(value(i)) & 0x7FFFFFFF);
  const float scale = scale_of(largest, greatest_code(format));
  std::memcpy(bytes + message.scale_at(b), &scale, sizeof(scale));
  auto* codes = reinterpret_cast<uint8_t*>(bytes + message.codes_at(b));
  std::memset(codes, 0, static_cast<size_t>(message.code_bytes(length)));
  if (std::isnan(scale)) return scale;
  const float inverse = 1 / scale;
  for (int64_t i = 0; i < length; ++i)
    put_code(codes, length, message.nibbles, i, encode(format, value(i) * inverse));
  return scale;
}

// `sink(i, value)` takes the block's elements.
template <class Sink>
void dequantise_block(const std::byte* bytes, const Message& message, WireFormat format, int64_t b,
                      const Sink& sink) {
  const float scale = load_scale(bytes + message.scale_at(b));
  const auto* codes = reinterpret_cast<const uint8_t*>(bytes + message.codes_at(b));
  const int64_t length = message.length(b);
  for (int64_t i = 0; i < length; ++i)
    sink(i, decode(format, code_at(codes, length, message.nibbles, i)) * scale);
}

template <class Work>
void with_type(c10::ScalarType dtype, const Work& work) {
  switch (dtype) {
    case c10::ScalarType::BFloat16:
      return work(c10::BFloat16());
    case c10::ScalarType::Half:
      return work(c10::Half());
    default:
      return work(float());
  }
}

void quantise_plain(std::byte* bytes, const Message& message, const void* values,
                    c10::ScalarType dtype, WireFormat format, BlockRange range) {
  with_type(dtype, [&]<class T>(T) {
    for (int64_t b = range.begin; b < range.end; ++b) {
      const auto* from = static_cast<const T*>(values) + b * message.block;
      quantise_block(bytes, message, format, b,
                     [&](int64_t i) { return static_cast<float>(from[i]); });
    }
  });
}

void dequantise_plain(void* values, c10::ScalarType dtype, const std::byte* bytes,
                      const Message& message, WireFormat format, BlockRange range) {
  with_type(dtype, [&]<class T>(T) {
    for (int64_t b = range.begin; b < range.end; ++b) {
      auto* to = static_cast<T*>(values) + b * message.block;
      dequantise_block(bytes, message, format, b,
                       [&](int64_t i, float value) { to[i] = static_cast<T>(value); });
    }
  });
}

void dequantise_add_plain(float* sum, const std::byte* bytes, const Message& message,
                          WireFormat format, BlockRange range) {
  for (int64_t b = range.begin; b < range.end; ++b) {
    auto* to = sum + b * message.block;
    dequantise_block(bytes, message, format, b, [&](int64_t i, float value) { to[i] += value; });
  }
}

void feedback_plain(std::byte* bytes, const Message& message, std::byte* error,
                    const Message& error_message, const void* values, c10::ScalarType dtype,
                    WireFormat format, float beta, BlockRange range) {
  std::array<float, kLargestBlock> wanted{}, errors{};
  const auto at = [](const auto& array, int64_t i) { return array[static_cast<size_t>(i)]; };
  with_type(dtype, [&]<class T>(T) {
    for (int64_t b = range.begin; b < range.end; ++b) {
      const auto* from = static_cast<const T*>(values) + b * message.block;
      dequantise_block(error, error_message, WireFormat::int8, b, [&](int64_t i, float value) {
        errors[static_cast<size_t>(i)] = value;
        wanted[static_cast<size_t>(i)] = static_cast<float>(from[i]) + value;
      });
      const float scale =
          quantise_block(bytes, message, format, b, [&](int64_t i) { return at(wanted, i); });
      if (std::isnan(scale)) continue;
      dequantise_block(bytes, message, format, b, [&](int64_t i, float said) {
        errors[static_cast<size_t>(i)] = beta * at(errors, i) + (1 - beta) * (at(wanted, i) - said);
      });
      quantise_block(error, error_message, WireFormat::int8, b,
                     [&](int64_t i) { return at(errors, i); });
    }
  });
}

// `vectors(range)` does whole blocks, unless it returns false; `plain(range)` does any.
template <class Vectors, class Plain>
void run(const Message& message, BlockRange range, Loops loops, const Vectors& vectors,
         const Plain& plain) {
  range.end = std::min(range.end, message.blocks());
  const BlockRange whole{range.begin, std::min(range.end, message.numel / message.block)};
  if (loops == Loops::vectors && whole.begin < whole.end && vectors(whole)) range.begin = whole.end;
  plain(range);
}

Message message_of(const Quantisation& quantisation, int64_t numel) {
  ensure(quantisation.block >= 64 && quantisation.block <= kLargestBlock &&
             quantisation.block % 64 == 0 && numel >= 0,
         "a quantised message of blocks that there are not");
  return {quantisation, numel};
}

Message message_of(const Quantisation& quantisation, int64_t numel, c10::ScalarType dtype) {
  ensure(can_quantise(dtype), "a quantised array of a dtype that has none");
  return message_of(quantisation, numel);
}

}  // namespace

bool can_quantise(c10::ScalarType dtype) {
  using c10::ScalarType;
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

int64_t blocks_of(const Quantisation& quantisation, int64_t numel) {
  return message_of(quantisation, numel).blocks();
}

int64_t wire_bytes(const Quantisation& quantisation, int64_t numel) {
  return message_of(quantisation, numel).bytes();
}

Quantisation feedback_quantisation(const Quantisation& quantisation) {
  return {WireFormat::int8, quantisation.block};
}

void quantise(std::byte* message, const void* values, c10::ScalarType dtype, int64_t numel,
              const Quantisation& quantisation, BlockRange range, Loops loops) {
  const auto parts = message_of(quantisation, numel, dtype);
  const auto format = quantisation.format;
  run(
      parts, range, loops,
      [&](BlockRange whole) {
        return HWY_DYNAMIC_DISPATCH(QuantiseVectors)(message, parts, values, dtype, format, whole);
      },
      [&](BlockRange rest) { quantise_plain(message, parts, values, dtype, format, rest); });
}

void dequantise(void* values, c10::ScalarType dtype, const std::byte* message, int64_t numel,
                const Quantisation& quantisation, BlockRange range, Loops loops) {
  const auto parts = message_of(quantisation, numel, dtype);
  const auto format = quantisation.format;
  run(
      parts, range, loops,
      [&](BlockRange whole) {
        return HWY_DYNAMIC_DISPATCH(DequantiseVectors)(values, dtype, message, parts, format,
                                                       whole);
      },
      [&](BlockRange rest) { dequantise_plain(values, dtype, message, parts, format, rest); });
}

void dequantise_add(float* sum, const std::byte* message, int64_t numel,
                    const Quantisation& quantisation, BlockRange range, Loops loops) {
  const auto parts = message_of(quantisation, numel);
  const auto format = quantisation.format;
  run(
      parts, range, loops,
      [&](BlockRange whole) {
        return HWY_DYNAMIC_DISPATCH(DequantiseAddVectors)(sum, message, parts, format, whole);
      },
      [&](BlockRange rest) { dequantise_add_plain(sum, message, parts, format, rest); });
}

void quantise_with_feedback(std::byte* message, std::byte* error, const void* values,
                            c10::ScalarType dtype, int64_t numel, const Quantisation& quantisation,
                            float beta, BlockRange range, Loops loops) {
  const auto parts = message_of(quantisation, numel, dtype);
  const auto error_message = message_of(feedback_quantisation(quantisation), numel);
  const auto format = quantisation.format;
  run(
      parts, range, loops,
      [&](BlockRange whole) {
        return HWY_DYNAMIC_DISPATCH(FeedbackVectors)(message, parts, error, error_message, values,
                                                     dtype, format, beta, whole);
      },
      [&](BlockRange rest) {
        feedback_plain(message, parts, error, error_message, values, dtype, format, beta, rest);
      });
}

}  // namespace zero::comm
#endif  // HWY_ONCE
