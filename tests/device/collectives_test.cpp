// The collectives of ranks that are threads: values, rounding, calls that do not fit.
#include "tests/device/collectives.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <vector>

#include "tests/device/testing.h"
#include "tests/support/message_of.h"

namespace zero::simulated {
namespace {

using at::Tensor;

Tensor values(int rank, at::ScalarType type) {
  torch::manual_seed(rank);
  return torch::randn({12}).to(type);
}

TEST(Collectives, HaveTheCpusValues) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const Options& options : schedules(2)) {
      SCOPED_TRACE(describe(options) + ", " + c10::toString(type));
      configure(options);
      constexpr int kRanks = 3;
      Collectives collectives(kRanks);
      const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
      auto total = values(0, type).to(wide);
      std::vector<Tensor> all{values(0, type)};
      for (int r = 1; r < kRanks; ++r) {
        all.push_back(values(r, type));
        total = total + all.back().to(wide);
      }
      const auto sum = total.to(type);
      std::vector<Tensor> gathered(kRanks), reduced(kRanks), everywhere(kRanks), sent(kRanks);
      const std::vector<Tensor> host(all);
      run_ranks(kRanks, [&](int r) {
        const auto i = static_cast<size_t>(r);
        const auto mine = host[i].to(device(r));
        gathered[i] = at::empty({12 * kRanks}, mine.options());
        collectives.all_gather(r, mine, gathered[i]);
        reduced[i] = at::empty({4}, mine.options());
        collectives.reduce_scatter(r, mine, reduced[i]);
        everywhere[i] = mine.clone();
        collectives.all_reduce(r, everywhere[i]);
        sent[i] = mine.clone();
        collectives.broadcast(r, sent[i], 1);
        stream(0, r).synchronize();
      });
      for (size_t i = 0; i < kRanks; ++i) {
        EXPECT_TRUE(at::equal(gathered[i].cpu(), at::cat(all)));
        EXPECT_TRUE(at::equal(reduced[i].cpu(), sum.narrow(0, 4 * static_cast<int64_t>(i), 4)));
        EXPECT_TRUE(at::equal(everywhere[i].cpu(), sum));
        EXPECT_TRUE(at::equal(sent[i].cpu(), all[1]));
      }
      EXPECT_EQ(reports(), "");
      synchronize();
    }
  }
}

TEST(Collectives, GatherInPlace) {
  for (const Options& options : schedules(1)) {
    configure(options);
    Collectives collectives(2);
    std::vector<Tensor> whole(2);
    run_ranks(2, [&](int r) {
      auto& mine = whole[static_cast<size_t>(r)];
      mine = torch::full({8}, 1.0 + r, torch::TensorOptions().device(device(r)));
      collectives.all_gather(r, mine.narrow(0, 4 * r, 4), mine);
      stream(0, r).synchronize();
    });
    for (const auto& each : whole) {
      EXPECT_TRUE(at::equal(each.cpu(), at::cat({torch::ones({4}), torch::ones({4}) * 2})));
    }
    EXPECT_EQ(reports(), "");
    synchronize();
  }
}

TEST(Collectives, CallsThatDoNotFitThrowOnAllRanks) {
  configure({});
  Collectives collectives(2);
  std::vector<std::string> said(2);
  run_ranks(2, [&](int r) {
    const auto x = torch::ones({r == 0 ? 4 : 6}, torch::TensorOptions().device(device(r)));
    said[static_cast<size_t>(r)] = message_of<c10::Error>([&] { collectives.all_reduce(r, x); });
    stream(0, r).synchronize();
  });
  for (const auto& text : said) {
    EXPECT_NE(text.find("rank 0 calls all_reduce of 4 elements, rank 1 all_reduce of 6 elements"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace zero::simulated
