#include <ATen/ops/empty.h>
#include <ATen/ops/slice.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <vector>

#include "tests/optim/test_arrays.h"
#include "tests/optim/test_shard.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/optim/operators.h"
#include "zero/optim/sweeps.h"

namespace zero::optim {
namespace {

TEST(UpdateOperator, EqualsTheReferenceInBits) {
  for (const auto& [name, optimizer] : optimizers()) {
    for (const auto gradient : dtypes()) {
      for (const auto parameter : dtypes()) {
        Shard expected(optimizer, 1003, 1, gradient, parameter, true);
        Shard shard(optimizer, 1003, 1, gradient, parameter, true);
        expected.operands.gradient_limit = shard.operands.gradient_limit = 0.01F;
        if (reach(optimizer) != Reach::element) {
          EXPECT_THROW(enqueue_update(optimizer, {2, lr(optimizer)}, 0.37, shard.operands),
                       ConfigError);
          continue;
        }
        update_reference(optimizer, 2, lr(optimizer), 0.37, expected.operands);
        enqueue_update(optimizer, {2, lr(optimizer)}, 0.37, shard.operands);
        expect_same(shard, expected, name);
      }
    }
  }
}

TEST(UpdateOperator, RefusesTensorsThatDoNotGoTogether) {
  UpdateCall call;
  call.optimizer = Lion();
  const auto wide = at::zeros({8}, at::kFloat);
  const auto low = at::zeros({8}, at::kBFloat16);
  const auto why = [&](const at::Tensor& gradient, const at::Tensor& master,
                       const std::optional<at::Tensor>& parameter,
                       const std::vector<at::Tensor>& states) {
    return message_of<std::exception>(
        [&] { operands_of(call, gradient, master, parameter, states); });
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(why(low, wide, low, {wide}), "nothing was thrown");
  EXPECT_THAT(why(low, wide, low, {}), HasSubstr("Lion has 1 states, and 0 are given"));
  EXPECT_THAT(why(low, wide.slice(0, 1), low, {wide}), HasSubstr("the master weights' array"));
  EXPECT_THAT(why(low, wide, wide, {wide}), HasSubstr("in bf16 or fp16, and not Float"));
  EXPECT_THAT(why(low, wide, low, {at::zeros({16}, at::kFloat).slice(0, 0, 16, 2)}),
              HasSubstr("a state is no contiguous array of 8 elements"));
  EXPECT_THAT(why(at::zeros({8}, at::kLong), wide, low, {wide}), HasSubstr("gradient"));
}

TEST(SquaredNormOperator, EqualsTheReferenceAndSaysWhetherAllIsFinite) {
  const auto values = at::empty({40001}, at::kFloat);
  auto* const data = values.mutable_data_ptr<float>();
  Numbers numbers(3);
  for (int64_t i = 0; i < values.numel(); ++i) data[i] = numbers.next();
  const auto sums = at::empty({2}, at::kDouble);
  const auto* const found = sums.const_data_ptr<double>();
  squared_norm(values, sums);
  EXPECT_EQ(found[0], squared_norm_reference(data, at::kFloat, values.numel()).sum);
  EXPECT_EQ(found[1], 0);
  data[30000] = std::numeric_limits<float>::quiet_NaN();
  squared_norm(values, sums);
  EXPECT_EQ(found[1], 1);
}

}  // namespace
}  // namespace zero::optim
