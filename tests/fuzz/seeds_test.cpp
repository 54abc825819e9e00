#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>

#include "tests/fuzz/fuzz.h"

namespace zero {
namespace {

void attempt(std::string input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

/// Changes, removes or repeats some bytes.
std::string changed(std::string input, std::mt19937& random) {
  const auto below = [&](size_t end) { return end == 0 ? 0 : random() % end; };
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = below(input.size());
    const size_t count = 1 + below(8);
    switch (below(4)) {
      case 0:
        if (!input.empty()) input[at] = static_cast<char>(random());
        break;
      case 1:  // another digit, as of a shape or an offset
        for (size_t i = at; i < input.size(); ++i) {
          if (input[i] < '0' || input[i] > '9') continue;
          input[i] = static_cast<char>('0' + below(10));
          break;
        }
        break;
      case 2:
        input.erase(at, count);
        break;
      default:
        input.insert(at, input.substr(at, count));
    }
  }
  return input;
}

// Each first input, cut at every length and with every byte turned: what a fuzzer begins with.
TEST(Fuzz, OnlyOurErrorsComeOutOfTheFirstInputs) {
  for (const auto& seed : seeds()) {
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

// Two seeds are always the same, and one is new each time; ZERO_FUZZ_SEED=N tries N in its place.
TEST(Fuzz, OnlyOurErrorsComeOutOfChangedInputs) {
  const char* given = std::getenv("ZERO_FUZZ_SEED");
  const auto fresh = given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                                      : std::random_device()();
  for (const uint32_t seed : {1U, 2U, fresh}) {
    std::mt19937 random(seed);
    for (const auto& input : seeds()) {
      for (int i = 0; i < 15; ++i)
        ASSERT_NO_THROW(attempt(changed(input, random))) << "ZERO_FUZZ_SEED=" << seed;
    }
  }
}

}  // namespace
}  // namespace zero
