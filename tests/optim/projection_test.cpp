// APOLLO's work on whole matrices: it is the paper's algorithm, in the same bits on any threads and
// in any slices, and the projections are what they should be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/thread_counts.h"
#include "zero/optim/projection.h"

namespace zero::optim {
namespace {

std::vector<float> drawn(const Apollo& apollo, const char* name, int64_t step, int64_t length) {
  const auto projection = *projection_of(apollo, {length * 2, length}, {length, 1});
  std::vector<float> values(static_cast<size_t>(projection.rank * length));
  draw_projection(apollo, name, step, projection, values.data());
  return values;
}

TEST(Projection, IsNormalAndChangesWithTheNameTheSeedAndThePeriodAlone) {
  const Apollo apollo{.rank = 50};
  const auto first = drawn(apollo, "w", 1, 401);
  const auto values = torch::tensor(first);
  const auto at_most = [&](double deviations) {
    return values.abs().le(deviations / std::sqrt(50.0)).to(torch::kDouble).mean().item<double>();
  };
  // 20050 numbers: each figure has an error of less than 0.02 in all but a few of a million draws.
  EXPECT_NEAR(values.mean().item<double>() * std::sqrt(50.0), 0, 0.03);
  EXPECT_NEAR(values.square().mean().item<double>() * 50, 1, 0.05);
  EXPECT_NEAR(at_most(0.5), 0.3829, 0.02);
  EXPECT_NEAR(at_most(1), 0.6827, 0.02);
  EXPECT_NEAR(at_most(2), 0.9545, 0.02);
  // Neighbours, also those of a pair, do not follow from each other.
  const auto next = values.slice(0, 1), before = values.slice(0, 0, -1);
  EXPECT_NEAR((next * before).mean().item<double>() * 50, 0, 0.03);

  EXPECT_EQ(drawn(apollo, "w", 200, 401), first);
  EXPECT_NE(drawn(apollo, "w", 201, 401), first);
  EXPECT_NE(drawn(apollo, "v", 1, 401), first);
  EXPECT_NE(drawn(Apollo{.rank = 50, .seed = 1}, "w", 1, 401), first);
  EXPECT_EQ(drawn(Apollo{.rank = 50, .alpha = 3, .update_proj_gap = 9}, "w", 9, 401), first);
}

TEST(Projection, ChannelsAreTheLargerSideWhateverTheStorage) {
  const auto of = [](at::IntArrayRef sizes, at::IntArrayRef strides) {
    const auto p = *projection_of(Apollo{.rank = 9}, sizes, strides);
    return std::vector<int64_t>{p.channels, p.length, p.rank, p.by_rows ? 1 : 0};
  };
  using testing::ElementsAre;
  EXPECT_THAT(of({40, 20}, {20, 1}), ElementsAre(40, 20, 9, 1));
  EXPECT_THAT(of({20, 40}, {40, 1}), ElementsAre(40, 20, 9, 0));
  EXPECT_THAT(of({20, 20}, {20, 1}), ElementsAre(20, 20, 9, 1));
  EXPECT_THAT(of({20, 20}, {1, 20}), ElementsAre(20, 20, 9, 0));
  EXPECT_THAT(of({40, 20}, {1, 40}), ElementsAre(40, 20, 9, 0));
  EXPECT_THAT(of({1, 40}, {40, 1}), ElementsAre(40, 1, 1, 0));
  EXPECT_THAT(of({40, 1}, {1, 1}), ElementsAre(40, 1, 1, 1));
  EXPECT_FALSE(projection_of(Apollo{}, {0, 5}, {5, 1}).has_value());
  EXPECT_FALSE(projection_of(Apollo{}, {5}, {1}).has_value());
  EXPECT_FALSE(projection_of(AdamW{}, {5, 5}, {5, 1}).has_value());
}

struct States {
  explicit States(const Projection& p, torch::ScalarType dtype)
      : exp_avg(torch::zeros({p.channels, p.rank}, dtype)),
        exp_avg_sq(torch::zeros({p.channels, p.rank}, dtype)),
        update_norm(torch::zeros({1}, dtype)) {}
  at::Tensor exp_avg, exp_avg_sq, update_norm;
};

at::Tensor factors_of(const Apollo& apollo, int64_t step, const Projection& projection,
                      const at::Tensor& gradient, const States& states) {
  return channel_factors(
      apollo, "w", step, projection, gradient,
      {states.exp_avg.mutable_data_ptr<float>(), states.exp_avg_sq.mutable_data_ptr<float>(),
       states.update_norm.mutable_data_ptr<float>()});
}

// Returns the direction that is multiplied by lr, its parts scaled one by one.
at::Tensor direction_of(const Apollo& apollo, int64_t step, const Projection& projection,
                        const at::Tensor& gradient, const States& states, int64_t parts) {
  auto direction = gradient.clone();
  const auto factors = factors_of(apollo, step, projection, gradient, states);
  for (int64_t i = 0; i < parts; ++i) {
    const Interval part{direction.numel() * i / parts, direction.numel() * (i + 1) / parts};
    scale_channels(projection, part, factors.const_data_ptr<float>(),
                   direction.mutable_data_ptr<float>() + part.begin);
  }
  return direction;
}

TEST(Projection, DirectionsAreThePapersOnAnyThreadsAndInAnyParts) {
  const int threads = at::get_num_threads();
  for (const auto& apollo :
       {Apollo{.rank = 5, .update_proj_gap = 4}, Apollo{.rank = 1000, .alpha = 3}, Apollo::mini(),
        Apollo{.rank = 2, .norm_growth = 0, .beta1 = 0.5, .beta2 = 0.7, .eps = 1e-3}}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{
             {30, 21}, {21, 30}, {17, 17}, {1, 19}, {19, 1}, {300, 140}}) {
      for (const bool transposed : {false, true}) {
        if (transposed && (sizes[0] == 1 || sizes[1] == 1)) continue;  // both are the same
        const auto projection = *projection_of(
            apollo, sizes,
            transposed ? std::vector<int64_t>{1, sizes[0]} : std::vector<int64_t>{sizes[1], 1});
        SCOPED_TRACE(testing::Message() << "rank " << apollo.rank << " of " << sizes[0] << " x "
                                        << sizes[1] << " transposed " << transposed);
        const auto stored = transposed ? std::vector<int64_t>{sizes[1], sizes[0]} : sizes;
        std::vector<States> ours;
        for (size_t i = 0; i < thread_counts().size(); ++i)
          ours.emplace_back(projection, torch::kFloat);
        const States exact(projection, torch::kDouble);
        bool limited = false;
        bool free = false;
        for (int64_t step = 1; step <= (sizes[0] == 300 ? 2 : 9); ++step) {
          // A large gradient comes among others, and then one that stays: updates shrink and grow.
          // One channel has none.
          const auto index = torch::arange(sizes[0] * sizes[1], torch::kDouble);
          const auto phase = 1.3 * static_cast<double>(std::min<int64_t>(step, 6));
          auto gradient = ((index.square() * 0.013 + phase).cos() * (step == 3  ? 0.5
                                                                     : step < 6 ? 0.01
                                                                                : 0.1))
                              .to(torch::kFloat)
                              .view(stored);
          gradient.select(projection.by_rows ? 0 : 1, 0).zero_();
          at::Tensor first;
          for (size_t i = 0; i < ours.size(); ++i) {
            at::set_num_threads(thread_counts()[i]);
            const auto direction = direction_of(apollo, step, projection, gradient, ours[i],
                                                static_cast<int64_t>(i) * 2 + 1);
            if (i == 0) first = direction;
            EXPECT_TRUE(torch::equal(direction, first));
            EXPECT_TRUE(torch::equal(ours[i].exp_avg_sq, ours[0].exp_avg_sq));
          }
          const auto wanted = gradient.to(torch::kDouble).contiguous();
          const double before = exact.update_norm.item<double>();
          projected_direction_exact(apollo, "w", step, projection,
                                    wanted.mutable_data_ptr<double>(),
                                    {exact.exp_avg.mutable_data_ptr<double>(),
                                     exact.exp_avg_sq.mutable_data_ptr<double>(),
                                     exact.update_norm.mutable_data_ptr<double>()});
          const double norm = exact.update_norm.item<double>();
          if (apollo.norm_growth > 0 && step > 1) {
            const bool at_limit = norm > before * apollo.norm_growth * (1 - 1e-12);
            (at_limit ? limited : free) = true;
            EXPECT_LE(norm, before * apollo.norm_growth * (1 + 1e-12));
          }
          EXPECT_NEAR(wanted.norm().item<double>(), norm * apollo.alpha, 1e-9 * norm);
          EXPECT_LT((first.to(torch::kDouble) - wanted).norm().item<double>(),
                    1e-5 * wanted.norm().item<double>());
          EXPECT_TRUE(
              torch::allclose(ours[0].exp_avg.to(torch::kDouble), exact.exp_avg, 1e-4, 1e-6));
          EXPECT_TRUE(
              torch::allclose(ours[0].exp_avg_sq.to(torch::kDouble), exact.exp_avg_sq, 1e-4, 1e-8));
          EXPECT_NEAR(ours[0].update_norm.item<double>(), norm, 1e-5 * norm);
        }
        if (apollo.norm_growth > 0 && sizes[0] != 300) {
          EXPECT_TRUE(limited && free);
        }
      }
    }
  }
  at::set_num_threads(threads);
}

// The paper's theorem: a factor from r numbers is about sqrt(r / m) of that from all m.
TEST(Projection, FactorsFollowThoseOfAllElements) {
  const int64_t channels = 400, length = 64;
  const auto factors_at = [&](int64_t rank) {
    const Apollo apollo{.rank = rank, .norm_growth = 0};
    const auto projection = *projection_of(apollo, {channels, length}, {length, 1});
    const States states(projection, torch::kFloat);
    at::Tensor factors;
    torch::manual_seed(3);
    for (int64_t step = 1; step <= 5; ++step)
      factors = factors_of(apollo, step, projection, torch::randn({channels, length}), states);
    return factors * std::sqrt(static_cast<double>(length) / static_cast<double>(rank));
  };
  const auto whole = factors_at(length);
  const auto error = [&](int64_t rank) {
    return (factors_at(rank) / whole - 1).abs().mean().item<double>();
  };
  EXPECT_LT(error(32), 0.2);
  EXPECT_GT(error(1), error(32));
}

}  // namespace
}  // namespace zero::optim
