#include "zero/base/ledger.h"

#include <gtest/gtest.h>

namespace zero {
namespace {

TEST(Ledger, CountsCurrentAndPeakByCategory) {
  Ledger ledger;
  ledger.add(Category::parameters, 100);
  ledger.add(Category::gradients, 50);
  ledger.remove(Category::gradients, 50);
  ledger.add(Category::optimizer, 20);
  EXPECT_EQ(ledger.usage(Category::parameters).current, 100);
  EXPECT_EQ(ledger.usage(Category::gradients).current, 0);
  EXPECT_EQ(ledger.usage(Category::gradients).peak, 50);
  EXPECT_EQ(ledger.total().current, 120);
  EXPECT_EQ(ledger.total().peak, 150) << "the peak of the sum, not the sum of the peaks";
  ledger.reset_peaks();
  EXPECT_EQ(ledger.usage(Category::gradients).peak, 0);
  EXPECT_EQ(ledger.total().peak, 120);
}

TEST(Charge, LastsAsLongAsItsObject) {
  auto ledger = std::make_shared<Ledger>();
  {
    Charge a(ledger, Category::communication, 64);
    Charge b = std::move(a);
    EXPECT_EQ(ledger->usage(Category::communication).current, 64);
    b = Charge(ledger, Category::communication, 16);
    EXPECT_EQ(ledger->usage(Category::communication).current, 16);
  }
  EXPECT_EQ(ledger->usage(Category::communication).current, 0);
  EXPECT_EQ(ledger->usage(Category::communication).peak, 80);
}

TEST(Category, EveryOneHasAName) {
  for (size_t i = 0; i < kCategories; ++i) EXPECT_FALSE(name(static_cast<Category>(i)).empty());
}

}  // namespace
}  // namespace zero
