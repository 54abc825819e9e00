// A fuzzer's target and its first inputs. tests/fuzz/CMakeLists.txt makes two programs of each: one
// with libFuzzer (scripts/fuzz.sh), and a test that tries the first inputs alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Tries one input. What comes out but zero::Error is a bug, as is a sanitizer's finding.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace zero {

/// Inputs to begin with, good and bad.
std::vector<std::string> seeds();

}  // namespace zero
