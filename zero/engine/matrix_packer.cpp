#include "zero/engine/matrix_packer.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "zero/optim/nf4.h"

namespace zero {

using optim::kInt8Block;
using partition::Range;

namespace {

constexpr int64_t kPiece = int64_t{1} << 22;  // elements that are read at a time
static_assert(kPiece % optim::kNf4Block == 0 && kPiece % kInt8Block == 0);

/// The bytes of a range, which are made in other stretches.
class Window {
 public:
  explicit Window(Range range) : range_(range), bytes_(at::empty({range.size()}, at::kByte)) {}

  /// Takes the bytes of the matrix from `first` on, as far as the range has them.
  void put(int64_t first, const at::Tensor& made) const {
    const auto part = partition::intersect(range_, {first, first + made.numel()});
    if (part.empty()) return;
    bytes_.narrow(0, part.begin - range_.begin, part.size())
        .copy_(made.narrow(0, part.begin - first, part.size()));
  }
  const at::Tensor& bytes() const { return bytes_; }

 private:
  Range range_;
  at::Tensor bytes_;
};

std::byte* bytes_of(at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

}  // namespace

MatrixPacker::MatrixPacker(BaseFormat format, int64_t numel, Read read)
    : format_(format), numel_(numel), read_(std::move(read)) {}

at::Tensor MatrixPacker::bytes(Range range) {
  return format_ == BaseFormat::nf4 ? nf4(range) : int8(range);
}

template <class Take>
void MatrixPacker::for_each_piece(Range elements, const Take& take) const {
  for (int64_t begin = elements.begin; begin < elements.end; begin += kPiece) {
    const int64_t count = std::min(kPiece, elements.end - begin);
    take(begin, read_(begin, count).to(at::kFloat).contiguous());
  }
}

at::Tensor MatrixPacker::int8(Range range) const {
  const int64_t scale_bytes = optim::packed_bytes(format_, numel_) - numel_;
  const Window window(range);
  const auto make = [&](Range elements) {
    for_each_piece(elements, [&](int64_t begin, const at::Tensor& values) {
      const int64_t count = values.numel();
      auto made = at::empty({optim::packed_bytes(format_, count)}, at::kByte);
      optim::pack(format_, values.const_data_ptr<float>(), count, bytes_of(made));
      const int64_t scales = made.numel() - count;
      window.put(begin / kInt8Block * 4, made.narrow(0, 0, scales));
      window.put(scale_bytes + begin, made.narrow(0, scales, count));
    });
  };
  // Returns the elements of whole blocks.
  const auto blocks = [&](int64_t first, int64_t last) {
    return Range{std::min(first * kInt8Block, numel_), std::min(last * kInt8Block, numel_)};
  };
  const auto codes = partition::intersect(range, {scale_bytes, scale_bytes + numel_});
  const auto coded = codes.empty() ? Range{}
                                   : blocks((codes.begin - scale_bytes) / kInt8Block,
                                            at::ceil_div(codes.end - scale_bytes, kInt8Block));
  make(coded);
  const auto scales = partition::intersect(range, {0, scale_bytes});
  if (scales.empty()) return window.bytes();
  const auto scaled = blocks(scales.begin / 4, at::ceil_div(scales.end, int64_t{4}));
  // Another range has the codes of these blocks.
  make({scaled.begin, std::min(scaled.end, coded.begin)});
  make({std::max(scaled.begin, coded.end), scaled.end});
  return window.bytes();
}

at::Tensor MatrixPacker::nf4(Range range) {
  const Range codes{0, optim::nf4_code_bytes(numel_)};
  const Window window(range);
  const auto mine = partition::intersect(range, codes);
  if (!mine.empty()) {
    const int64_t first = mine.begin / optim::kNf4BlockBytes;
    const int64_t last = at::ceil_div(mine.end, optim::kNf4BlockBytes);
    const Range elements{first * optim::kNf4Block, std::min(last * optim::kNf4Block, numel_)};
    for_each_piece(elements, [&](int64_t begin, const at::Tensor& values) {
      auto made = at::empty({optim::nf4_code_bytes(values.numel())}, at::kByte);
      optim::nf4_encode(values.const_data_ptr<float>(), values.numel(), bytes_of(made));
      window.put(optim::nf4_code_bytes(begin), made);
    });
  }
  if (range.end > codes.end) window.put(codes.end, nf4_constants());
  return window.bytes();
}

// Several ranges may ask for these.
const at::Tensor& MatrixPacker::nf4_constants() {
  if (constants_.defined()) return constants_;
  const auto scales = at::empty({optim::nf4_blocks(numel_)}, at::kFloat);
  for_each_piece({0, numel_}, [&](int64_t begin, const at::Tensor& values) {
    optim::nf4_scales(values.const_data_ptr<float>(), values.numel(),
                      scales.mutable_data_ptr<float>() + begin / optim::kNf4Block);
  });
  auto made = at::empty({optim::nf4_bytes(numel_) - optim::nf4_code_bytes(numel_)}, at::kByte);
  optim::nf4_encode_scales(scales.const_data_ptr<float>(), scales.numel(), bytes_of(made));
  constants_ = made;
  return constants_;
}

}  // namespace zero
