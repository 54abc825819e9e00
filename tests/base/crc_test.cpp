#include "zero/base/crc.h"

#include <gtest/gtest.h>

#include <string>

namespace zero {
namespace {

// The values are those of RFC 3720, B.4, and the check value of the catalogues of CRCs.
TEST(Crc, IsThatOfPublishedExamples) {
  std::string ascending;
  for (char c = 0; c < 32; ++c) ascending.push_back(c);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
  EXPECT_EQ(crc32c(std::string(ascending.rbegin(), ascending.rend())), 0x113fdb5cu);
}

}  // namespace
}  // namespace zero
