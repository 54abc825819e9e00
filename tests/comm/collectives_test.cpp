// Every collective against its closed form: worlds, sizes, dtypes, in place and staged.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "zero/comm/group.h"

namespace zero::comm {
namespace {

constexpr int64_t kSizes[] = {0, 1, 7, 64, 100'003};

// Returns the value of element i of rank r: a small integer, exact in every dtype and in sums.
int64_t element(int rank, int64_t i) { return (rank + 1) + i % 5; }

at::Tensor make(Group& group, int64_t numel, at::ScalarType dtype, bool shared) {
  return shared ? group.empty(numel, dtype, Category::communication) : at::empty({numel}, dtype);
}

void fill(const at::Tensor& tensor, const std::function<int64_t(int64_t)>& value) {
  auto integers = at::empty({tensor.numel()}, at::kLong);
  auto* out = integers.data_ptr<int64_t>();
  for (int64_t i = 0; i < tensor.numel(); ++i) out[i] = value(i);
  tensor.copy_(integers);
}

::testing::AssertionResult holds(const at::Tensor& tensor,
                                 const std::function<int64_t(int64_t)>& value) {
  auto expected = at::empty_like(tensor);
  fill(expected, value);
  if (at::equal(tensor, expected)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "wrong values in " << tensor.numel() << " elements of " << tensor.scalar_type();
}

struct Case {
  int world;  // the ranks of each host
  bool shared;
  int hosts = 1;
};

class Collectives : public ::testing::TestWithParam<Case> {
 protected:
  void on_every_rank(const std::function<void(Group&)>& body) {
    run_as_hosts(GetParam().hosts, GetParam().world,
                 [&](std::shared_ptr<Group> group) { body(*group); });
  }
};

TEST_P(Collectives, AllGatherPutsSlicesInRankOrder) {
  on_every_rank([&](Group& group) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kInt, at::kLong,
                             at::kByte, at::kBool}) {
      for (const auto n : kSizes) {
        auto input = make(group, n, dtype, GetParam().shared);
        auto output = make(group, n * group.size(), dtype, GetParam().shared);
        fill(input, [&](int64_t i) { return element(group.rank(), i); });
        group.all_gather(output, input, "unit").wait();
        EXPECT_TRUE(
            holds(output, [&](int64_t i) { return element(static_cast<int>(i / n), i % n); }));
      }
    }
  });
}

TEST_P(Collectives, AllGatherWorksInPlace) {
  on_every_rank([&](Group& group) {
    for (const auto n : kSizes) {
      auto output = make(group, n * group.size(), at::kFloat, GetParam().shared);
      auto input = output.narrow(0, group.rank() * n, n);
      fill(input, [&](int64_t i) { return element(group.rank(), i); });
      group.all_gather(output, input).wait();
      EXPECT_TRUE(
          holds(output, [&](int64_t i) { return element(static_cast<int>(i / n), i % n); }));
    }
  });
}

TEST_P(Collectives, ReduceScatterSumsThisRanksSlice) {
  on_every_rank([&](Group& group) {
    const int world = group.size();
    for (const auto dtype :
         {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kInt, at::kLong, at::kByte}) {
      for (const auto n : kSizes) {
        auto input = make(group, n * world, dtype, GetParam().shared);
        auto output = make(group, n, dtype, GetParam().shared);
        fill(input, [&](int64_t i) { return element(group.rank(), i); });
        group.reduce_scatter(output, input, "unit").wait();
        const auto offset = group.rank() * n;
        EXPECT_TRUE(holds(output, [&](int64_t i) {
          return world * (world + 1) / 2 + world * ((offset + i) % 5);
        }));
      }
    }
  });
}

TEST_P(Collectives, ReduceScatterMayWriteIntoItsInput) {
  on_every_rank([&](Group& group) {
    const int world = group.size();
    for (const auto n : kSizes) {
      auto input = make(group, n * world, at::kFloat, GetParam().shared);
      const auto offset = group.rank() * n;
      auto output = input.narrow(0, offset, n);
      fill(input, [&](int64_t i) { return element(group.rank(), i); });
      group.reduce_scatter(output, input).wait();
      EXPECT_TRUE(holds(
          output, [&](int64_t i) { return world * (world + 1) / 2 + world * ((offset + i) % 5); }));
    }
  });
}

TEST_P(Collectives, AllReduceSumsEverywhere) {
  on_every_rank([&](Group& group) {
    const int world = group.size();
    for (const auto dtype :
         {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kInt, at::kLong, at::kByte}) {
      for (const auto n :
           {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{64}, int64_t{4096}, int64_t{600'011}}) {
        auto tensor = make(group, n, dtype, GetParam().shared);
        fill(tensor, [&](int64_t i) { return element(group.rank(), i); });
        group.all_reduce(tensor, "norm").wait();
        EXPECT_TRUE(
            holds(tensor, [&](int64_t i) { return world * (world + 1) / 2 + world * (i % 5); }));
      }
    }
  });
}

TEST_P(Collectives, BroadcastCopiesTheRootsTensor) {
  on_every_rank([&](Group& group) {
    for (int root = 0; root < group.size(); ++root) {
      for (const auto n : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{64}, int64_t{600'011}}) {
        auto tensor = make(group, n, at::kFloat, GetParam().shared);
        fill(tensor, [&](int64_t i) { return element(group.rank(), i); });
        group.broadcast(tensor, root, "weights").wait();
        EXPECT_TRUE(holds(tensor, [&](int64_t i) { return element(root, i); }));
      }
    }
  });
}

TEST_P(Collectives, AllToAllTransposesSlices) {
  on_every_rank([&](Group& group) {
    for (const auto n : kSizes) {
      auto input = make(group, n * group.size(), at::kInt, GetParam().shared);
      auto output = make(group, n * group.size(), at::kInt, GetParam().shared);
      fill(input, [&](int64_t i) { return 1000 * group.rank() + i / n; });
      group.all_to_all(output, input, "experts").wait();
      EXPECT_TRUE(holds(output, [&](int64_t i) { return 1000 * (i / n) + group.rank(); }));
    }
  });
}

TEST_P(Collectives, SeveralInFlightKeepTheirOrder) {
  on_every_rank([&](Group& group) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int k = 0; k < 20; ++k) {
      auto tensor = make(group, 10'000 + k, at::kFloat, GetParam().shared);
      fill(tensor, [&](int64_t) { return k * (group.rank() + 1); });
      tensors.push_back(tensor);
      works.push_back(group.all_reduce(tensor, "flight " + std::to_string(k)));
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) work->wait();
    const int sum = group.size() * (group.size() + 1) / 2;
    for (int k = 0; k < 20; ++k) {
      EXPECT_TRUE(holds(tensors[static_cast<size_t>(k)], [&](int64_t) { return k * sum; }));
      EXPECT_TRUE(works[static_cast<size_t>(k)].done());
    }
    group.barrier("end");
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives,
                         ::testing::Values(Case{1, true}, Case{2, true}, Case{3, true},
                                           Case{4, true}, Case{7, true}, Case{1, false},
                                           Case{2, false}, Case{3, false}, Case{4, false},
                                           Case{7, false}),
                         [](const auto& info) {
                           return (info.param.shared ? "Shared" : "Staged") +
                                  std::to_string(info.param.world);
                         });

INSTANTIATE_TEST_SUITE_P(Hosts, Collectives,
                         ::testing::Values(Case{1, true, 2}, Case{1, false, 3}, Case{2, true, 2},
                                           Case{2, false, 2}, Case{2, true, 3}, Case{3, true, 2},
                                           Case{1, true, 5}),
                         [](const auto& info) {
                           return (info.param.shared ? "Shared" : "Staged") +
                                  std::to_string(info.param.hosts) + "x" +
                                  std::to_string(info.param.world);
                         });

}  // namespace
}  // namespace zero::comm
