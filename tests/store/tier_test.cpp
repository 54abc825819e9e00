#include "zero/store/tier.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace zero {
namespace {

TEST(DeviceCopier, CopiesAndCountsWhatPassesBetweenDeviceAndHost) {
  DeviceCopier copier;
  StreamMark done;  // stays empty: the CPU's copies are done when they return
  std::vector<int> from(1'000'003);
  std::iota(from.begin(), from.end(), 0);
  std::vector<int> to(from.size());
  const auto bytes = static_cast<int64_t>(from.size() * sizeof(int));
  copier.down(to.data(), from.data(), bytes, done);
  EXPECT_EQ(to, from);
  EXPECT_EQ(copier.counts().down, bytes);
  EXPECT_EQ(copier.counts().up, 0);
  copier.up(to.data(), from.data(), 12, done);
  copier.up(to.data(), from.data(), 0, done);
  EXPECT_EQ(copier.counts().up, 12);
  copier.copy(to.data(), Tier::host, from.data(), Tier::host, 100);
  copier.copy(to.data(), Tier::device, from.data(), Tier::device, 100);
  EXPECT_EQ(copier.counts().down, bytes);
  EXPECT_EQ(copier.counts().up, 12);
}

}  // namespace
}  // namespace zero
