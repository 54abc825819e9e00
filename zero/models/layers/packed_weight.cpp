#include "zero/models/layers/packed_weight.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Float8_e4m3fn.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "zero/base/error.h"
#include "zero/models/layers/initial_values.h"
#include "zero/optim/nf4.h"

namespace zero {
namespace {

void check_packed(const at::Tensor& packed, BaseFormat format, int64_t rows, int64_t columns) {
  const int64_t bytes = optim::packed_bytes(format, rows * columns);
  if (packed.scalar_type() == at::kByte && packed.dim() == 1 && packed.numel() == bytes) return;
  throw ConfigError(fmt::format(
      "A matrix of {} by {} numbers in {} is a vector of {} bytes (Byte), but the given tensor "
      "has {} elements of {}. Make it by zero::packed_weight.",
      rows, columns, name_of(format), bytes, packed.numel(), c10::toString(packed.scalar_type())));
}

at::Tensor unpacked_on_cpu(const at::Tensor& packed, c10::string_view format, int64_t rows,
                           int64_t columns, at::ScalarType dtype) {
  auto values = at::empty({rows, columns}, packed.options().dtype(dtype));
  optim::unpack(packed_format(format), static_cast<const std::byte*>(packed.const_data_ptr()),
                values.numel(), values.mutable_data_ptr(), dtype);
  return values;
}

at::Tensor unpacked_on_meta(const at::Tensor& packed, c10::string_view /*format*/, int64_t rows,
                            int64_t columns, at::ScalarType dtype) {
  return at::empty({rows, columns}, packed.options().dtype(dtype));
}

at::Tensor unpacked_elsewhere(const at::Tensor& packed, c10::string_view format, int64_t rows,
                              int64_t columns, at::ScalarType dtype) {
  return unpacked_weight_reference(packed, packed_format(format), rows, columns, dtype);
}

/// Returns the numbers that 256 codes of fp8 mean.
at::Tensor numbers_of_fp8(const at::TensorOptions& options) {
  auto table = at::empty({256}, at::kFloat);
  for (int64_t code = 0; code < 256; ++code) {
    table.mutable_data_ptr<float>()[code] =
        c10::Float8_e4m3fn(static_cast<uint8_t>(code), c10::Float8_e4m3fn::from_bits());
  }
  return table.to(options.dtype(at::kFloat));
}

at::Tensor picked_from(const at::Tensor& table, const at::Tensor& codes) {
  return table.index_select(0, codes.reshape({-1}).to(at::kInt));
}

/// Returns the numbers of a matrix in INT8, by blocks; the last may have numbers beyond its end.
at::Tensor int8_blocks(const at::Tensor& packed, int64_t numel) {
  const int64_t scale_bytes = packed.numel() - numel;
  const auto scales = packed.narrow(0, 0, scale_bytes).view(at::kFloat);
  auto numbers = at::empty({scales.numel(), optim::kInt8Block}, scales.options());
  numbers.view({-1})
      .narrow(0, 0, numel)
      .copy_(packed.narrow(0, scale_bytes, numel).view(at::kChar));
  return numbers.mul_(scales.unsqueeze(1));
}

/// Returns those of a matrix in NF4.
at::Tensor nf4_blocks(const at::Tensor& packed, int64_t numel) {
  constexpr int64_t kScalesOfOne = optim::kNf4ScaleBlock;
  const int64_t blocks = optim::nf4_blocks(numel);
  const int64_t second = (blocks + kScalesOfOne - 1) / kScalesOfOne;
  int64_t at = 0;
  const auto next = [&](int64_t bytes) {
    const auto part = packed.narrow(0, at, bytes);
    at += bytes;
    return part;
  };
  const auto codes = next(optim::nf4_code_bytes(numel));
  const auto mean = next(4).view(at::kFloat);
  const auto second_scales = next(4 * second).view(at::kFloat);
  const auto scales = picked_from(numbers_of_fp8(packed.options()), next(blocks))
                          .mul(second_scales.repeat_interleave(kScalesOfOne).narrow(0, 0, blocks))
                          .add(mean);
  const auto table = at::tensor(at::ArrayRef<float>(optim::kNf4Values.data(), 16))
                         .to(packed.options().dtype(at::kFloat));
  const auto both = at::stack({codes.bitwise_right_shift(4), codes.bitwise_and(0xF)}, 1);
  return picked_from(table, both).view({blocks, optim::kNf4Block}).mul_(scales.unsqueeze(1));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero, library) {
  library.def(
      "unpacked_weight(Tensor packed, str format, int rows, int columns, ScalarType dtype) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(zero, CPU, library) { library.impl("unpacked_weight", &unpacked_on_cpu); }
TORCH_LIBRARY_IMPL(zero, Meta, library) { library.impl("unpacked_weight", &unpacked_on_meta); }
TORCH_LIBRARY_IMPL(zero, CompositeExplicitAutograd, library) {
  library.impl("unpacked_weight", &unpacked_elsewhere);
}

at::Tensor packed_weight(const at::Tensor& values, BaseFormat format) {
  const int64_t bytes = optim::packed_bytes(format, values.numel());
  if (has_absent_values(values)) return absent_values({bytes}, at::kByte);
  const auto dense = values.detach().contiguous().to(at::kFloat);
  auto packed = at::empty({bytes}, at::kByte);
  optim::pack(format, dense.const_data_ptr<float>(), dense.numel(),
              static_cast<std::byte*>(packed.mutable_data_ptr()));
  return packed;
}

at::Tensor unpacked_weight(const at::Tensor& packed, BaseFormat format, int64_t rows,
                           int64_t columns, at::ScalarType dtype) {
  check_packed(packed, format, rows, columns);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zero::unpacked_weight", "")
                             .typed<at::Tensor(const at::Tensor&, c10::string_view, int64_t,
                                               int64_t, at::ScalarType)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return op.call(packed, name_of(format), rows, columns, dtype);
}

at::Tensor unpacked_weight_reference(const at::Tensor& packed, BaseFormat format, int64_t rows,
                                     int64_t columns, at::ScalarType dtype) {
  const int64_t numel = rows * columns;
  const auto blocks =
      format == BaseFormat::nf4 ? nf4_blocks(packed, numel) : int8_blocks(packed, numel);
  return blocks.view({-1}).narrow(0, 0, numel).to(dtype).view({rows, columns});
}

}  // namespace zero
