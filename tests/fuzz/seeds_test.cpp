#include <gtest/gtest.h>

#include "tests/fuzz/fuzz.h"

namespace zero {
namespace {

// Each first input, cut at every length and with every byte turned: what a fuzzer begins with.
TEST(Fuzz, OnlyOurErrorsComeOutOfTheFirstInputs) {
  for (const auto& seed : seeds()) {
    const auto attempt = [](std::string input) {
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    };
    const size_t step = seed.size() / 64 + 1;
    ASSERT_NO_THROW(attempt(seed));
    for (size_t at = 0; at < seed.size(); at += step) {
      ASSERT_NO_THROW(attempt(seed.substr(0, at))) << "cut at " << at;
      auto turned = seed;
      turned[at] = static_cast<char>(~turned[at]);
      ASSERT_NO_THROW(attempt(turned)) << "turned at " << at;
    }
  }
}

}  // namespace
}  // namespace zero
