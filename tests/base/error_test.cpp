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

TEST(ParseBytes, ReadsWhatPeopleWrite) {
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("64KiB"), 65536);
  EXPECT_EQ(parse_bytes("6GB"), int64_t{6} << 30);
  EXPECT_EQ(parse_bytes("1.5 gb"), int64_t{3} << 29);
  EXPECT_EQ(parse_bytes("2T"), int64_t{2} << 40);
  EXPECT_EQ(parse_bytes("512 B"), 512);
  for (const auto* text : {"", "GB", "-1", "5 apples", "6GiBB", "6XB", "1e30", "nan"})
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
}

TEST(Ensure, AbortsWithFileAndLineWhenAnInvariantIsBroken) {
  ensure(true, "holds");
  EXPECT_DEATH(ensure(false, "seven is not eight"), "error_test.cpp:.*seven is not eight");
}

}  // namespace
}  // namespace zero
