// Quantised messages between hosts: values, bits, bytes, and who is refused.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/comm/world.h"
#include "tests/support/message_of.h"
#include "zero/base/error.h"
#include "zero/comm/group.h"
#include "zero/comm/quantise_kernels.h"
#include "zero/partition/link_bytes.h"

namespace zero::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor rank_values(int rank, int64_t numel, at::ScalarType dtype) {
  auto tensor = at::empty({numel}, at::kFloat);
  auto* out = tensor.data_ptr<float>();
  for (int64_t i = 0; i < numel; ++i)
    out[i] = std::sin(static_cast<float>(i) * 0.37F + static_cast<float>(rank) * 1.9F) *
             static_cast<float>(1 + i % 5);
  return tensor.to(dtype);
}

// Returns what a message of `array` says, in `dtype`.
at::Tensor sent(const at::Tensor& array, const Quantisation& quantisation, at::ScalarType dtype) {
  std::vector<std::byte> message(static_cast<size_t>(wire_bytes(quantisation, array.numel())));
  quantise(message.data(), array.data_ptr(), array.scalar_type(), array.numel(), quantisation);
  auto result = at::empty({array.numel()}, dtype);
  dequantise(result.data_ptr(), dtype, message.data(), array.numel(), quantisation);
  return result;
}

partition::Wire formula_of(const Quantisation& quantisation) {
  return {.bits = quantisation.format == WireFormat::int4 ? 4 : 8, .block = quantisation.block};
}

const std::vector<Quantisation>& wires() {
  static const std::vector<Quantisation> all{
      {WireFormat::int8, 128}, {WireFormat::int4, 64}, {WireFormat::fp8, 192}};
  return all;
}

// One slice goes in one message; one has more chunks than arrays. Neither is whole blocks.
std::vector<int64_t> slices_for(const Quantisation& quantisation) {
  if (quantisation == wires().front()) return {1001, 1'200'007};
  return {1001, 300'007};
}

class QuantisedHosts : public ::testing::TestWithParam<World> {
 protected:
  static int ranks() { return GetParam().hosts * GetParam().local_size; }
  static void on_hosts(const std::function<void(Group&)>& body) {
    run_as_hosts(GetParam().hosts, GetParam().local_size,
                 [&](std::shared_ptr<Group> group) { body(*group); });
  }
  static partition::Cluster cluster() { return {GetParam().hosts, GetParam().local_size}; }
};

TEST_P(QuantisedHosts, AllRanksGatherWhatTheMessagesSay) {
  for (const auto& wire : wires()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t n : slices_for(wire)) {
        on_hosts([&, wire = wire](Group& group) {
          auto output = group.empty(n * group.size(), dtype, Category::communication);
          auto input = output.narrow(0, group.rank() * n, n);
          input.copy_(rank_values(group.rank(), n, dtype));
          group.all_gather(output, input, "unit", LinkWire{wire}).wait();
          for (int r = 0; r < group.size(); ++r)
            EXPECT_TRUE(
                at::equal(output.narrow(0, r * n, n), sent(rank_values(r, n, dtype), wire, dtype)))
                << "rank " << group.rank() << ", slice " << r;
          const auto& count = group.traffic().count(Collective::all_gather);
          EXPECT_EQ(count.link_bytes * GetParam().local_size,
                    all_gather_link_bytes(cluster(), n * group.size(), formula_of(wire)));
        });
      }
    }
  }
}

TEST_P(QuantisedHosts, AGatherFromElsewhereLeavesItsInputAsItIs) {
  on_hosts([&](Group& group) {
    const int64_t n = 5000;
    const auto input = rank_values(group.rank(), n, at::kFloat);
    auto output = at::empty({n * group.size()}, at::kFloat);
    group.all_gather(output, input, "unit", LinkWire{}).wait();
    EXPECT_TRUE(at::equal(input, rank_values(group.rank(), n, at::kFloat)));
    EXPECT_FALSE(at::equal(output.narrow(0, group.rank() * n, n), input));
  });
}

// A host's sum is exact and is quantised once when it leaves; hosts are added in order.
TEST_P(QuantisedHosts, SumsAreOfExactHostsOfWhichTheOthersAreQuantised) {
  const auto [hosts, local_size] = GetParam();
  for (const auto& wire : wires()) {
    for (const auto& [dtype, into] : std::vector<std::pair<at::ScalarType, at::ScalarType>>{
             {at::kFloat, at::kFloat}, {at::kBFloat16, at::kFloat}, {at::kBFloat16, at::kBFloat16}})
      for (const int64_t n : slices_for(wire)) {
        on_hosts([&, wire = wire, dtype = dtype, into = into, hosts = hosts,
                  local_size = local_size](Group& group) {
          auto input = group.empty(n * group.size(), dtype, Category::communication);
          input.copy_(rank_values(group.rank(), input.numel(), dtype));
          auto output = at::empty({n}, into);
          group.reduce_scatter(output, input, "sum", LinkWire{wire}).wait();
          auto total = at::zeros({n}, at::kFloat);
          auto exact = at::zeros({n}, at::kFloat);
          auto largest = 0.0;
          for (int host = 0; host < hosts; ++host) {
            auto partial = at::zeros({n}, at::kFloat);
            for (int r = 0; r < local_size; ++r)
              partial += rank_values(host * local_size + r, input.numel(), dtype)
                             .narrow(0, group.rank() * n, n)
                             .to(at::kFloat);
            total += host == group.topology().host ? partial : sent(partial, wire, at::kFloat);
            exact += partial;
            largest = std::max(largest, partial.abs().max().item<double>());
          }
          EXPECT_TRUE(at::equal(output, total.to(into))) << "rank " << group.rank();
          // Half a step of the coarsest: int4's is 1/7 of a block's largest, e4m3's 1/8 of any.
          EXPECT_LE((output.to(at::kFloat) - exact).abs().max().item<double>(),
                    (hosts - 1) * largest / 14 + largest * hosts / 256);
          const auto& count = group.traffic().count(Collective::reduce_scatter);
          EXPECT_EQ(count.link_bytes * local_size,
                    reduce_scatter_link_bytes(cluster(), n * group.size(), formula_of(wire)));
        });
      }
  }
}

// Calls of all kinds under way at once keep their order on the channels that they share.
TEST_P(QuantisedHosts, SeveralCallsMayBeUnderWay) {
  on_hosts([&](Group& group) {
    const int64_t n = 300'000;
    const LinkWire wire{{WireFormat::int8, 256}};
    std::vector<at::Tensor> gathered;
    std::vector<at::Tensor> sums;
    std::vector<Work> works;
    auto input = rank_values(group.rank(), n * group.size(), at::kFloat);
    const auto slice = rank_values(group.rank(), n, at::kFloat);
    for (int k = 0; k < 4; ++k) {
      gathered.push_back(at::empty({n * group.size()}, at::kFloat));
      sums.push_back(at::empty({n}, at::kFloat));
      const auto chosen = k == 3 ? std::optional<LinkWire>() : std::optional(wire);
      works.push_back(group.all_gather(gathered.back(), slice, "gather", chosen));
      works.push_back(group.reduce_scatter(sums.back(), input, "sum", chosen));
    }
    for (auto& work : works) work.wait();
    for (int k = 1; k < 3; ++k) {
      EXPECT_TRUE(at::equal(gathered[0], gathered[static_cast<size_t>(k)]));
      EXPECT_TRUE(at::equal(sums[0], sums[static_cast<size_t>(k)]));
    }
    EXPECT_TRUE(at::equal(gathered[3].narrow(0, group.rank() * n, n), slice));
    EXPECT_FALSE(at::equal(sums[0], sums[3]));
  });
}

// Later messages bring what one message has lost, so the sum over calls loses less.
TEST_P(QuantisedHosts, FeedbackMakesUpForWhatWasLost) {
  on_hosts([&](Group& group) {
    const int64_t n = 600'011;  // several chunks
    auto input = rank_values(group.rank(), n * group.size(), at::kFloat);
    auto exact = at::empty({n}, at::kFloat);
    group.reduce_scatter(exact, input, "exact").wait();
    const Quantisation quantisation{WireFormat::int4, 128};
    const auto bytes = group.feedback_bytes(quantisation, n);
    EXPECT_EQ(bytes, (GetParam().hosts - 1) * (n + 4 * ((n + 127) / 128)));
    constexpr int kCalls = 10;
    const auto loss = [&](LinkWire wire) {
      auto sum = at::empty({n}, at::kFloat);
      auto total = at::zeros({n}, at::kFloat);
      for (int k = 0; k < kCalls; ++k) {
        group.reduce_scatter(sum, input, "quantised", wire).wait();
        total += sum;
      }
      return (total - exact * kCalls).abs().mean().item<double>();
    };
    const double without = loss({quantisation});
    const double with = loss({quantisation, at::zeros({bytes}, at::kByte), 0.0F});
    EXPECT_LT(with, 0.5 * without);
    EXPECT_GT(with, 0);
  });
}

TEST_P(QuantisedHosts, NameWhoQuantisesOtherwise) {
  std::mutex mutex;
  std::vector<std::string> messages;
  run_as_hosts(GetParam().hosts, GetParam().local_size, [&](std::shared_ptr<Group> group) {
    auto output = group->empty(3000 * group->size(), at::kFloat, Category::communication);
    auto input = output.narrow(0, group->rank() * 3000, 3000);
    input.fill_(1);
    const bool last = group->topology().host == group->topology().hosts - 1;
    try {
      group
          ->all_gather(output, input, "unit",
                       LinkWire{{last ? WireFormat::int4 : WireFormat::int8, 192}})
          .wait();
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      messages.emplace_back(error.what());
    }
  });
  ASSERT_EQ(messages.size(), static_cast<size_t>(ranks()));
  EXPECT_THAT(messages, ::testing::Contains(AllOf(HasSubstr("between hosts int4 by 192"),
                                                  HasSubstr("between hosts int8 by 192"))));
}

TEST_P(QuantisedHosts, WhatCannotBeQuantisedIsRefused) {
  on_hosts([&](Group& group) {
    auto longs = at::zeros({group.size() * 100}, at::kLong);
    auto slice = at::zeros({100}, at::kLong);
    EXPECT_THAT(
        zero::message_of<CommError>([&] { group.all_gather(longs, slice, "", LinkWire{}); }),
        HasSubstr("Long cannot be quantised"));
    auto input = at::zeros({group.size() * 100}, at::kFloat);
    auto output = at::zeros({100}, at::kFloat);
    EXPECT_THAT(zero::message_of<CommError>([&] {
                  group.reduce_scatter(output, input, "", LinkWire{{WireFormat::int8, 100}});
                }),
                HasSubstr("a block of 100 elements"));
    EXPECT_THAT(zero::message_of<CommError>([&] {
                  group.reduce_scatter(output, input, "", LinkWire{{}, at::zeros({7}, at::kByte)});
                }),
                HasSubstr("has 7 elements of Byte"));
  });
}

TEST(QuantisedOnOneHost, NothingCrossesAndNothingIsQuantised) {
  run_as_threads(3, [](std::shared_ptr<Group> group) {
    const int64_t n = 5000;
    const LinkWire wire{{WireFormat::int4, 64}};
    EXPECT_EQ(group->feedback_bytes(wire.quantisation, n), 0);
    auto gathered = at::empty({3 * n}, at::kFloat);
    group->all_gather(gathered, rank_values(group->rank(), n, at::kFloat), "", wire).wait();
    for (int r = 0; r < 3; ++r)
      EXPECT_TRUE(at::equal(gathered.narrow(0, r * n, n), rank_values(r, n, at::kFloat)));
    auto input = rank_values(group->rank(), 3 * n, at::kFloat);
    auto exact = at::empty({n}, at::kFloat);
    auto sum = at::empty({n}, at::kFloat);
    group->reduce_scatter(exact, input, "").wait();
    group->reduce_scatter(sum, input, "", wire).wait();
    EXPECT_TRUE(at::equal(sum, exact));
  });
}

TEST(QuantisedOverAForeignBackend, IsRefusedWhereItSpansHosts) {
  struct Foreign : c10d::Backend {
    Foreign() : c10d::Backend(0, 2) {}
    const std::string getBackendName() const override { return "foreign"; }
  };
  Group group(Transport{.data = c10::make_intrusive<Foreign>(), .topology = Topology{.hosts = 2}});
  auto output = at::empty({200}, at::kFloat);
  auto input = at::empty({100}, at::kFloat);
  EXPECT_THAT(zero::message_of<CommError>([&] { group.all_gather(output, input, "", LinkWire{}); }),
              HasSubstr("a group over a foreign backend cannot quantise"));
}

INSTANTIATE_TEST_SUITE_P(Worlds, QuantisedHosts,
                         ::testing::Values(World{2, 1}, World{2, 2}, World{3, 1}),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace zero::comm
