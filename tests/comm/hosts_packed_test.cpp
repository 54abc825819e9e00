// Packed exponents between hosts: every bit arrives, and the bytes are those of the formula.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/comm/world.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/partition/link_bytes.h"

namespace zero::comm {
namespace {

using ::testing::HasSubstr;

const LinkWire kPacked{.packed = true};

// Numbers as of weights and gradients; or of all exponents, so that most have no code.
at::Tensor values(int rank, int64_t numel, at::ScalarType dtype, bool alike) {
  std::mt19937 random(static_cast<unsigned>(rank) + 17);
  auto tensor = at::empty({numel}, at::kFloat);
  auto* out = tensor.data_ptr<float>();
  for (int64_t i = 0; i < numel; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    const float unit = static_cast<float>(bits >> 8U) * 0x1p-24F - 0.5F;
    out[i] = alike ? unit : std::ldexp(unit, static_cast<int>(bits & 127U) - 64);
  }
  return tensor.to(dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

class PackedHosts : public ::testing::TestWithParam<World> {
 protected:
  static void on_hosts(const std::function<void(Group&)>& body) {
    run_as_hosts(GetParam().hosts, GetParam().local_size,
                 [&](std::shared_ptr<Group> group) { body(*group); });
  }
  static partition::Cluster cluster() { return {GetParam().hosts, GetParam().local_size}; }
  static partition::Wire formula_of(at::ScalarType dtype) {
    return {.bits = 8 * static_cast<int64_t>(c10::elementSize(dtype)), .packed = true};
  }
  // Returns the bytes that have left a host, as the traffic counts them.
  static int64_t counted(Group& group, Collective collective) {
    return group.traffic().count(collective).link_bytes * GetParam().local_size;
  }
};

TEST_P(PackedHosts, GatherEveryBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool alike : {true, false}) {
      for (const int64_t n : {64, 1001, 1'200'007}) {
        on_hosts([&](Group& group) {
          auto output = group.empty(n * group.size(), dtype, Category::communication);
          auto input = output.narrow(0, group.rank() * n, n);
          input.copy_(values(group.rank(), n, dtype, alike));
          group.all_gather(output, input, "unit", kPacked).wait();
          for (int r = 0; r < group.size(); ++r)
            EXPECT_TRUE(same_bits(output.narrow(0, r * n, n), values(r, n, dtype, alike))) << r;
          const int64_t formula =
              all_gather_link_bytes(cluster(), n * group.size(), formula_of(dtype));
          const int64_t whole =
              all_gather_link_bytes(cluster(), n * group.size(), {.bits = formula_of(dtype).bits});
          // Values that do not fit follow in a rest, which is counted.
          if (alike) {
            EXPECT_EQ(counted(group, Collective::all_gather), formula);
          } else {
            EXPECT_GT(counted(group, Collective::all_gather), formula);
          }
          EXPECT_LT(formula, whole);
        });
      }
    }
  }
}

// The sum has the bits of one that leaves unpacked.
TEST_P(PackedHosts, AddWhatTheyWouldAddUnpacked) {
  for (const auto& [dtype, into] : std::vector<std::pair<at::ScalarType, at::ScalarType>>{
           {at::kFloat, at::kFloat}, {at::kBFloat16, at::kFloat}, {at::kBFloat16, at::kBFloat16}}) {
    for (const bool alike : {true, false}) {
      for (const int64_t n : {64, 1001, 600'007}) {
        on_hosts([&, dtype = dtype, into = into](Group& group) {
          auto input = group.empty(n * group.size(), dtype, Category::communication);
          input.copy_(values(group.rank(), input.numel(), dtype, alike));
          auto expected = at::empty({n}, into);
          group.reduce_scatter(expected, input, "as they are").wait();
          const int64_t before = counted(group, Collective::reduce_scatter);
          auto output = at::empty({n}, into);
          group.reduce_scatter(output, input, "packed", kPacked).wait();
          EXPECT_TRUE(same_bits(output, expected)) << "rank " << group.rank();
          const int64_t packed = counted(group, Collective::reduce_scatter) - before;
          const int64_t formula =
              reduce_scatter_link_bytes(cluster(), n * group.size(), formula_of(dtype));
          if (alike) {
            EXPECT_EQ(packed, formula);
          } else {
            EXPECT_GT(packed, formula);
          }
        });
      }
    }
  }
}

// Some chunks fit and others do not, and calls of all kinds are under way.
TEST_P(PackedHosts, ChunksThatDoNotFitKeepTheirOrder) {
  on_hosts([&](Group& group) {
    constexpr int64_t kNumel = 1'500'000;
    const auto mixed = [&](int rank) {
      auto all = values(rank, kNumel, at::kBFloat16, true);
      all.narrow(0, 500'000, 500'000).copy_(values(rank, 500'000, at::kBFloat16, false));
      return all;
    };
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> held;
    std::vector<Work> works;
    for (int i = 0; i < 3; ++i) {
      outputs.push_back(at::empty({kNumel * group.size()}, at::kBFloat16));
      held.push_back(mixed(group.rank()));
      works.push_back(group.all_gather(outputs.back(), held.back(), "units", kPacked));
      held.push_back(values(group.rank(), 1000 * group.size(), at::kFloat, false));
      held.push_back(at::empty({1000}, at::kFloat));
      works.push_back(group.reduce_scatter(held.back(), held[held.size() - 2], "sum",
                                           i == 1 ? LinkWire{} : kPacked));
    }
    for (auto& work : works) work.wait();
    for (const auto& output : outputs) {
      for (int r = 0; r < group.size(); ++r)
        EXPECT_TRUE(same_bits(output.narrow(0, r * kNumel, kNumel), mixed(r)));
    }
  });
}

TEST_P(PackedHosts, WhatHasNoSuchExponentsIsRefused) {
  on_hosts([&](Group& group) {
    auto output = at::empty({64 * group.size()}, at::kHalf);
    const auto input = at::zeros({64}, at::kHalf);
    EXPECT_THAT(
        zero::message_of<CommError>([&] { group.all_gather(output, input, "halves", kPacked); }),
        HasSubstr("exponents of Half cannot be packed"));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, PackedHosts,
                         ::testing::Values(World{2, 1}, World{2, 2}, World{3, 1}),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace zero::comm
