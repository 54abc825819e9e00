#include "zero/base/device_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"

namespace zero {
namespace {

using testing::HasSubstr;

std::string refusal_of(Ledger& ledger, Category category, int64_t bytes) {
  try {
    ledger.add(category, bytes);
  } catch (const OutOfMemory& error) {
    return error.what();
  }
  return {};
}

TEST(DeviceLimit, RefusesWhatExceedsItAndCountsNothingOfThat) {
  auto ledger = std::make_shared<Ledger>();
  ledger->add(Category::parameters, 600);
  const DeviceLimit limit(ledger, 1000, {{"stage 2", 50}, {"stage 3", 500}});
  ledger->add(Category::gradients, 400);
  EXPECT_EQ(limit.held(), 1000);
  const auto told = refusal_of(*ledger, Category::gradient_buckets, 60);
  EXPECT_THAT(told, HasSubstr("60 B (60 bytes) of gradient_buckets"));
  EXPECT_THAT(told, HasSubstr("parameters 600 B, gradients 400 B"));
  EXPECT_THAT(told, HasSubstr("The next cheaper choice: stage 3, which frees about 500 B"));
  EXPECT_EQ(ledger->device().current, 1000);
  EXPECT_EQ(ledger->device().peak, 1000);
  EXPECT_THAT(refusal_of(*ledger, Category::gradients, 900), HasSubstr("is not enough"));
  ledger->remove(Category::gradients, 60);
  EXPECT_EQ(refusal_of(*ledger, Category::gradient_buckets, 60), "");
}

TEST(DeviceLimit, LeavesTheHostTierAndHostScopesAlone) {
  auto ledger = std::make_shared<Ledger>();
  const DeviceLimit limit(ledger, 100, {});
  ledger->add(Category::host_optimizer, 1'000'000);
  EXPECT_EQ(ledger->device().current, 0);
  EXPECT_EQ(ledger->total().current, 1'000'000);
  {
    const HostScope scope;
    ledger->add(Category::gathered_units, 200);
  }
  EXPECT_THAT(refusal_of(*ledger, Category::gathered_units, 1), HasSubstr("All states are off"));
}

TEST(DeviceLimit, EndsWithItsObject) {
  auto ledger = std::make_shared<Ledger>();
  { const DeviceLimit limit(ledger, 100, {}); }
  EXPECT_EQ(refusal_of(*ledger, Category::parameters, 1000), "");
}

TEST(DeviceLimit, OfSeveralTheLastThatLivesCounts) {
  for (const bool in_order : {true, false}) {
    auto ledger = std::make_shared<Ledger>();
    const auto fits = [&](int64_t bytes) {
      if (!refusal_of(*ledger, Category::parameters, bytes).empty()) return false;
      ledger->remove(Category::parameters, bytes);
      return true;
    };
    auto first = std::make_unique<DeviceLimit>(ledger, 100, std::vector<CheaperChoice>{});
    auto second = std::make_unique<DeviceLimit>(ledger, 1000, std::vector<CheaperChoice>{});
    EXPECT_TRUE(fits(1000));
    EXPECT_FALSE(fits(1001));
    (in_order ? first : second).reset();
    EXPECT_TRUE(fits(in_order ? 1000 : 100));
    EXPECT_FALSE(fits(in_order ? 1001 : 101));
    (in_order ? second : first).reset();
    EXPECT_TRUE(fits(1001));
  }
}

TEST(DeviceLimit, CountsTensorsOfTheAllocatorOnceAsked) {
  auto& allocator = HostAllocator::instance();
  auto ledger = std::make_shared<Ledger>();
  const int64_t before = allocator.used();
  DeviceLimit limit(ledger, before + (1 << 20), {});
  ledger->add(Category::parameters, 1 << 19);
  { const auto unlimited = allocator.allocate(2 << 20); }
  limit.include_tensors();
  {
    const auto fits = allocator.allocate(1 << 19);
    EXPECT_EQ(limit.held(), before + (1 << 20));
    EXPECT_THROW(allocator.allocate(1 << 12), OutOfMemory);
    EXPECT_THROW(allocator.allocate(1 << 16), OutOfMemory);
    EXPECT_THAT(refusal_of(*ledger, Category::gradients, 1), HasSubstr("activations"));
    const HostScope scope;
    EXPECT_NO_THROW(allocator.allocate(1 << 16));
  }
  EXPECT_NO_THROW(allocator.allocate(1 << 16));
}

}  // namespace
}  // namespace zero
