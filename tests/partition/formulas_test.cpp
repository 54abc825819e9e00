// The tables of the ZeRO paper (1910.02054), every cell.
#include "zero/partition/formulas.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "tests/support/paper_traffic.h"
#include "zero/base/error.h"

namespace zero::partition {
namespace {

using paper::step_traffic;

constexpr double kGigabyte = 1e9;

double gigabytes(int stage, double parameters, double world) {
  return state_memory(sharding_of_stage(stage), parameters, world).total() / kGigabyte;
}

struct Row {
  double world;
  std::array<double, 3> stages;  // 1, 2, 3
};

TEST(Table1, SevenAndAHalfBillionRoundsHalfUp) {
  // The paper's digits. It rounds half up (41.25 is printed 41.3); below one gigabyte it prints two
  // decimals.
  const std::array<Row, 6> rows{{{1, {120, 120, 120}},
                                 {4, {52.5, 41.3, 30}},
                                 {16, {35.6, 21.6, 7.5}},
                                 {64, {31.4, 16.6, 1.88}},
                                 {256, {30.4, 15.4, 0.47}},
                                 {1024, {30.1, 15.1, 0.12}}}};
  for (const auto& row : rows) {
    for (int stage = 1; stage <= 3; ++stage) {
      const double printed = row.stages[static_cast<size_t>(stage - 1)];
      const double digits = printed < 2 ? 100 : 10;
      EXPECT_DOUBLE_EQ(std::floor(gigabytes(stage, 7.5e9, row.world) * digits + 0.5) / digits,
                       printed)
          << "N = " << row.world << ", stage " << stage;
    }
  }
}

void expect_truncated(double parameters, const std::array<Row, 6>& rows) {
  for (const auto& row : rows) {
    for (int stage = 1; stage <= 3; ++stage) {
      const double printed = row.stages[static_cast<size_t>(stage - 1)];
      const double digits = std::floor(printed) == printed ? 1 : 10;
      EXPECT_DOUBLE_EQ(std::floor(gigabytes(stage, parameters, row.world) * digits) / digits,
                       printed)
          << "N = " << row.world << ", stage " << stage;
    }
  }
}

TEST(Table1, HundredTwentyEightBillionIsTruncatedInThePaper) {
  // Erratum: 513.5 and 257.75 are printed 513 and 257.
  expect_truncated(128e9, {{{1, {2048, 2048, 2048}},
                            {4, {896, 704, 512}},
                            {16, {608, 368, 128}},
                            {64, {536, 284, 32}},
                            {256, {518, 263, 8}},
                            {1024, {513, 257, 2}}}});
  EXPECT_DOUBLE_EQ(gigabytes(1, 128e9, 1024), 513.5);
  EXPECT_DOUBLE_EQ(gigabytes(2, 128e9, 1024), 257.75);
}

TEST(Table1, OneTrillionIsTruncatedInThePaper) {
  // Errata: 4187.5, 4046.875, 4011.71875, 2218.75, 2054.6875 and 2013.671875 are printed without
  // their fractions.
  expect_truncated(1e12, {{{1, {16000, 16000, 16000}},
                           {4, {7000, 5500, 4000}},
                           {16, {4750, 2875, 1000}},
                           {64, {4187, 2218, 250}},
                           {256, {4046, 2054, 62.5}},
                           {1024, {4011, 2013, 15.6}}}});
  EXPECT_DOUBLE_EQ(gigabytes(1, 1e12, 64), 4187.5);
  EXPECT_DOUBLE_EQ(gigabytes(1, 1e12, 256), 4046.875);
  EXPECT_DOUBLE_EQ(gigabytes(1, 1e12, 1024), 4011.71875);
  EXPECT_DOUBLE_EQ(gigabytes(2, 1e12, 64), 2218.75);
  EXPECT_DOUBLE_EQ(gigabytes(2, 1e12, 256), 2054.6875);
  EXPECT_DOUBLE_EQ(gigabytes(2, 1e12, 1024), 2013.671875);
}

TEST(Figure1, StagesOfTheSevenAndAHalfBillionModelOn64Devices) {
  EXPECT_DOUBLE_EQ(gigabytes(0, 7.5e9, 64), 120);
  EXPECT_NEAR(gigabytes(1, 7.5e9, 64), 31.4, 0.05);
  EXPECT_NEAR(gigabytes(2, 7.5e9, 64), 16.6, 0.05);
  EXPECT_NEAR(gigabytes(3, 7.5e9, 64), 1.9, 0.05);
}

TEST(Table2, LargestModelOn32GigabyteDevices) {
  // Billions of parameters at N = 64 data-parallel ranks, one decimal; the paper multiplies the
  // rounded first row by MP.
  const std::array<double, 5> model_parallel{1, 2, 4, 8, 16};
  const std::array<std::array<double, 5>, 3> printed{{{7.6, 15.2, 30.4, 60.8, 121.6},
                                                      {14.4, 28.8, 57.6, 115.2, 230.4},
                                                      {128, 256, 512, 1024, 2048}}};
  for (int stage = 1; stage <= 3; ++stage) {
    const double one = largest_model(sharding_of_stage(stage), 32 * kGigabyte, 64) / 1e9;
    const double rounded = std::round(one * 10) / 10;
    for (size_t i = 0; i < model_parallel.size(); ++i) {
      EXPECT_NEAR(rounded * model_parallel[i], printed[static_cast<size_t>(stage - 1)][i], 1e-9);
      EXPECT_DOUBLE_EQ(
          largest_model(sharding_of_stage(stage), 32 * kGigabyte, 64, model_parallel[i]),
          one * 1e9 * model_parallel[i]);
    }
  }
}

TEST(Table2, WithoutZeroTheLargestModelIsTwoBillion) {
  EXPECT_DOUBLE_EQ(largest_model(sharding_of_stage(0), 32 * kGigabyte, 64), 2e9);
}

TEST(StepTraffic, TwoTwoTwoThreePsi) {
  const double psi = 1e9;
  for (const double world : {2.0, 3.0, 64.0}) {
    const double once = psi * (world - 1) / world;
    for (int stage = 0; stage <= 2; ++stage) {
      EXPECT_DOUBLE_EQ(step_traffic(sharding_of_stage(stage), psi, world).total(), 2 * once);
    }
    EXPECT_DOUBLE_EQ(step_traffic(sharding_of_stage(3), psi, world).total(), 3 * once);
  }
}

TEST(StepTraffic, AccumulationCostsStagesTwoAndThree) {
  const double psi = 1e9;
  const double once = psi / 2;
  EXPECT_DOUBLE_EQ(step_traffic(sharding_of_stage(0), psi, 2, 4).total(), 2 * once);
  EXPECT_DOUBLE_EQ(step_traffic(sharding_of_stage(1), psi, 2, 4).total(), 2 * once);
  EXPECT_DOUBLE_EQ(step_traffic(sharding_of_stage(2), psi, 2, 4).total(), 5 * once);
  EXPECT_DOUBLE_EQ(step_traffic(sharding_of_stage(3), psi, 2, 4).total(), 12 * once);
}

TEST(StepTraffic, AGroupOfOneSendsNothing) {
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_DOUBLE_EQ(step_traffic(sharding_of_stage(stage), 1e9, 1).total(), 0);
  }
}

TEST(UnitMemory, EqualsTheFormulaPlusDeclaredPadding) {
  for (const int world : {1, 2, 3, 4}) {
    const Layout layout({{"a", 1000, 2, 0}, {"b", 77, 2, 0}, {"c", 1, 2, 0}}, world, 1 << 20);
    for (int stage = 0; stage <= 3; ++stage) {
      const auto placement = sharding_of_stage(stage);
      const auto bytes = unit_memory(layout, 0, placement, {});
      const auto formula = state_memory(placement, 1078, world);
      EXPECT_NEAR(static_cast<double>(bytes.total() - bytes.padding), formula.total(), 3)
          << "content / N is rounded down once per state";
      EXPECT_EQ(bytes.parameters, 2 * layout.unit(0).numel / (stage >= 3 ? world : 1));
      EXPECT_EQ(bytes.optimizer, 12 * layout.unit(0).numel / (stage >= 1 ? world : 1));
    }
  }
}

// bf16 with AdamW's moments in 8 bits: 4 bytes of master weights, two codes, and 8 for 64 elements.
TEST(UnitMemory, HasScalesOfEightBitStates) {
  constexpr StateBytes kBytes{.parameter = 2, .gradient = 2, .optimizer = 6, .scales = 8};
  for (const int world : {1, 2, 3, 4}) {
    const Layout layout({{"a", 1000, 2, 0}, {"b", 77, 2, 0}}, world, 1 << 20);
    for (int stage = 0; stage <= 3; ++stage) {
      const auto placement = sharding_of_stage(stage);
      const auto bytes = unit_memory(layout, 0, placement, kBytes);
      EXPECT_EQ(bytes.optimizer, 392 * (layout.unit(0).numel / (stage >= 1 ? world : 1)) / 64);
      EXPECT_NEAR(static_cast<double>(bytes.total() - bytes.padding),
                  state_memory(placement, 1077, world, kBytes).total(), 3);
    }
  }
  EXPECT_DOUBLE_EQ(state_memory({}, 64, 1, kBytes).optimizer, 392);
}

TEST(PlacementOfStage, OnlyStagesZeroToThreeExist) {
  EXPECT_THROW(sharding_of_stage(-1), ConfigError);
  EXPECT_THROW(sharding_of_stage(4), ConfigError);
}

}  // namespace
}  // namespace zero::partition
