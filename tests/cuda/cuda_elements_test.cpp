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
#include "zero/models/layers/gate_elements.h"
#include "zero/models/layers/gelu_elements.h"
#include "zero/models/layers/layer_norm_elements.h"
#include "zero/models/layers/rms_norm.h"
#include "zero/models/layers/rms_norm_elements.h"
#include "zero/models/layers/rotary.h"
#include "zero/models/layers/rotary_elements.h"
#include "zero/models/layers/softmax.h"
#include "zero/models/layers/softmax_elements.h"
#include "zero/models/layers/swiglu.h"
#include "zero/optim/device_elements.h"
#include "zero/optim/narrow.h"
#include "zero/optim/state_format.h"
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

/// A shard whose master weights are split: the parameter has the upper halves. All arrays begin
/// `offset` elements behind a place at which packs begin.
struct SplitShard : Shard {
  SplitShard(const Optimizer& optimizer, int64_t numel, int64_t offset,
             c10::ScalarType gradient_dtype, bool special)
      : Shard(optimizer, numel, offset, gradient_dtype, c10::ScalarType::BFloat16, special),
        m(numel, offset),
        v(numel, offset),
        g16(numel, offset),
        upper(numel, offset),
        lower(numel, offset) {
    split(operands.master, upper.data(), lower.data(), numel);
    operands.master = nullptr;
    operands.lower = lower.data();
    operands.parameter = upper.data();
    if (gradient_dtype != c10::ScalarType::Float) operands.gradient = g16.data();
    const std::array<float*, kMostStates> states{m.data(), v.data()};
    for (size_t s = 0; s < states.size(); ++s) {
      if (!operands.state[s]) continue;
      std::copy_n(operands.state[s], numel, states[s]);
      operands.state[s] = states[s];
    }
  }
  float whole(int64_t i) { return join({upper.data()[i], lower.data()[i]}); }
  Array<float> m, v;
  Array<uint16_t> g16, upper, lower;
};

TEST(CudaElements, UpdateSplitMasterWeightsAsTheReferenceInBits) {
  for (const auto& [name, optimizer] : optimizers()) {
    if (reach(optimizer) != Reach::element) continue;
    for (const bool special : {false, true}) {
      for (const auto gradient : dtypes()) {
        for (const int64_t numel : {0, 1, 4, 7, 1003}) {
          for (const int64_t offset : {0, 3}) {
            SplitShard expected(optimizer, numel, offset, gradient, special);
            SplitShard shard(optimizer, numel, offset, gradient, special);
            for (const int64_t step : {1, 2}) {
              expected.new_gradient(static_cast<uint32_t>(20 + step), special);
              shard.new_gradient(static_cast<uint32_t>(20 + step), special);
              update_reference(optimizer, step, lr(optimizer), 0.37, expected.operands);
              update_by_threads(optimizer, {step, lr(optimizer)}, 0.37F, shard.operands);
            }
            const auto what = name + " " + c10::toString(gradient) + " numel " +
                              std::to_string(numel) + " offset " + std::to_string(offset);
            EXPECT_EQ(device::is_aligned(shard.operands), offset == 0) << what;
            for (int64_t i = 0; i < numel; ++i) {
              ASSERT_TRUE(same(shard.whole(i), expected.whole(i))) << what << " element " << i;
              for (const size_t s : {0, 1}) {
                if (!shard.operands.state[s]) continue;
                ASSERT_TRUE(same(shard.operands.state[s][i], expected.operands.state[s][i]))
                    << what << " state " << s << " element " << i;
              }
            }
            EXPECT_TRUE(shard.lower.guards_intact() && shard.upper.guards_intact() &&
                        shard.m.guards_intact() && shard.v.guards_intact())
                << what;
          }
        }
      }
    }
  }
}

enum class Weights { wide, copied, half_copied, split, own };

/// Operands whose states, or weights, or both are narrow. All arrays begin `offset` elements behind
/// a place at which packs begin.
struct NarrowShard : SplitShard {
  NarrowShard(const Optimizer& optimizer, Weights weights, StateFormat format, int64_t numel,
              int64_t offset, c10::ScalarType gradient_dtype, bool special)
      : SplitShard(optimizer, numel, offset, gradient_dtype, special), whole(numel, offset) {
    for (int64_t i = 0; i < numel; ++i) whole.data()[i] = SplitShard::whole(i);
    narrow = {.wide = operands, .state_format = format, .key = rounding_key(5, 2)};
    narrow.wide.state = {};
    if (weights != Weights::split) narrow.wide.lower = nullptr;
    if (weights != Weights::split && weights != Weights::own) narrow.wide.master = whole.data();
    if (weights == Weights::wide || weights == Weights::own) narrow.wide.parameter = nullptr;
    if (weights == Weights::half_copied) narrow.wide.parameter_dtype = c10::ScalarType::Half;
    if (weights == Weights::own) narrow.weights = upper.data();
    const auto places = state_bytes(format, at::round_up(numel, kCodedBlock));
    for (size_t s = 0; s < states.size(); ++s) {
      if (!operands.state[s]) continue;
      states[s] = Array<std::byte>(places, offset * state_bytes(format, kCodedBlock) / kCodedBlock);
      std::fill_n(states[s].data(), places, std::byte{0});
      narrow.state[s] = states[s].data();
      if (format == StateFormat::eight_bit) {
        encode(operands.state[s], states[s].data(), numel, state_signs(optimizer)[s]);
        continue;
      }
      for (int64_t i = 0; i < numel; ++i) {
        const auto dtype =
            format == StateFormat::bf16 ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
        optim::narrow(states[s].data(), dtype, i, operands.state[s][i]);
      }
    }
  }
  Array<float> whole;
  std::array<Array<std::byte>, kMostStates> states{Array<std::byte>(0, 0), Array<std::byte>(0, 0)};
  NarrowOperands narrow;
};

void expect_same(NarrowShard& a, NarrowShard& b, const std::string& what) {
  const int64_t numel = a.narrow.wide.numel;
  for (int64_t i = 0; i < numel; ++i) {
    ASSERT_TRUE(same(a.whole.data()[i], b.whole.data()[i])) << what << " weight " << i;
    if (a.narrow.wide.lower != nullptr) {
      ASSERT_TRUE(same(a.SplitShard::whole(i), b.SplitShard::whole(i))) << what << " halves " << i;
    }
    const auto dtype = a.narrow.wide.parameter_dtype;  // that of a copy; it is bf16 without one
    ASSERT_TRUE(same(widen(a.upper.data(), dtype, i), widen(b.upper.data(), dtype, i)))
        << what << " parameter " << i;
  }
  const auto format = a.narrow.state_format;
  for (size_t s = 0; s < kMostStates; ++s) {
    if (a.narrow.state[s] == nullptr) continue;
    const auto* mine = a.states[s].data();
    const auto* other = b.states[s].data();
    if (format == StateFormat::fp32) {
      for (int64_t i = 0; i < numel; ++i)
        ASSERT_TRUE(
            same(widen(mine, c10::ScalarType::Float, i), widen(other, c10::ScalarType::Float, i)))
            << what << " state " << s << " element " << i;
    } else {
      const auto bytes = state_bytes(format, at::round_up(numel, kCodedBlock));
      ASSERT_TRUE(std::equal(mine, mine + bytes, other)) << what << " state " << s;
    }
    EXPECT_TRUE(a.states[s].guards_intact() && b.states[s].guards_intact()) << what;
  }
  EXPECT_TRUE(a.whole.guards_intact() && a.upper.guards_intact() && a.lower.guards_intact())
      << what;
}

/// Updates as a device's kernels do, from the last thread to the first.
void update_by_threads(const Optimizer& optimizer, Moment moment, float factor,
                       const NarrowOperands& operands) {
  device::with_narrow_update(optimizer, moment, operands,
                             [&](auto width, const auto& step, const auto& arrays) {
                               using Arrays = std::remove_cvref_t<decltype(arrays)>;
                               const device::Scale scale{factor, operands.wide.gradient_limit};
                               const int64_t of_thread = device::narrow_elements<Arrays>(width);
                               for (int64_t t = at::ceil_div(arrays.numel, of_thread); t-- > 0;)
                                 device::update_narrow_by_thread<width>(step, scale, arrays, t);
                             });
}

TEST(CudaElements, UpdateNarrowWeightsAndStatesAsTheReferenceInBits) {
  for (const auto& [name, optimizer] : optimizers()) {
    if (reach(optimizer) != Reach::element) continue;
    const bool states = !state_names(optimizer).empty();
    for (const auto weights :
         {Weights::wide, Weights::copied, Weights::half_copied, Weights::split, Weights::own}) {
      for (const auto format : {StateFormat::fp32, StateFormat::bf16, StateFormat::eight_bit}) {
        if (weights != Weights::own && (format == StateFormat::fp32 || !states)) continue;
        for (const auto gradient : dtypes()) {
          for (const int64_t numel : {0, 1, 5, 64, 83, 1003}) {
            for (const int64_t offset : {0, 3}) {
              for (const bool special : {false, true}) {
                const auto what = name + " weights " + std::to_string(static_cast<int>(weights)) +
                                  " format " + std::to_string(static_cast<int>(format)) + " " +
                                  c10::toString(gradient) + " numel " + std::to_string(numel) +
                                  " offset " + std::to_string(offset);
                NarrowShard expected(optimizer, weights, format, numel, offset, gradient, special);
                NarrowShard shard(optimizer, weights, format, numel, offset, gradient, special);
                EXPECT_EQ(device::is_aligned(shard.narrow), offset == 0) << what;
                // In the second update the numbers of elements pass 2^32.
                for (const int64_t step : {1, 2}) {
                  expected.new_gradient(static_cast<uint32_t>(30 + step), special);
                  shard.new_gradient(static_cast<uint32_t>(30 + step), special);
                  for (auto* const of : {&expected, &shard})
                    of->narrow.first = step == 1 ? 192 : (int64_t{1} << 32) - 64;
                  update_reference(optimizer, step, lr(optimizer), 0.37, expected.narrow);
                  update_by_threads(optimizer, {step, lr(optimizer)}, 0.37F, shard.narrow);
                }
                expect_same(shard, expected, what);
                if (HasFailure()) return;
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

// The arrays of both sweeps lie as in the update of a matrix: the directions are fp32.
TEST(CudaElements, MuonsSweepsAsTheReferencesInBits) {
  for (const bool nesterov : {false, true}) {
    const Optimizer optimizer = Muon{.lr = 1e-2, .weight_decay = 0.1, .nesterov = nesterov};
    for (const auto gradient : dtypes()) {
      for (const auto parameter : dtypes()) {
        for (const int64_t numel : {0, 1, 67, 1003}) {
          Shard expected(optimizer, numel, 0, gradient, parameter, true);
          Shard shard(optimizer, numel, 0, gradient, parameter, true);
          Array<float> there(numel, 0), here(numel, 3);
          Findings findings{.direction = there.data()};
          first_sweep_reference(optimizer, 2, 0.37, expected.operands, findings);
          auto first = shard.operands;
          first.master = here.data();
          first.parameter = nullptr;
          update_by_threads(optimizer, {.step = 2, .sweep = Sweep::first}, 0.37F, first);
          for (auto* const of : {&expected, &shard}) {
            of->operands.gradient = of == &shard ? here.data() : there.data();
            of->operands.gradient_dtype = c10::ScalarType::Float;
          }
          second_sweep_reference(optimizer, 2, 1e-2, 0.7, expected.operands);
          update_by_threads(optimizer, {2, 1e-2, 0.7, Sweep::second}, 1, shard.operands);
          for (int64_t i = 0; i < numel; ++i)
            ASSERT_TRUE(same(here.data()[i], there.data()[i])) << "direction " << i;
          expect_same(shard, expected,
                      std::string(c10::toString(gradient)) + " to " + c10::toString(parameter) +
                          " numel " + std::to_string(numel));
          EXPECT_TRUE(here.guards_intact());
          if (HasFailure()) return;
        }
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

TEST(CudaElements, BlocksOfSeveralNormsFindTheirArrays) {
  device::NormArrays arrays;
  std::vector<int> expected;  // by block
  const std::vector<int64_t> sizes{0,     1, kernels::kNormBlock, kernels::kNormBlock + 1, 0, 0,
                                   50001, 7};
  for (int turn = 0; turn < device::NormArrays::kMost; ++turn) {
    const int64_t numel = sizes[static_cast<size_t>(turn) % sizes.size()];
    arrays.add(nullptr, numel);
    const int64_t blocks = at::ceil_div(numel, kernels::kNormBlock);
    expected.insert(expected.end(), static_cast<size_t>(blocks), turn);
  }
  ASSERT_EQ(arrays.blocks, static_cast<int64_t>(expected.size()));
  for (int64_t block = 0; block < arrays.blocks; ++block) {
    const int found = arrays.of_block(block);
    ASSERT_EQ(found, expected[static_cast<size_t>(block)]) << "block " << block;
    ASSERT_LT(block - arrays.arrays[found].first_block, arrays.blocks_of(found));
  }
  int64_t blocks = 0;
  for (int i = 0; i < arrays.count; ++i) blocks += arrays.blocks_of(i);
  EXPECT_EQ(blocks, arrays.blocks);
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
// `more` may be undefined.
std::array<at::Tensor, 3> layer_norm_by_threads(const at::Tensor& dy, const at::Tensor& x,
                                                const at::Tensor& mean, const at::Tensor& rstd,
                                                const at::Tensor& weight, const at::Tensor& more) {
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
        packs::Pack<float, kCount> other{};
        if (more.defined()) other = packs::widened<Numbers, kCount>(at_column(more, row, column));
        device::store(
            layer_norm_elements::dx_of(share(column), weights(column), whole, columns, other),
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

// Returns the norm of x, or of x + branch if there is one, which then goes to `sum`.
at::Tensor layer_norm_forward_by_threads(const at::Tensor& branch, const at::Tensor& given,
                                         at::Tensor& sum_of_both, const at::Tensor& weight,
                                         const at::Tensor& bias, double eps) {
  const int64_t rows = given.size(0), columns = given.size(1);
  auto x = given;
  if (branch.defined()) {
    x = sum_of_both = at::empty_like(given);
    device::with_numbers(x.scalar_type(), [&]<class Numbers>(Numbers) {
      using Stored = typename Numbers::Stored;
      constexpr int kCount = packs::kWidth<Numbers>;
      for (int64_t i = 0; i < x.numel(); i += kCount) {
        const auto place = [&](const at::Tensor& array) {
          return static_cast<Stored*>(array.data_ptr()) + i;
        };
        device::store(layer_norm_elements::added<Numbers, kCount>(
                          device::load<kCount>(place(branch)), device::load<kCount>(place(given))),
                      place(x));
      }
    });
  }
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
      at::Tensor sum;
      const auto y = layer_norm_forward_by_threads({}, x, sum, weight, bias, 1e-5);
      EXPECT_LE((y.to(at::kDouble) - y64.detach()).norm().item<double>(),
                unit * y64.norm().item<double>())
          << c10::toString(dtype) << ", " << columns << " columns";
      const auto mean = x.to(at::kFloat).mean(1);
      const auto rstd = x.to(at::kFloat).var(1, false).add(1e-5).rsqrt();
      const auto found = layer_norm_by_threads(dy, x, mean, rstd, weight, {});
      const std::array expected{x64.grad(), weight64.grad(), bias64.grad()};
      for (size_t i = 0; i < found.size(); ++i) {
        const auto apart = (found[i].to(at::kDouble) - expected[i]).norm().item<double>();
        EXPECT_LE(apart, (i == 0 ? unit : 1e-5) * expected[i].norm().item<double>())
            << c10::toString(dtype) << ", " << columns << " columns, result " << i;
      }
      // With a residual branch before the norm, and the sum's other gradient behind it.
      const auto branch = at::randn({13, columns}).to(dtype);
      const auto more = at::randn({13, columns}).to(dtype);
      const auto normed = layer_norm_forward_by_threads(branch, x, sum, weight, bias, 1e-5);
      EXPECT_TRUE(at::equal(sum, branch + x)) << c10::toString(dtype);
      EXPECT_TRUE(
          at::equal(normed, layer_norm_forward_by_threads({}, sum, sum, weight, bias, 1e-5)));
      const auto with_more = layer_norm_by_threads(dy, x, mean, rstd, weight, more)[0];
      const auto wanted = x64.grad() + more.to(at::kDouble);
      EXPECT_LE((with_more.to(at::kDouble) - wanted).norm().item<double>(),
                unit * wanted.norm().item<double>())
          << c10::toString(dtype) << ", " << columns << " columns";
    }
  }
}

double apart(const at::Tensor& found, const at::Tensor& expected) {
  return (found.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>() /
         expected.to(at::kDouble).norm().item<double>();
}
// The relative error that rounding a result makes.
double unit_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
}

TEST(CudaElements, RmsNormAsTheReferenceForEveryDtypeAndScale) {
  for (const auto dtype : dtypes()) {
    for (const bool and_one : {false, true}) {
      for (const int64_t columns : {8, 264}) {
        at::manual_seed(columns);
        constexpr int64_t kRows = 5;
        const auto x = (at::randn({kRows, columns}) * 3).to(dtype);
        const auto dy = at::randn({kRows, columns}).to(dtype);
        const auto more = at::randn({kRows, columns}).to(dtype);
        const auto weight = at::randn({columns}).to(dtype);
        const auto leaf_x = x.to(at::kFloat, false, true).requires_grad_();
        const auto leaf_w = weight.to(at::kFloat, false, true).requires_grad_();
        const auto scale = and_one ? NormScale::weight_and_one : NormScale::weight;
        const auto expected = rms_norm(leaf_x, leaf_w, 1e-5, scale);
        expected.backward(dy.to(at::kFloat));
        auto y = at::empty_like(x), dx = at::empty_like(x), with_more = at::empty_like(x);
        auto dweight = at::zeros({columns});
        device::with_numbers(dtype, [&]<class Numbers>(Numbers) {
          using Stored = typename Numbers::Stored;
          constexpr int kCount = packs::kWidth<Numbers>;
          const auto at = [&](const at::Tensor& array, int64_t row, int64_t column) {
            return static_cast<Stored*>(array.data_ptr()) + row * columns + column;
          };
          const auto read = [&](const at::Tensor& array, int64_t row, int64_t column) {
            return packs::widened<Numbers, kCount>(at(array, row, column));
          };
          std::vector<packs::Pack<float, kCount>> gradients(static_cast<size_t>(columns / kCount));
          for (int64_t row = 0; row < kRows; ++row) {
            float squares = 0, sum = 0;
            for (int64_t c = 0; c < columns; c += kCount)
              squares += rms_norm_elements::squares_of(read(x, row, c));
            const float root = 1.0F / std::sqrt(squares / static_cast<float>(columns) + 1e-5F);
            for (int64_t c = 0; c < columns; c += kCount) {
              device::store(rms_norm_elements::y_of<Numbers, kCount>(read(x, row, c), root,
                                                                     read(weight, 0, c), and_one),
                            at(y, row, c));
              sum += rms_norm_elements::add<Numbers>(read(dy, row, c), read(x, row, c), root,
                                                     read(weight, 0, c), and_one,
                                                     gradients[static_cast<size_t>(c / kCount)]);
            }
            for (int64_t c = 0; c < columns; c += kCount) {
              const auto write = [&](const packs::Pack<float, kCount>& other,
                                     const at::Tensor& to) {
                device::store(rms_norm_elements::dx_of<Numbers>(read(dy, row, c), read(x, row, c),
                                                                root, read(weight, 0, c), and_one,
                                                                sum, columns, other),
                              at(to, row, c));
              };
              write({}, dx);
              write(read(more, row, c), with_more);
            }
          }
          for (int64_t c = 0; c < columns; ++c)
            dweight[c] = gradients[static_cast<size_t>(c / kCount)].values[c % kCount];
        });
        const auto what = std::string(c10::toString(dtype)) + (and_one ? ", and one" : "");
        EXPECT_LE(apart(y, expected.detach()), 2 * unit_of(dtype)) << what;
        EXPECT_LE(apart(dx, leaf_x.grad()), unit_of(dtype)) << what;
        EXPECT_LE(apart(with_more, leaf_x.grad() + more), unit_of(dtype)) << what;
        EXPECT_LE(apart(dweight, leaf_w.grad()), unit_of(dtype)) << what;
      }
    }
  }
}

TEST(CudaElements, GatesAsTheReferenceForEveryDtype) {
  for (const auto dtype : dtypes()) {
    for (const bool gelu : {false, true}) {
      at::manual_seed(3);
      const auto gate = (at::randn({1003}) * 4).to(dtype), up = at::randn({1003}).to(dtype);
      const auto dy = at::randn({1003}).to(dtype);
      const auto wide = [](const at::Tensor& t) {
        return t.to(at::kDouble, false, true).requires_grad_();
      };
      const auto gate64 = wide(gate), up64 = wide(up);
      const auto expected = gelu ? geglu(gate64, up64) : swiglu(gate64, up64);
      expected.backward(dy.to(at::kDouble));
      auto y = at::empty_like(gate), of_gate = at::empty_like(gate), of_up = at::empty_like(gate);
      device::with_numbers(dtype, [&]<class Numbers>(Numbers) {
        using Stored = typename Numbers::Stored;
        const auto run = [&]<int kCount>(int64_t begin) {
          const auto at = [&](const at::Tensor& array) {
            return static_cast<Stored*>(array.data_ptr()) + begin;
          };
          const auto g = device::load<kCount>(at(gate)), u = device::load<kCount>(at(up));
          device::store(gate_elements::values<HostMath, Numbers, kCount>(g, u, gelu), at(y));
          const auto back = gate_elements::backward<HostMath, Numbers, kCount>(
              device::load<kCount>(at(dy)), g, u, gelu);
          device::store(back.gate, at(of_gate));
          device::store(back.up, at(of_up));
        };
        for (int64_t i = 0; i + 4 <= 1003; i += 4) run.template operator()<4>(i);
        for (int64_t i = 1000; i < 1003; ++i) run.template operator()<1>(i);
      });
      const auto what = std::string(c10::toString(dtype)) + (gelu ? ", gelu" : "");
      EXPECT_LE(apart(y, expected.detach()), unit_of(dtype)) << what;
      EXPECT_LE(apart(of_gate, gate64.grad()), unit_of(dtype)) << what;
      EXPECT_LE(apart(of_up, up64.grad()), unit_of(dtype)) << what;
    }
  }
}

TEST(CudaElements, RotationsAsTheReferenceForEveryDtypeWidthAndTable) {
  for (const auto dtype : dtypes()) {
    for (const int64_t width : {16, 12}) {
      for (const bool by_row : {false, true}) {
        at::manual_seed(width);
        auto table = rotary_table({}, width, 32, 9, c10::kCPU);
        if (by_row) table = rows_at(table, at::randint(9, {2, 7}, at::kLong));
        const auto sequence = by_row ? 7 : 9;
        const auto x = at::randn({2, sequence, 3, width}).to(dtype);
        const auto dy = at::randn_like(x);
        const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble, false, true); };
        const auto x64 = wide(x).requires_grad_();
        const auto cosines = table.cosines.to(dtype).contiguous();
        const auto sines = table.sines.to(dtype).contiguous();
        const auto expected = rotate(x64, {wide(cosines), wide(sines)}, at::kDouble);
        expected.backward(wide(dy));
        auto y = at::empty_like(x), dx = at::empty_like(x);
        device::with_numbers(dtype, [&]<class Numbers>(Numbers) {
          using Stored = typename Numbers::Stored;
          const auto run = [&](const at::Tensor& from, const at::Tensor& to, bool back) {
            const rotary_elements::Heads<Numbers> heads{
                .x = static_cast<const Stored*>(from.const_data_ptr()),
                .y = static_cast<Stored*>(to.data_ptr()),
                .cosines = static_cast<const Stored*>(cosines.const_data_ptr()),
                .sines = static_cast<const Stored*>(sines.const_data_ptr()),
                .count = 2 * sequence * 3,
                .heads = 3,
                .width = width,
                .positions = cosines.numel() / width,
                .back = back};
            const auto turn_all = [&](auto count) {
              for (int64_t i = rotary_elements::packs_of<count>(heads); i-- > 0;)
                rotary_elements::turn<count>(heads, i);
            };
            turn_all(std::integral_constant<int, 1>());
            const auto once = to.clone();
            if (width % 8 == 0) turn_all(std::integral_constant<int, 4>());
            EXPECT_TRUE(at::equal(to, once));
          };
          run(x, y, false);
          run(dy, dx, true);
        });
        EXPECT_LE(apart(y, expected.detach()), unit_of(dtype)) << c10::toString(dtype);
        EXPECT_LE(apart(dx, x64.grad()), unit_of(dtype)) << c10::toString(dtype);
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
