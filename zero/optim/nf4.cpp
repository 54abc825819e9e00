#include "zero/optim/nf4.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/comm/quantise_kernels.h"
#include "zero/optim/nf4_kernel.h"

namespace zero::optim {
namespace {

constexpr int64_t kNf4Grain = 1024;
constexpr comm::Quantisation kScales{comm::WireFormat::fp8, kNf4ScaleBlock};
constexpr int64_t kOffsetBytes = 4;

using Scales = std::array<float, kNf4ScaleBlock>;

/// Reads the bytes behind the codes.
struct Constants {
  Constants(const std::byte* packed, int64_t numel)
      : at(packed + nf4_code_bytes(numel)), blocks(nf4_blocks(numel)) {
    std::memcpy(&offset, at, sizeof(offset));
  }
  int64_t second() const { return (blocks + kNf4ScaleBlock - 1) / kNf4ScaleBlock; }

  /// Writes the scales of the blocks that share second scale number `index`. Returns how many.
  int64_t read(int64_t index, Scales& scales, comm::Loops loops = comm::Loops::vectors) const {
    const int64_t first = index * kNf4ScaleBlock;
    const int64_t count = std::min(kNf4ScaleBlock, blocks - first);
    // These make a message of their own.
    std::array<std::byte, 4 + kNf4ScaleBlock> message;
    const auto* all = at + kOffsetBytes;
    std::memcpy(message.data(), all + 4 * index, 4);
    std::memcpy(message.data() + 4, all + 4 * second() + first, static_cast<size_t>(count));
    comm::dequantise(scales.data(), c10::ScalarType::Float, message.data(), count, kScales, {},
                     loops);
    for (int64_t b = 0; b < count; ++b) scales[static_cast<size_t>(b)] += offset;
    return count;
  }

  const std::byte* at;
  int64_t blocks;
  float offset = 0;
};

/// Returns the greatest fp32 number that is not above `bound`: a number in fp32 is above both or
/// above neither.
float floor_of(double bound) {
  const auto nearest = static_cast<float>(bound);
  if (static_cast<double>(nearest) <= bound) return nearest;
  return std::nextafter(nearest, -std::numeric_limits<float>::infinity());
}

/// Writes the constants of scales, from which `offset` is taken away. Returns the sum of the
/// squares of their relative errors.
double encode_scales(const float* scales, int64_t blocks, float offset, std::byte* constants) {
  std::memcpy(constants, &offset, sizeof(offset));
  const auto rest = std::make_unique<float[]>(static_cast<size_t>(blocks));
  for (int64_t b = 0; b < blocks; ++b) rest[static_cast<size_t>(b)] = scales[b] - offset;
  auto* message = constants + kOffsetBytes;
  comm::quantise(message, rest.get(), c10::ScalarType::Float, blocks, kScales);
  comm::dequantise(rest.get(), c10::ScalarType::Float, message, blocks, kScales);
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (scales[b] == 0) continue;
    const float read = rest[static_cast<size_t>(b)] + offset;
    const double error = (static_cast<double>(read) - scales[b]) / scales[b];
    sum += error * error;
  }
  return sum;
}

float scale_of(const float* values, int64_t count) {
  uint32_t greatest = 0;  // of bits: NaN is above infinity, which is above all numbers
  for (int64_t i = 0; i < count; ++i)
    greatest = std::max(greatest, std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFU);
  return std::bit_cast<float>(greatest);
}

/// Writes the codes of a block.
void encode_block(const float* values, int64_t count, std::byte* codes) {
  std::array<float, kNf4Block> block{};
  std::copy_n(values, count, block.begin());
  const double scale = scale_of(values, count);
  std::array<int32_t, kNf4Block> numbers{};
  if (!(scale > 0)) numbers.fill(kNf4Zero);
  for (size_t k = 0; k + 1 < kNf4Values.size() && scale > 0; ++k) {
    // The middle between two values, and its product with the scale, are exact in double.
    const double middle = (static_cast<double>(kNf4Values[k]) + kNf4Values[k + 1]) / 2;
    const float bound = floor_of(middle * scale);
    for (size_t i = 0; i < block.size(); ++i) numbers[i] += block[i] > bound ? 1 : 0;
  }
  for (size_t i = 0; i < static_cast<size_t>(kNf4BlockBytes); ++i)
    codes[i] = static_cast<std::byte>(numbers[2 * i] << 4 | numbers[2 * i + 1]);
}

/// Calls work(block, first element, number of elements) on LibTorch's intra-op threads.
template <class Work>
void for_each_block(int64_t count, const Work& work) {
  parallel_for(0, nf4_blocks(count), kNf4Grain, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b)
      work(b, b * kNf4Block, std::min(kNf4Block, count - b * kNf4Block));
  });
}

kernels::Nf4Target target_of(c10::ScalarType dtype) {
  ensure(dtype == c10::ScalarType::Float || dtype == c10::ScalarType::BFloat16 ||
             dtype == c10::ScalarType::Half,
         "NF4 is read in fp32, bf16 or fp16");
  return dtype == c10::ScalarType::Float      ? kernels::Nf4Target::fp32
         : dtype == c10::ScalarType::BFloat16 ? kernels::Nf4Target::bf16
                                              : kernels::Nf4Target::fp16;
}

template <class Number>
void dequantise_plainly(const std::byte* packed, int64_t numel, Number* values) {
  const Constants constants(packed, numel);
  Scales scales;
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t block = i / kNf4Block;
    if (i % (kNf4Block * kNf4ScaleBlock) == 0)
      constants.read(block / kNf4ScaleBlock, scales, comm::Loops::plain);
    const auto both = static_cast<uint8_t>(packed[i / 2]);
    const float value = kNf4Values[i % 2 == 0 ? both >> 4 : both & 0xF];
    values[i] = static_cast<Number>(value * scales[static_cast<size_t>(block % kNf4ScaleBlock)]);
  }
}

}  // namespace

void nf4_encode(const float* values, int64_t count, std::byte* codes) {
  for_each_block(count, [&](int64_t block, int64_t first, int64_t elements) {
    encode_block(values + first, elements, codes + block * kNf4BlockBytes);
  });
}

void nf4_scales(const float* values, int64_t count, float* scales) {
  for_each_block(count, [&](int64_t block, int64_t first, int64_t elements) {
    scales[block] = scale_of(values + first, elements);
  });
}

void nf4_encode_scales(const float* scales, int64_t blocks, std::byte* constants) {
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += scales[b];
  const auto mean = static_cast<float>(blocks > 0 ? sum / static_cast<double>(blocks) : 0);
  const double with_mean = encode_scales(scales, blocks, mean, constants);
  const auto bytes = static_cast<size_t>(kOffsetBytes + comm::wire_bytes(kScales, blocks));
  const auto plain = std::make_unique<std::byte[]>(bytes);
  // Both sums are NaN where a scale is, so that the mean stays, which is NaN too.
  if (encode_scales(scales, blocks, 0, plain.get()) < with_mean)
    std::memcpy(constants, plain.get(), bytes);
}

void nf4_quantise(const float* values, int64_t numel, std::byte* packed) {
  const int64_t blocks = nf4_blocks(numel);
  const auto scales = std::make_unique<float[]>(static_cast<size_t>(blocks));
  nf4_encode(values, numel, packed);
  nf4_scales(values, numel, scales.get());
  nf4_encode_scales(scales.get(), blocks, packed + nf4_code_bytes(numel));
}

void nf4_dequantise(const std::byte* packed, int64_t numel, void* values, c10::ScalarType dtype) {
  const auto target = target_of(dtype);
  const Constants constants(packed, numel);
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const auto* codes = reinterpret_cast<const uint8_t*>(packed);
  auto* out = static_cast<std::byte*>(values);
  parallel_for(0, constants.second(), kNf4Grain / kNf4ScaleBlock, [&](int64_t begin, int64_t end) {
    Scales scales;
    for (int64_t second = begin; second < end; ++second) {
      const int64_t count = constants.read(second, scales);
      const int64_t first = second * kNf4ScaleBlock;
      const int64_t whole = std::min(count, numel / kNf4Block - first);  // the last may be a part
      const auto* from = codes + first * kNf4BlockBytes;
      auto* to = out + first * kNf4Block * element_bytes;
      kernels::nf4_decode(from, scales.data(), whole, to, target);
      if (whole == count) continue;
      std::array<std::byte, 4 * kNf4Block> last;
      kernels::nf4_decode(from + whole * kNf4BlockBytes, scales.data() + whole, 1, last.data(),
                          target);
      std::memcpy(to + whole * kNf4Block * element_bytes, last.data(),
                  static_cast<size_t>(numel % kNf4Block * element_bytes));
    }
  });
}

void nf4_dequantise_reference(const std::byte* packed, int64_t numel, void* values,
                              c10::ScalarType dtype) {
  switch (target_of(dtype)) {
    case kernels::Nf4Target::fp32:
      return dequantise_plainly(packed, numel, static_cast<float*>(values));
    case kernels::Nf4Target::bf16:
      return dequantise_plainly(packed, numel, static_cast<c10::BFloat16*>(values));
    case kernels::Nf4Target::fp16:
      return dequantise_plainly(packed, numel, static_cast<c10::Half*>(values));
  }
}

}  // namespace zero::optim
