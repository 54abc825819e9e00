#include "zero/base/error.h"

#include <gtest/gtest.h>

#include <vector>

namespace zero {
namespace {

const std::vector<std::string> kKeys{"stage", "train_batch_size", "gradient_clipping"};

TEST(DidYouMean, NamesTheNearestKnownWord) {
  EXPECT_EQ(nearest("gradient_cliping", kKeys), "gradient_clipping");
  EXPECT_EQ(nearest("stag", kKeys), "stage");
  EXPECT_EQ(nearest("STAGE", kKeys), "stage");
  EXPECT_EQ(did_you_mean("stge", kKeys), " Did you mean 'stage'?");
}

TEST(DidYouMean, SaysNothingWhenNothingIsNear) {
  EXPECT_EQ(nearest("zzzzzzzzz", kKeys), "");
  EXPECT_EQ(did_you_mean("zzzzzzzzz", kKeys), "");
}

TEST(FormatBytes, UsesBinaryUnits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(512.0 * 1024 * 1024), "512.0 MiB");
}

TEST(Ensure, AbortsWithFileAndLineWhenAnInvariantIsBroken) {
  ensure(true, "holds");
  EXPECT_DEATH(ensure(false, "seven is not eight"), "error_test.cpp:.*seven is not eight");
}

}  // namespace
}  // namespace zero
