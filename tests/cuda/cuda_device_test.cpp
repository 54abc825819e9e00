// A device's duties, tested on a real one: its kernels beside their references, training beside the
// CPU's, the stages beside each other. Without a device this program says so and is skipped.
//
//   ZERO_CHECK_DEVICE=cuda    a device is asked for: without one the program fails
//   ZERO_CHECK_DEVICE=cpu     the CPU stands in, to try the tests themselves
//
// It is compiled a second time for the simulated device (ZERO_CHECK_SIMULATED), which works off
// streams as a real one does: so these tests are tried on machines without one.
//
// Note [Ranks on one device]
// NCCL takes one rank a device. Several ranks that are threads may share one all the same where the
// host carries what they exchange (comm::ThroughHost): it adds in rank order, so that the stages
// give the same bits, as on the CPU.
#include <ATen/Context.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tests/device/models.h"
#include "tests/optim/test_shard.h"
#include "tests/support/message_of.h"
#include "tests/support/operator_calls.h"
#include "tests/support/temporary_folder.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/comm/through_host.h"
#include "zero/device/memory.h"
#include "zero/device/plugin.h"
#include "zero/device/stream.h"
#include "zero/engine/engine.h"
#include "zero/models/gpt2/gpt2.h"
#include "zero/models/layers/column_sums.h"
#include "zero/models/layers/cross_entropy.h"
#include "zero/models/layers/feed_forward.h"
#include "zero/models/layers/gelu.h"
#include "zero/models/layers/layer_norm.h"
#include "zero/models/layers/rms_norm.h"
#include "zero/models/layers/rotary.h"
#include "zero/models/layers/softmax.h"
#include "zero/models/layers/swiglu.h"
#include "zero/optim/operators.h"
#include "zero/optim/sweeps.h"
#ifdef ZERO_CHECK_SIMULATED
#include "tests/device/own_operators.h"
#include "tests/device/testing.h"
#endif

namespace zero {
namespace {

using at::Tensor;
using ::testing::HasSubstr;

// The arrays under test, and how many there are.
struct Checked {
  c10::DeviceType type = c10::kCPU;
  int count = 1;
};
Checked& checked() {
  static Checked one;
  return one;
}
c10::Device device(int index = 0) {
  if (checked().type == c10::kCPU) return c10::kCPU;
  return {checked().type, static_cast<c10::DeviceIndex>(index % checked().count)};
}

// While it lives, feed-forward layers use epilogues on every device that has them, and the
// simulated one has them.
class WithEpilogues {
#ifdef ZERO_CHECK_SIMULATED
  simulated::OwnOperators own_{"linear_gelu", "linear_gelu_backward"};
#endif
  Epilogues always_{EpilogueUse::always};
};

// --- Kernels

// An array of a shard on the device, with guards around it, which begins `offset` elements behind a
// multiple of a line.
class DeviceArray {
 public:
  DeviceArray(const void* values, int64_t numel, int64_t offset, at::ScalarType dtype)
      : whole_(at::full({numel + offset + 2 * kGuard}, kPattern, dtype).to(device())),
        part_(whole_.narrow(0, kGuard + offset, numel)) {
    fill(values);
  }
  void fill(const void* values) { part_.copy_(host(values)); }
  void read(void* into) const { host(into).copy_(part_); }
  void* data() const { return part_.data_ptr(); }
  bool guards_intact() const {
    auto around = whole_.cpu();
    around.narrow(0, part_.storage_offset(), part_.numel()).fill_(kPattern);
    return around.eq(kPattern).all().item<bool>();
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr double kPattern = 0.375;  // a number of every format
  Tensor host(const void* values) const {
    return at::from_blob(const_cast<void*>(values), part_.sizes(), part_.scalar_type());
  }
  Tensor whole_, part_;
};

// The arrays of a shard on the device, all `aligned`, or each at another offset.
class DeviceShard {
 public:
  DeviceShard(optim::Shard& shard, bool aligned) : shard_(shard), operands_(shard.operands) {
    const auto& operands = shard.operands;
    int64_t offset = aligned ? 0 : 1;
    const auto add = [&](const void* values, at::ScalarType dtype) -> DeviceArray& {
      arrays_.push_back(std::make_unique<DeviceArray>(values, operands.numel, offset, dtype));
      if (!aligned) ++offset;
      return *arrays_.back();
    };
    operands_.device = device();
    operands_.master = static_cast<float*>(add(operands.master, at::kFloat).data());
    for (size_t s = 0; s < operands.state.size(); ++s) {
      if (operands.state[s] == nullptr) continue;
      operands_.state[s] = static_cast<float*>(add(operands.state[s], at::kFloat).data());
    }
    operands_.gradient = add(operands.gradient, operands.gradient_dtype).data();
    gradient_ = arrays_.size() - 1;
    if (operands.parameter != nullptr)
      operands_.parameter = add(operands.parameter, operands.parameter_dtype).data();
  }
  // After the shard's gradient has changed.
  void update(const Optimizer& optimizer, int64_t step, double scale) {
    arrays_[gradient_]->fill(shard_.operands.gradient);
    operands_.gradient_limit = shard_.operands.gradient_limit;
    optim::enqueue_update(optimizer, {step, optim::lr(optimizer)}, scale, operands_);
  }
  // Into the shard's arrays.
  void read() {
    size_t next = 0;
    arrays_[next++]->read(shard_.operands.master);
    for (auto* state : shard_.operands.state)
      if (state != nullptr) arrays_[next++]->read(state);
    if (shard_.operands.parameter != nullptr) arrays_[next + 1]->read(shard_.operands.parameter);
  }
  bool guards_intact() const {
    return std::all_of(arrays_.begin(), arrays_.end(),
                       [](const auto& array) { return array->guards_intact(); });
  }

 private:
  optim::Shard& shard_;
  optim::Operands operands_;
  std::vector<std::unique_ptr<DeviceArray>> arrays_;  // master, states, gradient, parameter
  size_t gradient_ = 0;
};

TEST(DeviceKernels, UpdateAsTheReferenceInBitsForEveryDtypeTailAndAlignment) {
  for (const auto& [name, optimizer] : optim::optimizers()) {
    if (optim::reach(optimizer) != optim::Reach::element) continue;
    for (const bool special : {false, true}) {
      for (const auto gradient : optim::dtypes()) {
        for (const auto parameter : optim::dtypes()) {
          for (const int64_t numel : {1, 3, 4, 67, 1003}) {
            for (const bool aligned : {true, false}) {
              optim::Shard expected(optimizer, numel, 0, gradient, parameter, special);
              optim::Shard found(optimizer, numel, 0, gradient, parameter, special);
              expected.operands.gradient_limit = found.operands.gradient_limit =
                  special ? std::numeric_limits<float>::infinity() : 0.01F;
              DeviceShard on_device(found, aligned);
              for (const int64_t step : {1, 2}) {
                expected.new_gradient(static_cast<uint32_t>(10 + step), special);
                found.new_gradient(static_cast<uint32_t>(10 + step), special);
                optim::update_reference(optimizer, step, optim::lr(optimizer), 0.37,
                                        expected.operands);
                on_device.update(optimizer, step, 0.37);
              }
              on_device.read();
              const auto what =
                  fmt::format("{} {} to {}, {} elements, {}", name, c10::toString(gradient),
                              c10::toString(parameter), numel, aligned ? "aligned" : "misaligned");
              optim::expect_same(found, expected, what);
              EXPECT_TRUE(on_device.guards_intact()) << what;
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(DeviceKernels, UpdateArraysOfManyThreadBlocks) {
  for (const bool aligned : {true, false}) {
    const Optimizer optimizer = AdamW{.lr = 1e-3, .weight_decay = 0.1};
    constexpr int64_t kNumel = (int64_t{1} << 20) + 5;
    optim::Shard expected(optimizer, kNumel, 0, at::kBFloat16, at::kBFloat16, false);
    optim::Shard found(optimizer, kNumel, 0, at::kBFloat16, at::kBFloat16, false);
    DeviceShard on_device(found, aligned);
    optim::update_reference(optimizer, 1, 1e-3, 0.5, expected.operands);
    on_device.update(optimizer, 1, 0.5);
    on_device.read();
    optim::expect_same(found, expected, aligned ? "aligned" : "misaligned");
    EXPECT_TRUE(on_device.guards_intact());
  }
}

TEST(DeviceKernels, AddSquaresAsTheCpuInBitsAndSayWhetherAllIsFinite) {
  for (const auto dtype : optim::dtypes()) {
    for (const int64_t numel : {0, 1, 31, 33, 16383, 16384, 16385, 150001, 5000011}) {
      for (const bool special : {false, true}) {
        for (const int64_t offset : {0, 1}) {
          auto values = at::empty({numel}, dtype);
          optim::Numbers numbers(7, special);
          for (int64_t i = 0; i < numel; ++i)
            optim::narrow(values.data_ptr(), dtype, i, numbers.next());
          const auto expected = optim::squared_norm(values.const_data_ptr(), dtype, numel);
          const auto there = at::zeros({numel + offset}, dtype).to(device());
          there.narrow(0, offset, numel).copy_(values);
          const auto sums = at::full({2}, -1, at::TensorOptions(at::kDouble).device(device()));
          optim::squared_norm(there.narrow(0, offset, numel), sums);
          const auto found = sums.cpu();
          const auto what = fmt::format("{}, {} elements, offset {}, {}", c10::toString(dtype),
                                        numel, offset, special ? "special" : "ordinary");
          EXPECT_EQ(found[1].item<double>(), expected.finite ? 0 : 1) << what;
          if (expected.finite) {
            EXPECT_EQ(found[0].item<double>(), expected.sum) << what;
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(DeviceKernels, AddSquaresOfManyArraysAtOnceAsOneByOne) {
  std::vector<Tensor> there;
  std::vector<optim::SquaredNorm> expected;
  at::manual_seed(3);
  for (int i = 0; i < 300; ++i) {
    const auto dtype = optim::dtypes()[static_cast<size_t>(i) % optim::dtypes().size()];
    auto values = at::randn({i % 7 == 0 ? 0 : 1 + i * 211}).to(dtype);
    if (i == 100) values[50].fill_(std::numeric_limits<float>::infinity());
    expected.push_back(optim::squared_norm(values.const_data_ptr(), dtype, values.numel()));
    there.push_back(values.to(device()));
  }
  const auto sums = at::full({300, 2}, -1, at::TensorOptions(at::kDouble).device(device()));
  optim::squared_norms(there, sums);
  const auto found = sums.cpu();
  for (int64_t i = 0; i < 300; ++i) {
    const auto& one = expected[static_cast<size_t>(i)];
    EXPECT_EQ(found[i][1].item<double>(), one.finite ? 0 : 1) << i;
    if (one.finite) {
      EXPECT_EQ(found[i][0].item<double>(), one.sum) << i;
    }
  }
}

// The losses and gradients of rows as they lie in `linear_cross_entropy` and in other ways.
TEST(DeviceKernels, SoftmaxCrossEntropyAsTheReferenceForEveryDtypeTailAndStride) {
  for (const auto dtype : optim::dtypes()) {
    // The error that rounding the result makes, relative to its largest.
    const double unit = dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    for (const int64_t vocabulary : {1, 7, 64, 1003, 50257}) {
      for (const int64_t stride : {vocabulary, (vocabulary + 63) / 64 * 64, vocabulary + 3}) {
        at::manual_seed(vocabulary);
        constexpr int64_t kRows = 37;
        const auto values = at::randn({kRows, vocabulary}).mul_(8).to(dtype);
        auto targets = at::randint(vocabulary, {kRows}, at::kLong);
        targets[2] = kIgnoredTarget;
        const auto scales = targets.ne(kIgnoredTarget).to(at::kFloat).mul_(0.2);
        const double smoothing = stride == vocabulary ? 0 : 0.1;
        auto expected = values.to(at::kFloat, false, /*copy=*/true);
        const auto loss =
            softmax_cross_entropy_reference_(expected, targets, scales, true, smoothing);
        const auto whole = at::full({kRows, stride}, 375, dtype).to(device());
        auto found = whole.narrow(1, 0, vocabulary);
        const auto what =
            fmt::format("{}, {} words, rows {} apart", c10::toString(dtype), vocabulary, stride);
        for (const bool gradient : {false, true}) {
          found.copy_(values);
          const auto sum = softmax_cross_entropy_(found, targets.to(device()), scales.to(device()),
                                                  gradient, smoothing);
          EXPECT_NEAR(sum.item<double>(), loss.item<double>(), 1e-5 * loss.item<double>() + 1e-5)
              << what;
        }
        EXPECT_LE((found.cpu().to(at::kFloat) - expected).abs().max().item<double>(), 0.2 * unit)
            << what;
        EXPECT_EQ(found[2].abs().max().item<float>(), 0) << what;
        EXPECT_TRUE(whole.narrow(1, vocabulary, stride - vocabulary).eq(375).all().item<bool>())
            << what;
        if (HasFailure()) return;
      }
    }
  }
}

// Each result is as far from the expected one as a part of that one's norm at the most.
template <class Results>
void expect_near_by_norm(const Results& found, const Results& expected, double part,
                         const std::string& what) {
  for (size_t i = 0; i < found.size(); ++i) {
    const auto there = expected[i].detach().to(at::kDouble);
    const auto apart =
        (found[i].detach().cpu().to(at::kDouble) - there).norm().template item<double>();
    EXPECT_LE(apart, part * there.norm().template item<double>()) << what << ", result " << i;
  }
}

TEST(DeviceKernels, LinearCrossEntropyIsTheCpusForEveryChunking) {
  for (const auto dtype : optim::dtypes()) {
    const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
    at::manual_seed(5);
    const auto hidden = at::randn({70, 32}).mul_(0.3).to(dtype);
    const auto weight = at::randn({1003, 32}).mul_(0.3).to(dtype);
    auto targets = at::randint(1003, {70}, at::kLong);
    targets[11] = kIgnoredTarget;
    const auto on = [&](c10::Device where, int64_t rows) {
      const auto x = hidden.to(where).detach().requires_grad_();
      const auto w = weight.to(where).detach().requires_grad_();
      const auto loss =
          linear_cross_entropy(x, w, targets.to(where), {.logits_bytes = 4 * 1003 * rows});
      loss.backward();
      return std::array{loss.detach(), x.grad(), w.grad()};
    };
    const auto expected = on(c10::kCPU, 70);
    for (const int64_t rows : {1, 9, 70}) {
      expect_near_by_norm(on(device(), rows), expected, 2 * unit,
                          fmt::format("{}, {} rows at a time", c10::toString(dtype), rows));
    }
  }
}

TEST(DeviceKernels, ColumnSumsAreLibTorchs) {
  for (const auto dtype : optim::dtypes()) {
    const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    for (const int64_t rows : {1, 63, 1000, 3001}) {
      for (const int64_t columns : {1, 33, 768, 2304}) {
        at::manual_seed(rows);
        const auto matrix = at::randn({rows, columns}).to(dtype);
        const auto expected = matrix.to(at::kDouble).sum(0);
        auto found = at::empty({columns}, at::TensorOptions(dtype).device(device()));
        column_sums_into(found, matrix.to(device()));
        EXPECT_LE((found.cpu().to(at::kDouble) - expected).norm().item<double>(),
                  2 * unit * expected.norm().item<double>())
            << fmt::format("{}, {} rows of {}", c10::toString(dtype), rows, columns);
      }
    }
  }
}

TEST(DeviceKernels, LayerNormIsLibTorchs) {
  for (const auto dtype : optim::dtypes()) {
    // The CPU's kernel of LibTorch adds up weights' gradients in 16 bits.
    if (device().type() != c10::kCUDA && dtype != at::kFloat) continue;
    const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
    for (const int64_t rows : {1, 7, 1003}) {
      for (const int64_t columns : {64, 384, 768, 1600, 4096}) {
        at::manual_seed(rows);
        const auto x = at::randn({rows, columns}).mul_(3).add_(1).to(dtype);
        const auto dy = at::randn({rows, columns}).to(dtype);
        const auto weight = at::randn({columns}).to(dtype);
        const auto gradients = [&](c10::Device where, at::ScalarType as) {
          const auto leaf = [&](const Tensor& t) {
            return t.to(where).to(as).detach().requires_grad_();
          };
          const auto a = leaf(x), w = leaf(weight), b = leaf(at::zeros({columns}));
          const auto y = layer_norm(a, w, b, 1e-5);
          y.backward(dy.to(where).to(as));
          return std::array{y.detach(), a.grad(), w.grad(), b.grad()};
        };
        const auto expected = gradients(c10::kCPU, at::kDouble);
        expect_near_by_norm(gradients(device(), dtype), expected, unit,
                            fmt::format("{}, {} rows of {}", c10::toString(dtype), rows, columns));
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DeviceKernels, LayerNormOfASumIsThatOfLibTorch) {
  for (const auto dtype : optim::dtypes()) {
    if (device().type() != c10::kCUDA && dtype != at::kFloat) continue;
    const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-9 : 0x1p-6;
    for (const int64_t rows : {1, 7, 1003}) {
      for (const int64_t columns : {64, 768, 1600, 4096}) {
        at::manual_seed(rows);
        const auto x = at::randn({rows, columns}).mul_(3).add_(1).to(dtype);
        const auto branch = at::randn({rows, columns}).to(dtype);
        const auto dy = at::randn({rows, columns}).to(dtype);
        const auto dsum = at::randn({rows, columns}).to(dtype);
        const auto weight = at::randn({columns}).to(dtype);
        const auto gradients = [&](c10::Device where, at::ScalarType as) {
          const auto there = [&](const Tensor& t) { return t.to(where).to(as).detach(); };
          const auto leaf = [&](const Tensor& t) { return there(t).requires_grad_(); };
          const auto a = leaf(x), r = leaf(branch), w = leaf(weight),
                     b = leaf(at::zeros({columns}));
          const auto both = add_layer_norm(r * 1, a, w, b, 1e-5);
          at::sum(both.norm * there(dy) + both.sum * there(dsum)).backward();
          return std::array{both.sum.detach(), both.norm.detach(), a.grad(),
                            r.grad(),          w.grad(),           b.grad()};
        };
        const auto expected = gradients(c10::kCPU, at::kDouble);
        expect_near_by_norm(gradients(device(), dtype), expected, unit,
                            fmt::format("{}, {} rows of {}", c10::toString(dtype), rows, columns));
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DeviceKernels, GeluIsLibTorchs) {
  for (const auto dtype : optim::dtypes()) {
    const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
    for (const int64_t numel : {1, 7, 1000, 100003}) {
      at::manual_seed(numel);
      const auto x = at::randn({numel}).mul_(3).to(dtype);
      const auto dy = at::randn({numel}).to(dtype);
      const auto x64 = x.to(at::kDouble).requires_grad_();
      const auto y64 = at::gelu(x64, "tanh");
      y64.backward(dy.to(at::kDouble));
      const auto there = x.to(device()).requires_grad_();
      const auto y = tanh_gelu(there);
      y.backward(dy.to(device()));
      const auto expect_near = [&](const Tensor& found, const Tensor& expected) {
        EXPECT_LE((found.cpu().to(at::kDouble) - expected).norm().item<double>(),
                  unit * expected.norm().item<double>() + 1e-6)
            << fmt::format("{}, {} elements", c10::toString(dtype), numel);
      };
      expect_near(y.detach(), y64.detach());
      expect_near(there.grad(), x64.grad());
      if (!has_tanh_gelu_kernel(there)) continue;
      auto dx = dy.to(device());
      const auto again = tanh_gelu_again(there.detach(), dx);
      EXPECT_TRUE(at::equal(again, y.detach()));
      EXPECT_TRUE(at::equal(dx, there.grad()));
    }
  }
}

// The results of a layer and its inputs' gradients, on the device and in fp32 on the CPU.
using Layer = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;
void expect_as_on_the_cpu(const std::vector<Tensor>& inputs, const Layer& layer,
                          const std::string& what) {
  const auto dtype = inputs.front().scalar_type();
  const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 0x1p-9 : 0x1p-6;
  const auto run = [&](c10::Device where, at::ScalarType as) {
    std::vector<Tensor> leaves;
    for (const auto& input : inputs)
      leaves.push_back(input.to(where).to(as).detach().requires_grad_());
    auto all = layer(leaves);
    auto sum = at::zeros({}, at::TensorOptions(as).device(where));
    for (size_t i = 0; i < all.size(); ++i) {
      const auto phase = static_cast<double>(i);
      const auto wave = at::sin(at::arange(all[i].numel(), at::kFloat) * 0.7 + phase);
      sum = sum + (all[i] * wave.view(all[i].sizes()).to(dtype).to(as).to(where)).sum();
    }
    sum.backward();
    for (const auto& leaf : leaves) all.push_back(leaf.grad());
    return all;
  };
  const auto expected = run(c10::kCPU, at::kFloat);
  expect_near_by_norm(run(device(), dtype), expected, unit, what);
}

TEST(DeviceKernels, FeedForwardWithEpiloguesIsTheCpus) {
  const WithEpilogues with_epilogues;
  for (const auto dtype : optim::dtypes()) {
    for (const auto& [rows, in, inner, out] : {std::array<int64_t, 4>{1, 8, 16, 8},
                                               {37, 64, 256, 64},
                                               {1000, 768, 3080, 768},
                                               {33, 20, 36, 12}}) {
      if (rows == 1000 && device().type() != c10::kCUDA) continue;  // it takes long
      for (const auto layout : {WeightLayout::in_out, WeightLayout::out_in}) {
        for (const bool biased : {true, false}) {
          at::manual_seed(rows);
          const auto matrix = [&](int64_t from, int64_t to) {
            const bool in_out = layout == WeightLayout::in_out;
            return at::randn({in_out ? from : to, in_out ? to : from}).div_(std::sqrt(from));
          };
          std::vector<Tensor> inputs{at::randn({2, rows, in}), matrix(in, inner),
                                     matrix(inner, out)};
          if (biased) {
            inputs.push_back(at::randn({inner}));
            inputs.push_back(at::randn({out}));
          }
          for (auto& input : inputs) input = input.to(dtype);
          const test::OperatorCalls forward("zero::linear_gelu");
          expect_as_on_the_cpu(
              inputs,
              [&](const std::vector<Tensor>& of) {
                return std::vector<Tensor>{feed_forward(of[0], of[1], biased ? of[3] : Tensor(),
                                                        of[2], biased ? of[4] : Tensor(), layout)};
              },
              fmt::format("{}, {} rows, {} to {} to {}, layout {}, {}", c10::toString(dtype), rows,
                          in, inner, out, static_cast<int>(layout), biased));
          const bool uses = !device().is_cpu() && dtype != at::kFloat && in % 8 == 0;
          EXPECT_EQ(forward.count(), uses ? 1 : 0);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(DeviceKernels, FeedForwardWithEpiloguesMakesTheGradientsThatAreWanted) {
  const WithEpilogues with_epilogues;
  at::manual_seed(5);
  std::vector<Tensor> all{at::randn({9, 16}), at::randn({16, 32}), at::randn({32}),
                          at::randn({32, 8}), at::randn({8})};
  const auto layer = [](const std::vector<Tensor>& of) {
    return feed_forward(of[0], of[1], of[2], of[3], of[4], WeightLayout::in_out);
  };
  const auto gradients = [&](auto wanted) {
    std::vector<Tensor> leaves;
    for (size_t i = 0; i < all.size(); ++i)
      leaves.push_back(all[i].to(device()).to(at::kBFloat16).detach().requires_grad_(wanted(i)));
    layer(leaves).sum().backward();
    std::vector<Tensor> found;
    for (const auto& leaf : leaves) found.push_back(leaf.grad());
    return found;
  };
  const auto expected = gradients([](size_t) { return true; });
  for (size_t alone = 0; alone < all.size(); ++alone) {
    const auto found = gradients([&](size_t i) { return i == alone; });
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(found[i].defined(), i == alone) << i;
    if (device().is_cuda()) {  // each epilogue has an algorithm of its own, which may add in
                               // another order
      EXPECT_TRUE(at::allclose(found[alone], expected[alone], 0.02, 0.02)) << alone;
    } else {
      EXPECT_TRUE(at::equal(found[alone], expected[alone])) << alone;
    }
  }
  const auto x = all[0].to(device()).to(at::kBFloat16).requires_grad_();
  std::vector<Tensor> layers{x};
  for (size_t i = 1; i < all.size(); ++i) layers.push_back(all[i].to(device()).to(at::kBFloat16));
  if (device().is_cpu()) return;
  EXPECT_THAT(message_of<Error>(
                  [&] { layer(layers).sum().backward({}, std::nullopt, /*create_graph=*/true); }),
              HasSubstr("feed_forward has no second derivative"));
}

TEST(DeviceKernels, LayersOfLlamaAreTheCpus) {
  for (const auto dtype : optim::dtypes()) {
    if (device().type() != c10::kCUDA && dtype != at::kFloat) continue;
    for (const int64_t rows : {1, 37, 1003}) {
      for (const int64_t columns : {64, 768, 4096}) {
        at::manual_seed(rows);
        const auto what = fmt::format("{}, {} rows of {}", c10::toString(dtype), rows, columns);
        const auto make = [&] { return at::randn({rows, columns}).to(dtype); };
        for (const auto scale : {NormScale::weight, NormScale::weight_and_one}) {
          expect_as_on_the_cpu(
              {make(), make(), at::randn({columns}).to(dtype)},
              [&](const auto& in) {
                const auto [sum, norm] = add_rms_norm(in[0] * 1, in[1], in[2], 1e-5, scale);
                return std::vector{sum, norm, rms_norm(sum, in[2], 1e-5, scale)};
              },
              what);
        }
        expect_as_on_the_cpu(
            {make(), make()},
            [](const auto& in) {
              return std::vector{swiglu(in[0], in[1]), geglu(in[1], in[0])};
            },
            what);
        const auto table = rotary_table({}, 64, rows, rows, c10::kCPU);
        expect_as_on_the_cpu(
            {make().view({1, rows, columns / 64, 64})},
            [&](const auto& in) {
              const auto there = in[0].device();
              return std::vector{rotate(in[0], {table.cosines.to(there), table.sines.to(there)},
                                        in[0].scalar_type())};
            },
            what);
        if (HasFailure()) return;
      }
    }
  }
}

// --- Training

struct Setting {
  int stage = 3;
  int ranks = 1;
  at::ScalarType dtype = at::kFloat;
  int64_t accumulate = 1;
  Optimizer optimizer = AdamW{.lr = 1e-2};
  OffloadDevice offload = OffloadDevice::none;
  bool delayed = false;
  bool host_carried = true;  // else by what the plugin brings
  bool own_gpt = true;       // libzero's GPT-2, else a perceptron
  int64_t steps = 4;
};

std::string describe(const Setting& s) {
  return fmt::format("stage {}, {} ranks, {}, {} micro-batches, {}{}{}{}", s.stage, s.ranks,
                     c10::toString(s.dtype), s.accumulate, s.own_gpt ? "GPT-2" : "perceptron",
                     s.offload == OffloadDevice::cpu    ? ", states on the host"
                     : s.offload == OffloadDevice::nvme ? ", states on a disk"
                                                        : "",
                     s.delayed ? ", delayed" : "", s.host_carried ? "" : ", by the plugin");
}

Config config_of(const Setting& s) {
  Config config;
  config.stage = s.stage;
  config.bf16 = s.dtype == at::kBFloat16;
  config.fp16 = s.dtype == at::kHalf;
  config.gradient_accumulation_steps = s.accumulate;
  config.gradient_clipping = 1.0;
  config.unit_bytes = 8000;
  config.max_live_parameters = 6000;
  config.prefetch_bucket_size = 3000;
  config.one_sided_gather = false;  // as a device gathers
  if (s.offload != OffloadDevice::none) {
    static const TemporaryFolder files;
    config.offload_optimizer.device = s.offload;
    if (s.stage == 3) config.offload_param.device = s.offload;
    if (s.offload == OffloadDevice::nvme)
      config.offload_optimizer.nvme_path = config.offload_param.nvme_path = files.path().string();
  }
  if (s.delayed) config.offload_optimizer.delayed_update_after = 1;
  return config;
}

struct OwnGpt final : simulated::Learner {
  Gpt2 model{Gpt2Config{.vocab_size = 32, .context = 16, .width = 32, .layers = 2, .heads = 4}};
  OwnGpt() { register_module("model", model); }
  Tensor loss(const Tensor& x, const Tensor& y) override { return model->loss(x, y); }
};

// Ranks are threads and share the generator: values that do not need it.
std::shared_ptr<simulated::Learner> make_model(const Setting& s) {
  const auto model = s.own_gpt ? simulated::make<OwnGpt>() : simulated::make<simulated::Mlp>();
  const torch::NoGradGuard no_grad;
  double phase = 0.3;
  for (auto& p : model->parameters())
    p.copy_(torch::sin(torch::arange(p.numel()) * 0.7 + (phase += 1.1)).mul(0.2).view(p.sizes()));
  return model;
}

Tensor loss_of(simulated::Learner& model, const Setting& s, c10::Device on, int rank,
               int64_t number) {
  const auto values = torch::arange(96) * (7 + 2 * rank) + number * 5;
  if (s.own_gpt) {
    const auto words = [&](int64_t salt) {
      return (values + salt).remainder(32).view({6, 16}).to(on);
    };
    return model.loss(words(0), words(3));
  }
  const auto x = torch::sin(values.to(at::kFloat)).view({6, 16}).to(s.dtype);
  return model.loss(x.to(on), values.narrow(0, 0, 6).remainder(8).to(on));
}

struct Outcome {
  std::vector<float> losses;  // of rank 0
  std::vector<double> norms;
  std::vector<Tensor> weights;
  bool operator==(const Outcome& other) const {
    return losses == other.losses && norms == other.norms &&
           std::equal(weights.begin(), weights.end(), other.weights.begin(), other.weights.end(),
                      [](const Tensor& a, const Tensor& b) { return at::equal(a, b); });
  }
};

using Between = std::function<void(Engine&, int64_t step)>;
Outcome train(const Setting& s, const std::shared_ptr<comm::Group>& group,
              const Between& between = {}) {
  const auto model = make_model(s);
  model->to(group->device());
  Engine engine(*model, s.optimizer, config_of(s), group);
  std::vector<Tensor> losses;
  Outcome outcome;
  for (int64_t step = 0; step < s.steps; ++step) {
    for (int64_t m = 0; m < s.accumulate; ++m) {
      const auto loss = loss_of(*model, s, group->device(), group->rank(), step * s.accumulate + m);
      engine.backward(loss);
      losses.push_back(loss.detach());
      const auto result = engine.step();
      if (result.boundary) outcome.norms.push_back(result.grad_norm);
    }
    if (between) between(engine, step);
  }
  for (const auto& loss : losses) outcome.losses.push_back(loss.to(at::kFloat).item<float>());
  for (const auto& name : engine.parameter_names())
    outcome.weights.push_back(engine.parameter(name).to(at::kFloat).cpu());
  return outcome;
}

// --- Ranks: see Note [Ranks on one device].

// The outcome of rank 0.
Outcome on_devices(const Setting& s, const Between& between = {}) {
  Outcome outcome;
  comm::run_as_threads(s.ranks, [&](std::shared_ptr<comm::Group> host) {
    auto group = host;
    const auto own = device(host->rank());
    if (!own.is_cpu()) {
      c10::impl::VirtualGuardImpl(own.type()).setDevice(own);
      // Autograd has one thread a device, on which ranks that share it would wait for each other.
      if (s.ranks > checked().count)
        c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
      comm::MakeBackend carrier;
      if (s.host_carried) carrier = comm::ThroughHost{};
      group = comm::on_device(host, own, carrier);
    }
    auto mine = train(s, group, between);
    if (host->rank() == 0) outcome = std::move(mine);
  });
  return outcome;
}

Outcome on_cpu(const Setting& s, const Between& between = {}) {
  Outcome outcome;
  comm::run_as_threads(s.ranks, [&](std::shared_ptr<comm::Group> host) {
    auto mine = train(s, host, between);
    if (host->rank() == 0) outcome = std::move(mine);
  });
  return outcome;
}

// How far a device may be from the CPU, relative: its products add in another order.
struct Tolerance {
  double loss, norm, weights;
  // Lion takes a step of lr by the sign of a mean alone, which rounding decides where the mean
  // should be zero, as that of the keys' biases is: softmax does not see them. If this is lr, a
  // hundredth of all elements may have taken any of their steps the other way.
  double lr_of_signs = 0;
};
Tolerance tolerance(at::ScalarType dtype) {
  if (dtype == at::kFloat) return {1e-5, 1e-4, 1e-4};
  if (dtype == at::kHalf) return {5e-3, 2e-2, 5e-3};
  return {2e-2, 5e-2, 2e-2};
}

void expect_near(const Outcome& found, const Outcome& expected, const Tolerance& within) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], within.loss * std::abs(expected.losses[i]))
        << "loss " << i;
  }
  ASSERT_EQ(found.norms.size(), expected.norms.size());
  for (size_t i = 0; i < found.norms.size(); ++i) {
    // The norm of a step in fp16 that is left out is infinite.
    if (!std::isfinite(expected.norms[i])) {
      EXPECT_FALSE(std::isfinite(found.norms[i])) << "norm " << i;
      continue;
    }
    EXPECT_NEAR(found.norms[i], expected.norms[i], within.norm * expected.norms[i]) << "norm " << i;
  }
  ASSERT_EQ(found.weights.size(), expected.weights.size());
  int64_t turned = 0, elements = 0;
  for (size_t i = 0; i < found.weights.size(); ++i) {
    auto apart = found.weights[i] - expected.weights[i];
    elements += apart.numel();
    if (within.lr_of_signs > 0) {
      const auto far = apart.abs().gt(within.lr_of_signs);
      const auto steps = static_cast<double>(expected.norms.size());
      EXPECT_LE(apart.abs().max().item<double>(), 2.01 * within.lr_of_signs * steps)
          << "parameter " << i;
      turned += far.sum().item<int64_t>();
      apart.masked_fill_(far, 0);
    }
    EXPECT_LE(apart.norm().item<double>(),
              within.weights * expected.weights[i].norm().item<double>() + 1e-6)
        << "parameter " << i;
  }
  EXPECT_LE(turned, elements / 100);
}

// SGD, whose update is as far off as the gradient is; Adam's may be of another sign where the
// gradient is rounding alone.
constexpr Sgd kSgd{.lr = 0.05, .momentum = 0.9};

TEST(DeviceTraining, IsTheCpusWithinRounding) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const int ranks : {1, 2}) {
        for (const bool own_gpt : {true, false}) {
          const Setting setting{.stage = stage,
                                .ranks = ranks,
                                .dtype = dtype,
                                .optimizer = kSgd,
                                .own_gpt = own_gpt};
          SCOPED_TRACE(describe(setting));
          expect_near(on_devices(setting), on_cpu(setting), tolerance(dtype));
        }
      }
    }
  }
}

TEST(DeviceTraining, HasTheLossesOfTheCpuWithAdamW) {
  for (int stage = 0; stage <= 3; ++stage) {
    const Setting setting{.stage = stage, .ranks = 2, .accumulate = 2};
    SCOPED_TRACE(describe(setting));
    auto within = tolerance(at::kFloat);
    within.loss = within.norm = within.weights = 1e-3;
    expect_near(on_devices(setting), on_cpu(setting), within);
  }
}

TEST(DeviceTraining, HasTheSameBitsAtEveryStage) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int ranks : {1, 2, 3}) {
      Setting setting{.stage = 0, .ranks = ranks, .dtype = dtype};
      const auto first = on_devices(setting);
      for (setting.stage = 1; setting.stage <= 3; ++setting.stage) {
        SCOPED_TRACE(describe(setting));
        EXPECT_TRUE(on_devices(setting) == first);
      }
    }
  }
}

TEST(DeviceTraining, WithEpiloguesIsTheCpusAndHasTheSameBitsAtEveryStage) {
  const WithEpilogues with_epilogues;
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Setting setting{.stage = 0, .ranks = 2, .dtype = dtype, .optimizer = kSgd};
    const test::OperatorCalls backward("zero::linear_gelu_backward");
    const auto first = on_devices(setting);
    EXPECT_EQ(backward.count() > 0, !device().is_cpu());
    expect_near(first, on_cpu(setting), tolerance(dtype));
    for (setting.stage = 1; setting.stage <= 3; ++setting.stage) {
      SCOPED_TRACE(describe(setting));
      EXPECT_TRUE(on_devices(setting) == first);
    }
  }
}

TEST(DeviceTraining, HasTheSameBitsInPairsOfStagesWithAccumulation) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int stage : {0, 2}) {
      const Setting one{.stage = stage, .ranks = 2, .dtype = dtype, .accumulate = 3};
      auto other = one;
      other.stage = stage + 1;
      SCOPED_TRACE(describe(one));
      EXPECT_TRUE(on_devices(one) == on_devices(other));
    }
  }
}

TEST(DeviceTraining, HasTheSameBitsWithStatesElsewhere) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int ranks : {1, 2}) {
        Setting setting{.stage = stage, .ranks = ranks, .dtype = dtype, .accumulate = 2};
        const auto there = on_devices(setting);
        for (const auto elsewhere : {OffloadDevice::cpu, OffloadDevice::nvme}) {
          setting.offload = elsewhere;
          SCOPED_TRACE(describe(setting));
          EXPECT_TRUE(on_devices(setting) == there);
        }
      }
    }
  }
}

TEST(DeviceTraining, HasTheSameBitsWithADelayedUpdate) {
  for (const int stage : {1, 2, 3}) {
    Setting setting{.stage = stage, .ranks = 2, .offload = OffloadDevice::cpu, .delayed = true};
    const auto on_host = on_devices(setting);
    setting.offload = OffloadDevice::nvme;
    SCOPED_TRACE(describe(setting));
    EXPECT_TRUE(on_devices(setting) == on_host);
    expect_near(on_host, on_cpu(setting), tolerance(setting.dtype));
  }
}

TEST(DeviceTraining, HasTheSameBitsWhenItIsRepeated) {
  const Setting setting{.stage = 3, .ranks = 2, .dtype = at::kBFloat16, .accumulate = 2};
  const auto first = on_devices(setting);
  for (int repetition = 0; repetition < 5; ++repetition)
    EXPECT_TRUE(on_devices(setting) == first) << "repetition " << repetition;
}

TEST(DeviceTraining, UpdatesAsTheCpuWithEachOptimizer) {
  constexpr double kLr = 1e-3;
  for (const Optimizer& optimizer : {Optimizer(Sgd{}), Optimizer(kSgd), Optimizer(Adagrad{}),
                                     Optimizer(Lion{.lr = kLr}), Optimizer(AdamW{.lr = kLr})}) {
    const Setting setting{.stage = 2, .ranks = 2, .optimizer = optimizer};
    SCOPED_TRACE(optim::name(optimizer));
    // One sign of Adam's that differs is lr in one weight.
    Tolerance within{1e-3, 1e-3, 1e-2};
    if (std::holds_alternative<Lion>(optimizer)) within.lr_of_signs = kLr;
    expect_near(on_devices(setting), on_cpu(setting), within);
  }
}

TEST(DeviceTraining, GoesOnOnTheCpuFromItsFilesAndBack) {
  for (int stage = 0; stage <= 3; ++stage) {
    const TemporaryFolder folder;
    const Setting setting{.stage = stage, .ranks = 2, .dtype = at::kBFloat16};
    SCOPED_TRACE(describe(setting));
    std::vector<Tensor> saved, loaded;
    const auto weights = [](Engine& engine) {
      std::vector<Tensor> all;
      for (const auto& name : engine.parameter_names()) {
        all.push_back(engine.parameter(name).to(at::kFloat).cpu());
        all.push_back(engine.optimizer_state(name, "exp_avg").cpu());
      }
      return all;
    };
    const auto saves = [&](const char* file) {
      return [&, file](Engine& engine, int64_t step) {
        if (step != 1) return;
        engine.save((folder.path() / file).string());
        auto all = weights(engine);
        if (engine.group().rank() == 0) saved = std::move(all);
      };
    };
    const auto loads = [&](const char* file) {
      return [&, file](Engine& engine, int64_t step) {
        if (step != 0) return;
        engine.load((folder.path() / file).string());
        auto all = weights(engine);
        if (engine.group().rank() == 0) loaded = std::move(all);
      };
    };
    const auto expect_same = [&] {
      ASSERT_EQ(saved.size(), loaded.size());
      for (size_t i = 0; i < saved.size(); ++i) EXPECT_TRUE(at::equal(saved[i], loaded[i])) << i;
    };
    (void)on_devices(setting, saves("device"));
    (void)on_cpu(setting, loads("device"));
    expect_same();
    (void)on_cpu(setting, saves("cpu"));
    (void)on_devices(setting, loads("cpu"));
    expect_same();
  }
}

// By NCCL, a rank a device: what one device can show is that a group of one needs it for nothing.
// Two addends have one sum, so the bits of two ranks are those of any order.
TEST(DeviceTraining, OverThePluginsBackendIsTheCpus) {
#ifdef ZERO_CHECK_SIMULATED
  constexpr int kMost = 1;  // there is no plugin for it
#else
  const int kMost = checked().type == c10::kCPU ? 2 : std::min(checked().count, 8);
#endif
  for (int ranks = 1; ranks <= kMost; ranks *= 2) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      std::vector<Outcome> stages;
      for (int stage = 0; stage <= 3; ++stage) {
        const Setting setting{.stage = stage,
                              .ranks = ranks,
                              .dtype = dtype,
                              .optimizer = kSgd,
                              .host_carried = false};
        SCOPED_TRACE(describe(setting));
        stages.push_back(on_devices(setting));
        expect_near(stages.back(), on_cpu(setting), tolerance(dtype));
        if (ranks <= 2) {
          EXPECT_TRUE(stages.back() == stages.front());
        } else {
          expect_near(stages.back(), stages.front(), tolerance(dtype));
        }
      }
    }
  }
  if (HasFailure()) return;
  std::printf("the plugin's backend: up to %d ranks, a device each\n", kMost);
}

TEST(Device, RefusesByNameWhatIsDoneOnTheCpuAloneAndTheCpuDoesNot) {
  const bool cpu = checked().type == c10::kCPU;
  const auto expect_refusal = [&](const std::string& what, const Config& config) {
    const auto model = simulated::make<simulated::Mlp>();
    model->to(device());
    const auto said = message_of<ConfigError>([&] { Engine engine(*model, AdamW{}, config); });
    EXPECT_EQ(said.find(what + " is for models on the CPU so far") != std::string::npos, !cpu)
        << said;
  };
  Config config;
  config.device_memory = int64_t{1} << 30;
  expect_refusal("device_memory", config);
  if (cpu) return;
  const auto parts = std::make_shared<simulated::Mlp>();
  parts->layers->ptr(0)->to(device());
  EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(*parts, AdamW{}); }),
              HasSubstr("is on cpu, but 'layers.0.weight' is on " + device().str()));
  comm::run_as_threads(2, [&](auto group) {
    const auto model = simulated::make<simulated::Mlp>();
    model->to(device());
    EXPECT_THAT(message_of<ConfigError>([&] { Engine engine(*model, AdamW{}, Config{}, group); }),
                HasSubstr("carries tensors of cpu"));
  });
}

TEST(Device, IsWaitedForAndItsAllocatorTellsThePeak) {
  if (device().is_cpu()) {
    EXPECT_EQ(device_memory(device()).total, 0);
    return;
  }
  wait_for_device(device());
  reset_peak_memory(device());
  const auto before = device_memory(device());
  EXPECT_GT(before.total, 0);
  EXPECT_LE(before.available(), before.total);
  constexpr int64_t kBytes = int64_t{64} << 20;
  auto memory = at::empty({kBytes}, at::TensorOptions(at::kByte).device(device()));
  memory.fill_(3);
  wait_for_device(device());
  EXPECT_GE(device_memory(device()).tensors.peak, before.tensors.peak + kBytes);
  memory = Tensor();
  reset_peak_memory(device());
  EXPECT_EQ(device_memory(device()).tensors.peak, before.tensors.peak);
}

// Says which device is tested. An exit status where there is nothing to do.
std::optional<int> choose_device() {
#ifdef ZERO_CHECK_SIMULATED
  checked() = {c10::kPrivateUse1, simulated::kDevices};
  // Its detector does not see the host's part of ThroughHost. What is read too early is wrong all
  // the same, and tests/device has the engine under the detector.
  simulated::configure({.check = false});
  return std::nullopt;
#else
  constexpr int kSkipped = 77;  // ctest's word for it
  const char* const asked = std::getenv("ZERO_CHECK_DEVICE");
  const std::string name = asked == nullptr ? "" : asked;
  if (name == "cpu") return std::nullopt;
  if (!name.empty() && name != "cuda") {
    std::printf("ZERO_CHECK_DEVICE is '%s'; it may be cuda or cpu\n", asked);
    return 1;
  }
  try {
    load_device_plugin(c10::kCUDA);
  } catch (const ConfigError& error) {
    std::printf("skipped: no CUDA device can be used: %s\n", error.what());
    return name.empty() ? kSkipped : 1;
  }
  const auto count = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  checked() = {c10::kCUDA, static_cast<int>(count)};
  // Bits are compared, so operators must repeat theirs; memory that is new is filled with NaNs.
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  std::printf("%d CUDA devices\n", static_cast<int>(count));
  return std::nullopt;
#endif
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);  // cuBLAS repeats its bits with it
  if (const auto status = zero::choose_device()) return *status;
  return RUN_ALL_TESTS();
}
