// `FUZZER seeds FOLDER` writes the first inputs and ends; else libFuzzer goes on.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  if (*count != 3 || std::string_view((*arguments)[1]) != "seeds") return 0;
  const std::filesystem::path folder = (*arguments)[2];
  std::filesystem::create_directories(folder);
  size_t number = 0;
  for (const auto& seed : zero::seeds())
    std::ofstream(folder / ("seed-" + std::to_string(number++)), std::ios::binary) << seed;
  std::exit(0);
}
