// Gives each test the same random numbers every time, so that a failure is seen again. Without this
// LibTorch takes a seed from the system.
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <memory>

namespace zero {

namespace {

class Seed final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& /*test*/) override { torch::manual_seed(1); }
};

// The list of listeners owns it.
[[maybe_unused]] const bool listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(std::make_unique<Seed>().release());
  return true;
}();

}  // namespace

}  // namespace zero
