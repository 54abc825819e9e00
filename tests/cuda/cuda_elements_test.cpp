// The source of the CUDA kernels, on the CPU: Note [Kernels in plain C++] in device_elements.h.
#include <ATen/ATen.h>
#include <ATen/ceil_div.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/optim/test_arrays.h"
#include "tests/optim/test_shard.h"
#include "zero/models/layers/column_sums_elements.h"
#include "zero/models/layers/gelu_elements.h"
#include "zero/models/layers/layer_norm_elements.h"
#include "zero/models/layers/softmax.h"
#include "zero/models/layers/softmax_elements.h"
#include "zero/optim/device_elements.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {
namespace {

/// Updates as a device's kernel does: every thread, one after the other, from the last to the
/// first.
void update_by_threads(const Optimizer& optimizer, Moment moment, float factor,
                       const Operands& operands) {
  device::with_update(optimizer, moment, operands,
                      [&](auto width, const auto& step, const auto& arrays) {
                        const device::Scale scale{factor, operands.gradient_limit};
                        for (int64_t t = at::ceil_div<int64_t>(operands.numel, width); t-- > 0;)
                          device::update_by_thread<width>(step, scale, arrays, t);
                      });
}

/// Computes the norm as its two kernels do.
double norm_by_threads(const void* values, c10::ScalarType dtype, int64_t numel) {
  using kernels::kNormBlock;
  using kernels::kNormLanes;
  std::vector<double> blocks;
  device::with_numbers(dtype, [&]<class Numbers>(Numbers) {
    const auto* stored = static_cast<const typename Numbers::Stored*>(values);
    for (int64_t begin = 0; begin < numel; begin += kNormBlock) {
      std::array<double, kNormLanes> lanes{};
      for (int64_t lane = 0; lane < kNormLanes; ++lane) {
        lanes[static_cast<size_t>(lane)] = device::lane_squares<Numbers>(
            stored + begin, std::min(kNormBlock, numel - begin), lane);
      }
      blocks.push_back(device::add_in_order(0, lanes.data(), kNormLanes));
    }
  });
  // In pieces, as the second kernel has them in shared memory.
  double sum = 0;
  for (size_t i = 0; i < blocks.size(); i += 3)
    sum = device::add_in_order(sum, blocks.data() + i,
                               static_cast<int64_t>(std::min<size_t>(3, blocks.size() - i)));
  return sum;
}

TEST(CudaElements, UpdateAsTheReferenceInBitsForEveryDtypeTailAndAlignment) {
  for (const auto& [name, optimizer] : optimizers()) {
    if (reach(optimizer) != Reach::element) continue;
    for (const bool special : {false, true}) {
      for (const float limit : {std::numeric_limits<float>::infinity(), 0.01F}) {
        for (const auto gradient : dtypes()) {
          for (const auto parameter : dtypes()) {
            for (const int64_t numel : {0, 1, 3, 4, 7, 64, 66, 1003}) {
              for (const int64_t offset : {0, 3}) {
                Shard expected(optimizer, numel, offset, gradient, parameter, special);
                Shard shard(optimizer, numel, offset, gradient, parameter, special);
                expected.operands.gradient_limit = shard.operands.gradient_limit = limit;
                for (const int64_t step : {1, 2, 3}) {
                  const auto seed = static_cast<uint32_t>(10 + step);
                  expected.new_gradient(seed, special);
                  shard.new_gradient(seed, special);
                  update_reference(optimizer, step, lr(optimizer), 0.37, expected.operands);
                  update_by_threads(optimizer, {step, lr(optimizer)}, 0.37F, shard.operands);
                }
                expect_same(shard, expected,
                            name + " " + c10::toString(gradient) + " to " +
                                c10::toString(parameter) + " numel " + std::to_string(numel) +
                                " offset " + std::to_string(offset));
                if (HasFatalFailure()) return;
              }
            }
          }
        }
      }
    }
  }
}

// Shard's arrays begin at different places in a line, so that here all do at a pack's.
TEST(CudaElements, TakeSeveralElementsAtOnceWhereAllArraysAreAlignedAndGiveTheSameBits) {
  const auto bf16 = c10::ScalarType::BFloat16;
  for (const auto& [name, optimizer] : optimizers()) {
    if (reach(optimizer) != Reach::element) continue;
    for (const auto gradient : dtypes()) {
      for (const int64_t numel : {1, 4, 67, 1003}) {
        Shard expected(optimizer, numel, 0, gradient, bf16, true);
        Array<float> master(numel, 0), first(numel, 0), second(numel, 4), wide(numel, 0);
        Array<uint16_t> parameter(numel, 4), low(numel, 0);
        Operands operands = expected.operands;
        void* const copied =
            gradient == c10::ScalarType::Float ? static_cast<void*>(wide.data()) : low.data();
        std::memcpy(copied, operands.gradient,
                    static_cast<size_t>(numel) * c10::elementSize(gradient));
        std::copy_n(operands.master, numel, master.data());
        for (int64_t i = 0; i < numel; ++i) {
          if (operands.state[0]) first.data()[i] = operands.state[0][i];
          if (operands.state[1]) second.data()[i] = operands.state[1][i];
        }
        operands.gradient = copied;
        operands.master = master.data();
        operands.parameter = parameter.data();
        if (operands.state[0]) operands.state[0] = first.data();
        if (operands.state[1]) operands.state[1] = second.data();
        ASSERT_TRUE(device::is_aligned(operands));
        int taken = 0;
        device::with_update(optimizer, {2, lr(optimizer)}, operands,
                            [&](auto width, const auto&, const auto&) { taken = width; });
        EXPECT_EQ(taken, device::kWidth);
        for (const int64_t step : {1, 2}) {
          update_by_threads(optimizer, {step, lr(optimizer)}, 0.37F, operands);
          update_reference(optimizer, step, lr(optimizer), 0.37, expected.operands);
        }
        for (int64_t i = 0; i < numel; ++i) {
          ASSERT_TRUE(same(master.data()[i], expected.operands.master[i])) << name << " " << i;
          ASSERT_TRUE(
              same(widen(parameter.data(), bf16, i), widen(expected.operands.parameter, bf16, i)))
              << name << " " << i;
          for (const size_t s : {0, 1}) {
            if (!operands.state[s]) continue;
            ASSERT_TRUE(same(operands.state[s][i], expected.operands.state[s][i]))
                << name << " " << i;
          }
        }
        EXPECT_TRUE(master.guards_intact() && first.guards_intact() && second.guards_intact() &&
                    parameter.guards_intact())
            << name << " numel " << numel;

        // One array that is not aligned is enough for one element at a time.
        operands.master += 1;
        EXPECT_FALSE(device::is_aligned(operands));
      }
    }
  }
}

TEST(CudaElements, WidenAndNarrowEveryNumberAsLibTorchDoes) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto stored = static_cast<uint16_t>(bits);
    ASSERT_TRUE(same(device::Bf16::widen(stored), widen(&stored, c10::ScalarType::BFloat16, 0)));
    ASSERT_TRUE(same(device::Fp16::widen(stored), widen(&stored, c10::ScalarType::Half, 0)));
    for (const uint32_t lower :
         {0U, 1U, 0x0FFFU, 0x1000U, 0x1001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const auto value = std::bit_cast<float>(bits << 16 | lower);
      const auto bf16 = device::Bf16::narrow(value);
      const auto fp16 = device::Fp16::narrow(value);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(widen(&bf16, c10::ScalarType::BFloat16, 0)));
        ASSERT_TRUE(std::isnan(widen(&fp16, c10::ScalarType::Half, 0)));
      } else {
        ASSERT_EQ(bf16, c10::BFloat16(value).x) << value;
        ASSERT_EQ(fp16, c10::Half(value).x) << value;
      }
    }
  }
}

TEST(CudaElements, AddSquaresInTheOrderOfTheCpu) {
  for (const auto dtype : dtypes()) {
    for (const int64_t numel : {0, 1, 31, 33, 16383, 16384, 16385, 150001}) {
      for (const bool special : {false, true}) {
        Array<float> wide(numel, 1);
        Array<uint16_t> low(numel, 3);
        void* const values =
            dtype == c10::ScalarType::Float ? static_cast<void*>(wide.data()) : low.data();
        Numbers numbers(7, special);
        for (int64_t i = 0; i < numel; ++i) narrow(values, dtype, i, numbers.next());
        const auto expected = squared_norm(values, dtype, numel);
        const double sum = norm_by_threads(values, dtype, numel);
        EXPECT_EQ(std::isfinite(sum), expected.finite);
        if (expected.finite) {
          EXPECT_EQ(std::bit_cast<uint64_t>(sum), std::bit_cast<uint64_t>(expected.sum))
              << c10::toString(dtype) << " numel " << numel;
        }
      }
    }
  }
}

// The steps of a row's kernel: every thread reads its share, warps of 32 and then their parts are
// joined in pairs, and every thread writes.
struct HostMath {
  static float exp2(float x) { return std::exp2(x); }
  static double log(double x) { return std::log(x); }
};
softmax::Part joined(std::vector<softmax::Part> parts) {
  for (size_t half = parts.size() / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) parts[i] = softmax::join<HostMath>(parts[i], parts[i + half]);
  return parts.front();
}
double softmax_by_threads(at::Tensor& logits, const at::Tensor& targets, const at::Tensor& scales,
                          bool gradient, double smoothing = 0) {
  constexpr int64_t kWarp = 32, kThreads = 128;  // fewer than the kernel's: some read several times
  double sum = 0;
  device::with_numbers(logits.scalar_type(), [&]<class Numbers>(Numbers) {
    const softmax::Rows<Numbers> rows{
        .logits = static_cast<typename Numbers::Stored*>(logits.data_ptr()),
        .stride = logits.stride(0),
        .vocabulary = logits.size(1),
        .targets = targets.const_data_ptr<int64_t>(),
        .scales = scales.const_data_ptr<float>(),
        .losses = nullptr,
        .smoothing = static_cast<float>(smoothing)};
    softmax::with_width(rows, [&](auto width) {
      for (int64_t r = 0; r < logits.size(0); ++r) {
        auto* const row = rows.logits + r * rows.stride;
        const int64_t target = rows.targets[r];
        if (target == kIgnoredTarget) {
          for (int64_t t = 0; gradient && t < kThreads; ++t)
            softmax::write_zeros<Numbers, width>(row, rows.vocabulary, t, kThreads);
          continue;
        }
        std::vector<softmax::Part> warps;
        for (int64_t warp = 0; warp < kThreads; warp += kWarp) {
          std::vector<softmax::Part> lanes;
          for (int64_t t = warp; t < warp + kWarp; ++t)
            lanes.push_back(
                softmax::part_of<HostMath, Numbers, width>(row, rows.vocabulary, t, kThreads));
          warps.push_back(joined(lanes));
        }
        const auto whole = joined(warps);
        sum += softmax::loss<HostMath>(rows, whole, Numbers::widen(row[target]));
        for (int64_t t = kThreads; gradient && t-- > 0;)
          softmax::write_gradient<HostMath, Numbers, width>(rows, r, t, kThreads, whole);
      }
    });
  });
  return sum;
}

/// Logits whose rows begin `stride` apart, `offset` elements into memory that is 375 elsewhere.
struct Padded {
  Padded(const at::Tensor& values, int64_t stride, int64_t offset)
      : whole(at::full({values.size(0) * stride + offset}, 375, values.options())),
        logits(at::as_strided(whole, values.sizes(), {stride, 1}, offset)) {
    logits.copy_(values);
  }
  bool padding_intact() const {
    auto rest = whole.clone();
    at::as_strided(rest, logits.sizes(), logits.strides(), logits.storage_offset()).fill_(375);
    return rest.eq(375).all().item<bool>();
  }
  at::Tensor whole, logits;
};

TEST(CudaElements, SoftmaxCrossEntropyAsTheReferenceForEveryDtypeTailStrideAndAlignment) {
  for (const auto dtype : dtypes()) {
    // The error that rounding the result makes, relative to its largest.
    const double unit = dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    for (const int64_t vocabulary : {1, 2, 7, 8, 9, 64, 130, 1003, 5003}) {
      for (const int64_t stride : {vocabulary, (vocabulary + 63) / 64 * 64, vocabulary + 3}) {
        for (const int64_t offset : {0, 1}) {
          for (const double spread : {0.1, 10.0, 300.0}) {
            at::manual_seed(vocabulary);
            const auto values = (at::randn({5, vocabulary}) * spread).to(dtype);
            auto targets = at::randint(vocabulary, {5}, at::kLong);
            auto scales = at::full({5}, 0.2);
            targets[2] = kIgnoredTarget;
            scales[2] = 0;
            const double smoothing = offset == 1 ? 0.1 : 0;
            Padded found(values, stride, offset);
            auto expected = values.to(at::kFloat, false, /*copy=*/true);
            const double sum = softmax_by_threads(found.logits, targets, scales, true, smoothing);
            const auto loss =
                softmax_cross_entropy_reference_(expected, targets, scales, true, smoothing);
            const auto what = std::string(c10::toString(dtype)) + " vocabulary " +
                              std::to_string(vocabulary) + " stride " + std::to_string(stride) +
                              " offset " + std::to_string(offset);
            EXPECT_NEAR(sum, loss.item<double>(), 1e-5 * std::max(1.0, loss.item<double>()))
                << what;
            EXPECT_LE((found.logits.to(at::kFloat) - expected).abs().max().item<double>(),
                      0.2 * unit)
                << what;
            EXPECT_EQ(found.logits[2].abs().max().item<float>(), 0) << what;
            EXPECT_TRUE(found.padding_intact()) << what;
            Padded unread(values, stride, offset);
            EXPECT_EQ(softmax_by_threads(unread.logits, targets, scales, false, smoothing), sum)
                << what;
            EXPECT_TRUE(at::equal(unread.logits, values)) << what;
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CudaElements, SoftmaxCrossEntropyOfLogitsThatAreNotFinite) {
  constexpr auto kInfinity = std::numeric_limits<float>::infinity();
  const auto targets = at::full({1}, 3, at::kLong);
  const auto scales = at::ones({1});
  for (const auto dtype : dtypes()) {
    for (const int64_t where : {0, 9, 1002}) {
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
        auto logits = at::zeros({1, 1003}, dtype);
        logits[0][where] = bad;
        EXPECT_TRUE(std::isnan(softmax_by_threads(logits, targets, scales, true))) << bad;
        EXPECT_TRUE(logits.isnan().all().item<bool>()) << bad << " at " << where;
      }
      // A word that cannot come has no part in it, and neither have whole shares of them.
      auto logits = at::zeros({1, 1003}, dtype);
      logits[0][where] = -kInfinity;
      logits.narrow(1, 100, 800).fill_(-kInfinity);
      EXPECT_NEAR(softmax_by_threads(logits, targets, scales, true), std::log(202), 1e-5);
      EXPECT_EQ(logits[0][where].item<float>(), 0);
      EXPECT_NEAR(logits[0][5].item<float>(), 1.0 / 202, 1e-4);
    }
    auto none = at::full({1, 1003}, -kInfinity, dtype);
    EXPECT_TRUE(std::isnan(softmax_by_threads(none, targets, scales, true)));
    EXPECT_TRUE(none.isnan().all().item<bool>());
  }
}

// Adds as the kernels do: blocks of rows, whose parts are added in one order.
at::Tensor column_sums_by_threads(const at::Tensor& matrix, bool packed) {
  constexpr int64_t kParts = 3, kLanes = 2;
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  auto parts = at::full({kParts, columns}, 375, at::kFloat);
  auto result = at::empty({columns}, at::kFloat);
  device::with_numbers(matrix.scalar_type(), [&]<class Numbers>(Numbers) {
    const auto* const stored = static_cast<const typename Numbers::Stored*>(matrix.data_ptr());
    const auto add = [&](auto width) {
      for (int64_t part = 0; part < kParts; ++part) {
        for (int64_t column = 0; column < columns; column += width) {
          auto sums = at::zeros({width}, at::kFloat);
          for (int64_t lane = 0; lane < kLanes; ++lane) {
            const auto of_lane = column_sums::of_rows<Numbers, width>(
                stored, rows, columns, column, part * kLanes + lane, kParts * kLanes);
            for (int64_t i = 0; i < width; ++i) sums[i] += of_lane.values[i];
          }
          parts[part].narrow(0, column, width).copy_(sums);
        }
      }
    };
    if (packed) {
      add(std::integral_constant<int, packs::kWidth<Numbers>>());
    } else {
      add(std::integral_constant<int, 1>());
    }
  });
  for (int64_t column = 0; column < columns; ++column) {
    float sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sum += column_sums::of_parts(parts.const_data_ptr<float>(), kParts, columns, column, lane,
                                   kLanes);
    result[column] = sum;
  }
  return result;
}

TEST(CudaElements, ColumnSumsAsTheReferenceForEveryDtypeAndNumberOfRows) {
  for (const auto dtype : dtypes()) {
    for (const int64_t rows : {0, 1, 5, 24, 25, 131}) {
      for (const int64_t columns : {8, 5, 24}) {
        at::manual_seed(rows);
        const auto matrix = at::randn({rows, columns}).to(dtype);
        const auto expected = matrix.to(at::kDouble).sum(0);
        for (const bool packed : {false, true}) {
          if (packed && columns % 8 != 0) continue;
          const auto found = column_sums_by_threads(matrix, packed);
          EXPECT_LE((found.to(at::kDouble) - expected).abs().max().item<double>(), 1e-5)
              << c10::toString(dtype) << " " << rows << " rows of " << columns;
        }
      }
    }
  }
}

// As the kernel of layer norm's backward pass: a thread for each pack of columns.
std::array<at::Tensor, 3> layer_norm_by_threads(const at::Tensor& dy, const at::Tensor& x,
                                                const at::Tensor& mean, const at::Tensor& rstd,
                                                const at::Tensor& weight) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto dx = at::empty_like(x);
  auto dweight = at::empty({columns}, at::kFloat), dbias = at::empty({columns}, at::kFloat);
  device::with_numbers(x.scalar_type(), [&]<class Numbers>(Numbers) {
    using Stored = typename Numbers::Stored;
    constexpr int kCount = packs::kWidth<Numbers>;
    const auto at_column = [&](const at::Tensor& array, int64_t row, int64_t column) {
      return static_cast<Stored*>(array.data_ptr()) + row * columns + column;
    };
    std::vector<layer_norm_elements::Gradients<kCount>> gradients(
        static_cast<size_t>(columns / kCount));
    for (int64_t row = 0; row < rows; ++row) {
      const auto share = [&](int64_t column) {
        return layer_norm_elements::Share<Numbers, kCount>{
            device::load<kCount>(at_column(dy, row, column)),
            device::load<kCount>(at_column(x, row, column)), mean[row].item<float>(),
            rstd[row].item<float>()};
      };
      const auto weights = [&](int64_t column) {
        return packs::widened<Numbers, kCount>(at_column(weight, 0, column));
      };
      layer_norm_elements::Sums whole;
      for (int64_t column = 0; column < columns; column += kCount) {
        whole =
            join(whole, layer_norm_elements::add(share(column), weights(column),
                                                 gradients[static_cast<size_t>(column / kCount)]));
      }
      for (int64_t column = 0; column < columns; column += kCount) {
        device::store(layer_norm_elements::dx_of(share(column), weights(column), whole, columns),
                      at_column(dx, row, column));
      }
    }
    for (int64_t column = 0; column < columns; ++column) {
      const auto& own = gradients[static_cast<size_t>(column / kCount)];
      dweight[column] = own.weight.values[column % kCount];
      dbias[column] = own.bias.values[column % kCount];
    }
  });
  return {dx, dweight, dbias};
}

at::Tensor layer_norm_forward_by_threads(const at::Tensor& x, const at::Tensor& weight,
                                         const at::Tensor& bias, double eps) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto y = at::empty_like(x);
  device::with_numbers(x.scalar_type(), [&]<class Numbers>(Numbers) {
    using Stored = typename Numbers::Stored;
    constexpr int kCount = packs::kWidth<Numbers>;
    const auto place = [&](const at::Tensor& array, int64_t row, int64_t column) {
      return static_cast<Stored*>(array.data_ptr()) + row * columns + column;
    };
    for (int64_t row = 0; row < rows; ++row) {
      const auto pack = [&](int64_t column) {
        return packs::widened<Numbers, kCount>(place(x, row, column));
      };
      float sum = 0, squares = 0;
      for (int64_t c = 0; c < columns; c += kCount) sum += layer_norm_elements::sum_of(pack(c));
      const float mean = sum / static_cast<float>(columns);
      for (int64_t c = 0; c < columns; c += kCount)
        squares += layer_norm_elements::squares_of(pack(c), mean);
      const float rstd =
          1.0F / std::sqrt(squares / static_cast<float>(columns) + static_cast<float>(eps));
      for (int64_t c = 0; c < columns; c += kCount) {
        device::store(layer_norm_elements::y_of<Numbers, kCount>(
                          pack(c), mean, rstd, packs::widened<Numbers, kCount>(place(weight, 0, c)),
                          packs::widened<Numbers, kCount>(place(bias, 0, c))),
                      place(y, row, c));
      }
    }
  });
  return y;
}

TEST(CudaElements, LayerNormAsTheReferenceForEveryDtype) {
  for (const auto dtype : dtypes()) {
    // The relative error that rounding the result makes.
    const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
    for (const int64_t columns : {8, 128, 200}) {
      at::manual_seed(columns);
      const auto x = (at::randn({13, columns}) * 3 + 1).to(dtype);
      const auto dy = at::randn({13, columns}).to(dtype);
      const auto weight = at::randn({columns}).to(dtype);
      const auto wide = [](const at::Tensor& t) {
        return t.to(at::kDouble).detach().requires_grad_();
      };
      const auto bias = at::randn({columns}).to(dtype);
      const auto x64 = wide(x), weight64 = wide(weight), bias64 = wide(bias);
      const auto y64 = at::layer_norm(x64, {columns}, weight64, bias64, 1e-5);
      y64.backward(dy.to(at::kDouble));
      const auto y = layer_norm_forward_by_threads(x, weight, bias, 1e-5);
      EXPECT_LE((y.to(at::kDouble) - y64.detach()).norm().item<double>(),
                unit * y64.norm().item<double>())
          << c10::toString(dtype) << ", " << columns << " columns";
      const auto mean = x.to(at::kFloat).mean(1);
      const auto rstd = x.to(at::kFloat).var(1, false).add(1e-5).rsqrt();
      const auto found = layer_norm_by_threads(dy, x, mean, rstd, weight);
      const std::array expected{x64.grad(), weight64.grad(), bias64.grad()};
      for (size_t i = 0; i < found.size(); ++i) {
        const auto apart = (found[i].to(at::kDouble) - expected[i]).norm().item<double>();
        EXPECT_LE(apart, (i == 0 ? unit : 1e-5) * expected[i].norm().item<double>())
            << c10::toString(dtype) << ", " << columns << " columns, result " << i;
      }
    }
  }
}

TEST(CudaElements, GeluAndItsDerivativeAsTheReferenceForEveryDtype) {
  for (const auto dtype : dtypes()) {
    const double unit = dtype == at::kFloat ? 2e-6 : dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    const auto x =
        at::cat({at::linspace(-12, 12, 1001), at::tensor({0.0, -100.0, 100.0})}).to(dtype);
    const auto dy = at::linspace(-1, 2, x.numel()).to(dtype);
    const auto x64 = x.to(at::kDouble).requires_grad_();
    const auto y64 = at::gelu(x64, "tanh");
    y64.backward(dy.to(at::kDouble));
    auto y = at::empty_like(x), again = at::empty_like(x), dx = at::empty_like(x);
    device::with_numbers(dtype, [&]<class Numbers>(Numbers) {
      using Stored = typename Numbers::Stored;
      const auto run = [&](auto width) {
        for (int64_t i = 0; i + width <= x.numel(); i += width) {
          const auto at_i = [&](const at::Tensor& array) {
            return static_cast<Stored*>(array.data_ptr()) + i;
          };
          const auto read = device::load<width>(at_i(x));
          device::store(gelu_elements::values<HostMath, Numbers, width>(read), at_i(y));
          const auto back = gelu_elements::backward<HostMath, Numbers, width>(
              read, device::load<width>(at_i(dy)));
          device::store(back.y, at_i(again));
          device::store(back.dx, at_i(dx));
        }
      };
      run(std::integral_constant<int, 1>());
      const auto first = std::array{y.clone(), dx.clone()};
      run(std::integral_constant<int, 4>());
      EXPECT_TRUE(at::equal(first[0], y) && at::equal(first[1], dx)) << c10::toString(dtype);
    });
    EXPECT_TRUE(at::equal(y, again));
    const auto expect_near = [&](const at::Tensor& found, const at::Tensor& expected) {
      const auto apart = (found.to(at::kDouble) - expected).abs();
      EXPECT_LE((apart - unit * expected.abs()).max().item<double>(), unit / 4)
          << c10::toString(dtype);
    };
    expect_near(y, y64.detach());
    expect_near(dx, x64.grad());
  }
}

}  // namespace
}  // namespace zero::optim
