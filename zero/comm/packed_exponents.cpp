#include "zero/comm/packed_exponents.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "zero/base/error.h"

// The vector code below is compiled once for each instruction set; Highway includes this file again
// for each.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/comm/packed_exponents.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

// All instruction sets share this part.
#ifndef ZERO_COMM_PACKED_EXPONENTS_ONCE
#define ZERO_COMM_PACKED_EXPONENTS_ONCE
namespace zero::comm {
namespace {

constexpr int64_t kBlock = kExponentBlock;
constexpr uint32_t kOther = 15;   // the code of an exponent that is written in full
constexpr uint32_t kWindow = 14;  // the number of exponents with codes of their own
constexpr auto kNotPacked = std::byte{255};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Takes an element's bits apart: a sign, 8 bits of exponent, and `kMantissa` more.
template <class Bits>
struct Element {
  static constexpr int kMantissa = sizeof(Bits) == 2 ? 7 : 23;
  static uint32_t exponent(Bits bits) { return bits >> kMantissa & 0xFF; }
  // Returns a byte of the sign and the upper 7 bits of the mantissa.
  static uint8_t upper(Bits bits) {
    constexpr int kBelow = kMantissa - 7;  // the mantissa's lower bits
    return static_cast<uint8_t>((bits >> (8 * sizeof(Bits) - 8) & 0x80) | (bits >> kBelow & 0x7F));
  }
  static Bits join(uint32_t exponent, uint8_t upper, uint16_t lower) {
    constexpr int kBelow = kMantissa - 7;
    auto bits = static_cast<uint32_t>(upper & 0x80U) << (8 * sizeof(Bits) - 8) |
                exponent << kMantissa | static_cast<uint32_t>(upper & 0x7FU) << kBelow;
    if constexpr (sizeof(Bits) == 4) bits |= lower;
    return static_cast<Bits>(bits);
  }
};

// The places of a message's parts.
template <class Bits>
struct Places {
  int64_t numel;

  int64_t blocks() const { return ceil_div(numel, kBlock); }
  int64_t length(int64_t b) const { return std::min(kBlock, numel - b * kBlock); }
  int64_t codes() const { return blocks(); }
  int64_t codes_of(int64_t b) const { return codes() + b * (kBlock / 2); }
  int64_t upper() const {
    const int64_t full = numel / kBlock;
    return codes() + full * (kBlock / 2) + ceil_div(numel - full * kBlock, 2);
  }
  int64_t lower() const { return upper() + numel; }
  int64_t others() const { return lower() + (sizeof(Bits) == 4 ? 2 * numel : 0); }
  int64_t room() const { return ceil_div(numel, 64); }
  int64_t bytes() const { return others() + room(); }
};

uint8_t base_of(uint32_t largest) {
  return static_cast<uint8_t>(largest >= kWindow ? largest - (kWindow - 1) : 1);
}

uint32_t code_of(uint32_t exponent, uint32_t base) {
  if (exponent == 0) return 0;
  return exponent < base ? kOther : exponent - base + 1;
}

// Writes those exponents of a block that have no code, if there is room, and counts them all.
template <class Bits>
int64_t add_others(std::byte* others, int64_t used, int64_t room, const Bits* values,
                   int64_t length, uint32_t base) {
  for (int64_t j = 0; j < length; ++j) {
    const auto exponent = Element<Bits>::exponent(values[j]);
    if (code_of(exponent, base) != kOther) continue;
    if (used < room) others[used] = static_cast<std::byte>(exponent);
    ++used;
  }
  return used;
}

uint32_t code_at(const std::byte* codes, int64_t length, int64_t j) {
  const int64_t half = (length + 1) / 2;
  const auto both = static_cast<uint32_t>(codes[j < half ? j : j - half]);
  return j < half ? both & 0xFU : both >> 4U;
}

template <class Bits>
void pack_block(std::byte* message, const Places<Bits>& at, int64_t b, const Bits* values) {
  const int64_t length = at.length(b);
  uint32_t largest = 0;
  for (int64_t j = 0; j < length; ++j)
    largest = std::max(largest, Element<Bits>::exponent(values[j]));
  const auto base = base_of(largest);
  message[b] = static_cast<std::byte>(base);
  auto* codes = message + at.codes_of(b);
  const int64_t half = (length + 1) / 2;
  const auto code = [&](int64_t j) {
    return j < length ? code_of(Element<Bits>::exponent(values[j]), base) : 0;
  };
  for (int64_t j = 0; j < half; ++j)
    codes[j] = static_cast<std::byte>(code(j) | code(j + half) << 4U);
  for (int64_t j = 0; j < length; ++j) {
    const int64_t i = b * kBlock + j;
    message[at.upper() + i] = static_cast<std::byte>(Element<Bits>::upper(values[j]));
    if constexpr (sizeof(Bits) == 4) {
      const auto lower = static_cast<uint16_t>(values[j]);
      std::memcpy(message + at.lower() + 2 * i, &lower, sizeof(lower));
    }
  }
}

// Unpacks a block. Returns the place of the next exponent in full.
template <class Bits>
const std::byte* unpack_block(Bits* values, const std::byte* message, const Places<Bits>& at,
                              int64_t b, const std::byte* other) {
  const int64_t length = at.length(b);
  const auto base = static_cast<uint32_t>(message[b]);
  const auto* codes = message + at.codes_of(b);
  for (int64_t j = 0; j < length; ++j) {
    const int64_t i = b * kBlock + j;
    const auto code = code_at(codes, length, j);
    const auto exponent = code == 0        ? 0
                          : code == kOther ? static_cast<uint32_t>(*other++)
                                           : base + code - 1;
    uint16_t lower = 0;
    if constexpr (sizeof(Bits) == 4)
      std::memcpy(&lower, message + at.lower() + 2 * i, sizeof(lower));
    values[j] = Element<Bits>::join(exponent, static_cast<uint8_t>(message[at.upper() + i]), lower);
  }
  return other;
}

// Writes the exponents that a whole block has in full; its other bits are there already.
template <class Bits>
const std::byte* put_others(Bits* values, const std::byte* codes, const std::byte* other) {
  for (int64_t j = 0; j < kBlock; ++j) {
    if (code_at(codes, kBlock, j) != kOther) continue;
    constexpr auto kExponent = static_cast<Bits>(Bits{0xFF} << Element<Bits>::kMantissa);
    values[j] = static_cast<Bits>(
        (values[j] & static_cast<Bits>(~kExponent)) |
        static_cast<Bits>(static_cast<uint32_t>(*other++) << Element<Bits>::kMantissa));
  }
  return other;
}

}  // namespace
}  // namespace zero::comm
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::comm::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class Bits>
using Tag = hn::ScalableTag<Bits>;
template <class Bits>
using ByteTag = hn::Rebind<uint8_t, Tag<Bits>>;

template <class Bits>
HWY_INLINE hn::Vec<Tag<Bits>> exponents(hn::Vec<Tag<Bits>> bits) {
  return hn::And(hn::ShiftRight<Element<Bits>::kMantissa>(bits), hn::Set(Tag<Bits>(), 0xFF));
}

template <class Bits>
HWY_INLINE hn::Vec<Tag<Bits>> codes(hn::Vec<Tag<Bits>> exponent, hn::Vec<Tag<Bits>> base) {
  const Tag<Bits> d;
  const auto zero = hn::Zero(d);
  const auto above = hn::Add(hn::Sub(exponent, base), hn::Set(d, 1));
  const auto code = hn::IfThenElse(hn::Lt(exponent, base), hn::Set(d, kOther), above);
  return hn::IfThenElse(hn::Eq(exponent, zero), zero, code);
}

// Stores the lower byte of each lane.
template <class Bits>
HWY_INLINE void store_bytes(hn::Vec<Tag<Bits>> values, std::byte* to) {
  const ByteTag<Bits> bytes;
  hn::StoreU(hn::TruncateTo(bytes, values), bytes, reinterpret_cast<uint8_t*>(to));
}

template <class Bits>
HWY_INLINE hn::Vec<Tag<Bits>> load_bytes(const std::byte* from) {
  const ByteTag<Bits> bytes;
  return hn::PromoteTo(Tag<Bits>(), hn::LoadU(bytes, reinterpret_cast<const uint8_t*>(from)));
}

// Stores sign and mantissa of the elements from `i` on.
template <class Bits>
HWY_INLINE void store_mantissas(hn::Vec<Tag<Bits>> bits, std::byte* message, const Places<Bits>& at,
                                int64_t i) {
  const Tag<Bits> d;
  constexpr int kBelow = Element<Bits>::kMantissa - 7;
  const auto sign = hn::And(hn::ShiftRight<8 * sizeof(Bits) - 8>(bits), hn::Set(d, 0x80));
  const auto upper = hn::And(hn::ShiftRight<kBelow>(bits), hn::Set(d, 0x7F));
  store_bytes<Bits>(hn::Or(sign, upper), message + at.upper() + i);
  if constexpr (sizeof(Bits) == 4) {
    const hn::Rebind<uint16_t, Tag<Bits>> halves;
    HWY_ALIGN uint16_t lower[hn::MaxLanes(halves)];
    hn::Store(hn::TruncateTo(halves, bits), halves, lower);
    std::memcpy(message + at.lower() + 2 * i, lower, 2 * hn::Lanes(d));
  }
}

template <class Bits>
HWY_INLINE hn::Vec<Tag<Bits>> load_elements(hn::Vec<Tag<Bits>> code, hn::Vec<Tag<Bits>> below_base,
                                            const std::byte* message, const Places<Bits>& at,
                                            int64_t i) {
  const Tag<Bits> d;
  constexpr int kMantissa = Element<Bits>::kMantissa;
  const auto zero = hn::Zero(d);
  // The exponents with code 15 are put in later. With the base of infinities this code counts as
  // 256, which must not reach the sign.
  const auto counted = hn::And(hn::Add(code, below_base), hn::Set(d, 0xFF));
  const auto exponent = hn::IfThenElse(hn::Eq(code, zero), zero, counted);
  const auto both = load_bytes<Bits>(message + at.upper() + i);
  const auto sign = hn::ShiftLeft<8 * sizeof(Bits) - 8>(hn::And(both, hn::Set(d, 0x80)));
  auto mantissa = hn::ShiftLeft<kMantissa - 7>(hn::And(both, hn::Set(d, 0x7F)));
  if constexpr (sizeof(Bits) == 4) {
    const hn::Rebind<uint16_t, Tag<Bits>> halves;
    HWY_ALIGN uint16_t lower[hn::MaxLanes(halves)];
    std::memcpy(lower, message + at.lower() + 2 * i, 2 * hn::Lanes(d));
    mantissa = hn::Or(mantissa, hn::PromoteTo(d, hn::Load(halves, lower)));
  }
  return hn::Or(sign, hn::Or(hn::ShiftLeft<kMantissa>(exponent), mantissa));
}

// Packs whole blocks and returns how many. Counts all exponents in full in `used`, and writes those
// that have room.
template <class Bits>
int64_t pack_blocks(std::byte* message, const Bits* values, int64_t numel, int64_t& used) {
  const Tag<Bits> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Places<Bits> at{numel};
  constexpr int64_t kHalf = kBlock / 2;
  if (kHalf % lanes != 0) return 0;
  const int64_t blocks = numel / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    const Bits* in = values + b * kBlock;
    auto most = hn::Zero(d);
    for (int64_t j = 0; j < kBlock; j += lanes)
      most = hn::Max(most, exponents<Bits>(hn::LoadU(d, in + j)));
    const auto base = base_of(static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(d, most))));
    message[b] = static_cast<std::byte>(base);
    const auto bases = hn::Set(d, static_cast<Bits>(base));
    auto* out = message + at.codes_of(b);
    auto greatest = hn::Zero(d);
    for (int64_t j = 0; j < kHalf; j += lanes) {
      const auto first = hn::LoadU(d, in + j);
      const auto second = hn::LoadU(d, in + j + kHalf);
      const auto code = codes<Bits>(exponents<Bits>(first), bases);
      const auto code_second = codes<Bits>(exponents<Bits>(second), bases);
      greatest = hn::Max(greatest, hn::Max(code, code_second));
      store_bytes<Bits>(hn::Or(code, hn::ShiftLeft<4>(code_second)), out + j);
      store_mantissas<Bits>(first, message, at, b * kBlock + j);
      store_mantissas<Bits>(second, message, at, b * kBlock + j + kHalf);
    }
    if (hn::GetLane(hn::MaxOfLanes(d, greatest)) == kOther)
      used = add_others(message + at.others(), used, at.room(), in, kBlock, base);
  }
  return blocks;
}

// Unpacks whole blocks and returns how many; `other` is the next of the exponents in full.
template <class Bits>
int64_t unpack_blocks(Bits* values, const std::byte* message, int64_t numel,
                      const std::byte*& other) {
  const Tag<Bits> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Places<Bits> at{numel};
  constexpr int64_t kHalf = kBlock / 2;
  if (kHalf % lanes != 0) return 0;
  const int64_t blocks = numel / kBlock;
  const auto low = hn::Set(d, 0xF);
  for (int64_t b = 0; b < blocks; ++b) {
    Bits* out = values + b * kBlock;
    const auto* in = message + at.codes_of(b);
    const auto below_base = hn::Set(d, static_cast<Bits>(static_cast<uint32_t>(message[b]) - 1));
    auto greatest = hn::Zero(d);
    for (int64_t j = 0; j < kHalf; j += lanes) {
      const auto both = load_bytes<Bits>(in + j);
      const auto first = hn::And(both, low);
      const auto second = hn::ShiftRight<4>(both);
      greatest = hn::Max(greatest, hn::Max(first, second));
      hn::StoreU(load_elements<Bits>(first, below_base, message, at, b * kBlock + j), d, out + j);
      hn::StoreU(load_elements<Bits>(second, below_base, message, at, b * kBlock + j + kHalf), d,
                 out + j + kHalf);
    }
    if (hn::GetLane(hn::MaxOfLanes(d, greatest)) == kOther) other = put_others(out, in, other);
  }
  return blocks;
}

int64_t PackBlocks16(std::byte* message, const uint16_t* values, int64_t numel, int64_t& used) {
  return pack_blocks<uint16_t>(message, values, numel, used);
}
int64_t PackBlocks32(std::byte* message, const uint32_t* values, int64_t numel, int64_t& used) {
  return pack_blocks<uint32_t>(message, values, numel, used);
}
int64_t UnpackBlocks16(uint16_t* values, const std::byte* message, int64_t numel,
                       const std::byte*& other) {
  return unpack_blocks<uint16_t>(values, message, numel, other);
}
int64_t UnpackBlocks32(uint32_t* values, const std::byte* message, int64_t numel,
                       const std::byte*& other) {
  return unpack_blocks<uint32_t>(values, message, numel, other);
}

}  // namespace zero::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::comm {
namespace {

HWY_EXPORT(PackBlocks16);
HWY_EXPORT(PackBlocks32);
HWY_EXPORT(UnpackBlocks16);
HWY_EXPORT(UnpackBlocks32);

int64_t vector_pack(std::byte* message, const uint16_t* values, int64_t numel, int64_t& used) {
  return HWY_DYNAMIC_DISPATCH(PackBlocks16)(message, values, numel, used);
}
int64_t vector_pack(std::byte* message, const uint32_t* values, int64_t numel, int64_t& used) {
  return HWY_DYNAMIC_DISPATCH(PackBlocks32)(message, values, numel, used);
}
int64_t vector_unpack(uint16_t* values, const std::byte* message, int64_t numel,
                      const std::byte*& other) {
  return HWY_DYNAMIC_DISPATCH(UnpackBlocks16)(values, message, numel, other);
}
int64_t vector_unpack(uint32_t* values, const std::byte* message, int64_t numel,
                      const std::byte*& other) {
  return HWY_DYNAMIC_DISPATCH(UnpackBlocks32)(values, message, numel, other);
}

// Returns how many bytes of the values fit behind the first byte of a message that is not packed.
int64_t whole_bytes(int64_t message_bytes, int64_t value_bytes) {
  return std::min(message_bytes - 1, value_bytes);
}

template <class Bits>
bool pack_as(std::byte* message, const void* from, int64_t numel, bool plainly) {
  const Places<Bits> at{numel};
  const auto* values = static_cast<const Bits*>(from);
  int64_t used = 0;
  int64_t b = plainly ? 0 : vector_pack(message, values, numel, used);
  for (; b < at.blocks(); ++b) {
    const auto* in = values + b * kBlock;
    pack_block(message, at, b, in);
    used = add_others(message + at.others(), used, at.room(), in, at.length(b),
                      static_cast<uint32_t>(message[b]));
  }
  if (used <= at.room()) return true;
  message[0] = kNotPacked;
  std::memcpy(
      message + 1, from,
      static_cast<size_t>(whole_bytes(at.bytes(), numel * static_cast<int64_t>(sizeof(Bits)))));
  return false;
}

template <class Bits>
void unpack_as(void* to, const std::byte* message, int64_t numel, bool plainly) {
  const Places<Bits> at{numel};
  if (!is_packed(message, numel)) {
    std::memcpy(
        to, message + 1,
        static_cast<size_t>(whole_bytes(at.bytes(), numel * static_cast<int64_t>(sizeof(Bits)))));
    return;
  }
  auto* values = static_cast<Bits*>(to);
  const auto* other = message + at.others();
  int64_t b = plainly ? 0 : vector_unpack(values, message, numel, other);
  for (; b < at.blocks(); ++b) other = unpack_block(values + b * kBlock, message, at, b, other);
}

bool is_float(c10::ScalarType dtype) {
  ensure(can_pack_exponents(dtype), "exponents of a dtype that are not packed");
  return dtype == c10::ScalarType::Float;
}

}  // namespace

bool can_pack_exponents(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Float;
}

int64_t packed_bytes(c10::ScalarType dtype, int64_t numel) {
  return is_float(dtype) ? Places<uint32_t>{numel}.bytes() : Places<uint16_t>{numel}.bytes();
}

int64_t rest_bytes(c10::ScalarType dtype, int64_t numel) {
  const int64_t all = numel * static_cast<int64_t>(c10::elementSize(dtype));
  return all - whole_bytes(packed_bytes(dtype, numel), all);
}

bool pack_exponents(std::byte* message, const void* values, c10::ScalarType dtype, int64_t numel,
                    bool plainly) {
  return is_float(dtype) ? pack_as<uint32_t>(message, values, numel, plainly)
                         : pack_as<uint16_t>(message, values, numel, plainly);
}

bool is_packed(const std::byte* message, int64_t numel) {
  return numel == 0 || message[0] != kNotPacked;
}

void unpack_exponents(void* values, c10::ScalarType dtype, const std::byte* message, int64_t numel,
                      bool plainly) {
  is_float(dtype) ? unpack_as<uint32_t>(values, message, numel, plainly)
                  : unpack_as<uint16_t>(values, message, numel, plainly);
}

}  // namespace zero::comm
#endif
