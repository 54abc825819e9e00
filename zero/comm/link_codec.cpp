#include "zero/comm/link_codec.h"

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "zero/comm/array_views.h"
#include "zero/comm/reduce_kernels.h"

namespace zero::comm {
namespace {

constexpr int64_t kThreadGrain = int64_t{1} << 18;  // bytes that are worth a thread

class RawCodec final : public Codec {
 public:
  explicit RawCodec(at::ScalarType dtype) : Codec(dtype, width_of(dtype), 1) {}
  int64_t message_bytes(int64_t numel) const override { return numel * width_of(dtype()); }
  bool is_raw() const override { return true; }
  std::span<const std::byte> pack(std::byte* message, const at::Tensor& values,
                                  const std::optional<SumMessage>& /*of*/) const override {
    copy_to(message, values);
    return {};
  }
  std::span<std::byte> unpack(const at::Tensor& values, const std::byte* message) const override {
    copy_bytes(bytes_of(values), message, message_bytes(values.numel()));
    return {};
  }
};

class ExponentCodec final : public Codec {
 public:
  explicit ExponentCodec(at::ScalarType dtype) : Codec(dtype, width_of(dtype), kExponentBlock) {}
  int64_t message_bytes(int64_t numel) const override { return packed_bytes(dtype(), numel); }
  std::span<const std::byte> pack(std::byte* message, const at::Tensor& values,
                                  const std::optional<SumMessage>& /*of*/) const override {
    const bool fits = pack_exponents(message, values.data_ptr(), dtype(), values.numel());
    return rest_of(values, fits);
  }
  std::span<std::byte> unpack(const at::Tensor& values, const std::byte* message) const override {
    unpack_exponents(bytes_of(values), dtype(), message, values.numel());
    return rest_of(values, is_packed(message, values.numel()));
  }
  bool adds_messages() const override { return false; }

 private:
  std::span<std::byte> rest_of(const at::Tensor& values, bool fits) const {
    if (fits) return {};
    return span_of(values).last(static_cast<size_t>(rest_bytes(dtype(), values.numel())));
  }
};

class QuantisedCodec final : public Codec {
 public:
  QuantisedCodec(at::ScalarType dtype, const LinkWire& wire)
      : Codec(dtype, width_of(at::kFloat), wire.quantisation.block), wire_(wire) {}
  int64_t message_bytes(int64_t numel) const override {
    return wire_bytes(wire_.quantisation, numel);
  }

  std::span<const std::byte> pack(std::byte* message, const at::Tensor& values,
                                  const std::optional<SumMessage>& of) const override {
    auto* const error = of && wire_.error.defined() ? error_of(*of) : nullptr;
    by_blocks(values.numel(), [&](BlockRange range) {
      if (error == nullptr) {
        quantise(message, values.data_ptr(), dtype(), values.numel(), wire_.quantisation, range);
      } else {
        quantise_with_feedback(message, error, values.data_ptr(), dtype(), values.numel(),
                               wire_.quantisation, wire_.beta, range);
      }
    });
    return {};
  }

  std::span<std::byte> unpack(const at::Tensor& values, const std::byte* message) const override {
    by_blocks(values.numel(), [&](BlockRange range) {
      dequantise(values.data_ptr(), values.scalar_type(), message, values.numel(),
                 wire_.quantisation, range);
    });
    return {};
  }

  void read_back(const at::Tensor& own, const at::Tensor& /*values*/,
                 const std::byte* message) const override {
    unpack(own, message);
  }

  // Adds in fp32, beginning with 0.
  void add(const at::Tensor& output, std::span<const std::byte* const> terms, int own_host,
           const Room& room) const override {
    const int64_t numel = output.numel();
    const int64_t block = wire_.quantisation.block;
    by_blocks(numel, [&](BlockRange range) {
      const int64_t begin = range.begin * block;
      const int64_t count = std::min(range.end * block, numel) - begin;
      const void* own = terms[static_cast<size_t>(own_host)] + begin * width_of(dtype());
      float* sums = room.total + begin;
      float* converted = room.converted + begin;
      void* to = converted;
      if (own != to) sum({&to, 1}, at::kFloat, {&own, 1}, dtype(), count, false);
      std::fill(sums, sums + count, 0.0F);
      for (size_t host = 0; host < terms.size(); ++host) {
        if (static_cast<int>(host) != own_host) {
          dequantise_add(room.total, terms[host], numel, wire_.quantisation, range);
          continue;
        }
        for (int64_t i = 0; i < count; ++i) sums[i] += converted[i];
      }
      const void* whole = sums;
      void* out = bytes_of(output) + begin * output.element_size();
      sum({&out, 1}, output.scalar_type(), {&whole, 1}, at::kFloat, count, false);
    });
  }

 private:
  // Returns the errors of a message. The slices of all receivers follow one another.
  std::byte* error_of(const SumMessage& of) const {
    const auto errors = feedback_quantisation(wire_.quantisation);
    return bytes_of(wire_.error) + of.peer * wire_bytes(errors, of.slice_numel) +
           wire_bytes(errors, of.begin);
  }

  // Calls `body` with ranges of a message's blocks, on as many threads as this one may use.
  template <class Body>
  void by_blocks(int64_t numel, Body body) const {
    const int64_t grain = kThreadGrain / (wire_.quantisation.block * width_of(at::kFloat));
    at::parallel_for(0, blocks_of(wire_.quantisation, numel), grain,
                     [&](int64_t begin, int64_t end) {
                       body(BlockRange{begin, end});
                     });
  }

  LinkWire wire_;
};

}  // namespace

void Codec::read_back(const at::Tensor& own, const at::Tensor& values,
                      const std::byte* /*message*/) const {
  copy_to(bytes_of(own), values);
}

void Codec::add(const at::Tensor& output, std::span<const std::byte* const> terms, int /*own_host*/,
                const Room& /*room*/) const {
  add_arrays(output, terms, dtype_, static_cast<int64_t>(terms.size()));
}

std::unique_ptr<Codec> make_codec(const std::optional<LinkWire>& wire, at::ScalarType dtype) {
  if (!wire) return std::make_unique<RawCodec>(dtype);
  if (wire->packed) return std::make_unique<ExponentCodec>(dtype);
  return std::make_unique<QuantisedCodec>(dtype, *wire);
}

void add_arrays(const at::Tensor& output, std::span<const std::byte* const> inputs,
                at::ScalarType dtype, int64_t block) {
  const int64_t width = width_of(dtype);
  at::parallel_for(0, output.numel(), kThreadGrain / width, [&](int64_t begin, int64_t end) {
    c10::SmallVector<const void*, 16> from;
    for (const auto* input : inputs) from.push_back(input + begin * width);
    void* to = bytes_of(output) + begin * output.element_size();
    sum({&to, 1}, output.scalar_type(), from, dtype, end - begin, false, block);
  });
}

}  // namespace zero::comm
