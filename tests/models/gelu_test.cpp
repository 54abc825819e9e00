#include "zero/models/layers/gelu.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <limits>

namespace zero {
namespace {

// The results in fp64, of the same (rounded) inputs.
struct Reference {
  at::Tensor value;
  at::Tensor slope;
};

Reference reference(const at::Tensor& x) {
  auto input = x.detach().to(at::kDouble).requires_grad_();
  auto y = at::gelu(input, "tanh");
  y.sum().backward();
  return {y.detach(), input.grad()};
}

at::Tensor inputs(int64_t count) {
  return at::cat({at::linspace(-12, 12, count), at::randn({count}),
                  at::tensor({0.0F, -0.0F, 100.0F, -100.0F, 1e4F, -1e4F, 3e38F, -3e38F, 1e-30F})});
}

TEST(TanhGelu, EqualsTheFormulaInFp32) {
  for (const int64_t count : {1, 2, 15, 16, 17, 1000, 20000}) {
    auto x = inputs(count).requires_grad_();
    const auto y = tanh_gelu(x);
    y.sum().backward();
    const auto expected = reference(x);
    EXPECT_TRUE(at::allclose(y.to(at::kDouble), expected.value, 2e-6, 1e-6)) << count;
    // LibTorch's own slope is not a number where x^3 overflows.
    const auto slope = at::where(expected.slope.isnan(), x.detach().gt(0), expected.slope);
    EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble), slope, 2e-6, 1e-6)) << count;
  }
}

TEST(TanhGelu, RoundsOnceInBf16) {
  auto x = inputs(5000).slice(0, 0, -3).to(at::kBFloat16).requires_grad_();
  const auto y = tanh_gelu(x);
  y.sum().backward();
  const auto expected = reference(x);
  // Half a unit in the last place of bf16, and what fp32 loses.
  EXPECT_TRUE(at::allclose(y.to(at::kDouble), expected.value, 0x1.02p-8, 1e-6));
  EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble), expected.slope, 0x1.02p-8, 1e-6));
}

TEST(TanhGelu, KeepsWhatIsNotANumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto y = tanh_gelu(at::full({37}, nan));
  EXPECT_TRUE(y.isnan().all().item<bool>());
}

TEST(TanhGelu, AnElementDoesNotDependOnItsNeighbours) {
  const auto x = at::randn({1001});
  const auto whole = tanh_gelu(x);
  for (const int64_t begin : {1, 3, 500, 990})
    EXPECT_TRUE(at::equal(tanh_gelu(x.slice(0, begin)), whole.slice(0, begin)));
  EXPECT_TRUE(at::equal(tanh_gelu(x.view({7, 143}).t()), whole.view({7, 143}).t()));
}

TEST(TanhGelu, HasASecondDerivative) {
  auto x = at::randn({50}).requires_grad_();
  const auto second = [&](const at::Tensor& y) {
    const auto g = torch::autograd::grad({y.sum()}, {x}, {}, std::nullopt, true)[0];
    return torch::autograd::grad({g.sum()}, {x})[0];
  };
  EXPECT_TRUE(at::allclose(second(tanh_gelu(x)), second(at::gelu(x, "tanh")), 1e-4, 1e-5));
}

TEST(TanhGelu, LeavesOtherDtypesToLibTorch) {
  const auto x = at::randn({33}, at::kDouble);
  EXPECT_TRUE(at::equal(tanh_gelu(x), at::gelu(x, "tanh")));
}

}  // namespace
}  // namespace zero
