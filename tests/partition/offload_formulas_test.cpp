// The numbers of ZeRO-Offload (2101.06840), at the digits that it prints.
#include <gtest/gtest.h>

#include <array>

#include "zero/partition/formulas.h"

namespace zero::partition {
namespace {

TEST(OffloadTraffic, FourBytesAParameter) {
  const auto traffic = offload_traffic(1e9);
  EXPECT_DOUBLE_EQ(traffic.down, 2e9);
  EXPECT_DOUBLE_EQ(traffic.up, 2e9);
  EXPECT_DOUBLE_EQ(traffic.total(), 4e9);
}

TEST(OffloadTraffic, AccumulationSendsEveryMicroBatchOrOnce) {
  EXPECT_DOUBLE_EQ(offload_traffic(1e9, 8).down, 16e9);
  EXPECT_DOUBLE_EQ(offload_traffic(1e9, 8).up, 2e9);
  EXPECT_DOUBLE_EQ(offload_traffic(1e9, 8, true).total(), 4e9);
}

TEST(OffloadTraffic, InFp32TwiceAsMuch) {
  EXPECT_DOUBLE_EQ(
      offload_traffic(1e9, 1, false, {.parameter = 4, .gradient = 4, .optimizer = 8}).total(), 8e9);
}

TEST(AdamBytes, OfTheSecondsThatTheOffloadPaperPrints) {
  // fp32 master, m and v read and written, a 2-byte gradient read, a 2-byte parameter written.
  EXPECT_DOUBLE_EQ(adam_bytes(1), 28);
  struct Row {
    double parameters, seconds, gigabytes_per_second;
  };
  const std::array<Row, 5> rows{{{1e9, 0.22, 127.3},
                                 {2e9, 0.51, 109.8},
                                 {4e9, 1.03, 108.7},
                                 {8e9, 2.41, 92.9},
                                 {10e9, 2.57, 108.9}}};
  for (const auto& row : rows) {
    const double rate = adam_bytes(row.parameters) / row.seconds * 1e-9;
    // The printed seconds have two decimals, so the rate has no more than three digits.
    EXPECT_NEAR(rate, row.gigabytes_per_second, 0.1);
    // Twelve channels of DDR4-2666, the memory of the paper's machine, could do 256.
    EXPECT_LT(rate, 256);
  }
}

}  // namespace
}  // namespace zero::partition
