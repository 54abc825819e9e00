#include "zero/store/tier.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace zero {
namespace {

TEST(DeviceLink, CopiesAndCountsWhatPassesBetweenDeviceAndHost) {
  DeviceLink link;
  StreamMark done;  // stays empty: the CPU's copies are done when they return
  std::vector<int> from(1'000'003);
  std::iota(from.begin(), from.end(), 0);
  std::vector<int> to(from.size());
  const auto bytes = static_cast<int64_t>(from.size() * sizeof(int));
  link.down(to.data(), from.data(), bytes, done);
  EXPECT_EQ(to, from);
  EXPECT_EQ(link.counts().down, bytes);
  EXPECT_EQ(link.counts().up, 0);
  link.up(to.data(), from.data(), 12, done);
  link.up(to.data(), from.data(), 0, done);
  EXPECT_EQ(link.counts().up, 12);
  link.copy(to.data(), Tier::host, from.data(), Tier::host, 100);
  link.copy(to.data(), Tier::device, from.data(), Tier::device, 100);
  EXPECT_EQ(link.counts().down, bytes);
  EXPECT_EQ(link.counts().up, 12);
}

}  // namespace
}  // namespace zero
