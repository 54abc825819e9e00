#include "zero/optim/base_format.h"

#include <fmt/format.h>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/comm/quantise_kernels.h"
#include "zero/optim/nf4.h"

namespace zero {

std::string_view name_of(BaseFormat format) {
  for (const auto& [name, each] : kBaseFormats) {
    if (each == format) return name;
  }
  ensure(false, "a format of frozen weights has a name");
  return {};
}

BaseFormat packed_format(std::string_view name) {
  for (const auto& [each, format] : kBaseFormats) {
    if (each == name && format != BaseFormat::as_they_are) return format;
  }
  throw ConfigError(
      fmt::format("There is no format of quantised weights named '{}'. Give nf4 or int8.", name));
}

namespace optim {
namespace {

constexpr comm::Quantisation kInt8{comm::WireFormat::int8, kInt8Block};
constexpr int64_t kInt8Grain = 512;  // blocks

/// Calls work(range of blocks) on LibTorch's intra-op threads.
template <class Work>
void for_each_range(int64_t numel, const Work& work) {
  parallel_for(0, comm::blocks_of(kInt8, numel), kInt8Grain, [&](int64_t begin, int64_t end) {
    work(comm::BlockRange{begin, end});
  });
}

void check_packs(BaseFormat format) {
  ensure(format != BaseFormat::as_they_are, "the format packs weights");
}

}  // namespace

int64_t packed_bytes(BaseFormat format, int64_t numel) {
  check_packs(format);
  return format == BaseFormat::nf4 ? nf4_bytes(numel) : comm::wire_bytes(kInt8, numel);
}

void pack(BaseFormat format, const float* values, int64_t numel, std::byte* packed) {
  check_packs(format);
  if (format == BaseFormat::nf4) return nf4_quantise(values, numel, packed);
  for_each_range(numel, [&](comm::BlockRange range) {
    comm::quantise(packed, values, c10::ScalarType::Float, numel, kInt8, range);
  });
}

void unpack(BaseFormat format, const std::byte* packed, int64_t numel, void* values,
            c10::ScalarType dtype) {
  check_packs(format);
  if (format == BaseFormat::nf4) return nf4_dequantise(packed, numel, values, dtype);
  for_each_range(numel, [&](comm::BlockRange range) {
    comm::dequantise(values, dtype, packed, numel, kInt8, range);
  });
}

void unpack_reference(BaseFormat format, const std::byte* packed, int64_t numel, void* values,
                      c10::ScalarType dtype) {
  check_packs(format);
  if (format == BaseFormat::nf4) return nf4_dequantise_reference(packed, numel, values, dtype);
  comm::dequantise(values, dtype, packed, numel, kInt8, {}, comm::Loops::plain);
}

}  // namespace optim
}  // namespace zero
