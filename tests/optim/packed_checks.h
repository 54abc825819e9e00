// Checks of the formats of frozen weights (zero/optim/base_format.h) that their tests share.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "test_arrays.h"
#include "tests/support/instruction_sets.h"
#include "zero/optim/base_format.h"

namespace zero::optim {

inline std::vector<std::byte> packed_in(BaseFormat format, const std::vector<float>& values) {
  const auto numel = static_cast<int64_t>(values.size());
  std::vector<std::byte> bytes(static_cast<size_t>(packed_bytes(format, numel)));
  pack(format, values.data(), numel, bytes.data());
  return bytes;
}

/// The bytes are read back as these numbers, rounded to each dtype, and nothing beside is written.
inline void expect_reads_back(BaseFormat format, const std::vector<std::byte>& bytes,
                              const std::vector<float>& numbers) {
  const auto numel = static_cast<int64_t>(numbers.size());
  for (const auto dtype : dtypes()) {
    Array<float> room(numel, 3);  // of any dtype
    unpack(format, bytes.data(), numel, room.data(), dtype);
    for (int64_t i = 0; i < numel; ++i) {
      std::array<std::byte, 4> one;
      narrow(one.data(), dtype, 0, numbers[static_cast<size_t>(i)]);
      ASSERT_TRUE(same(widen(room.data(), dtype, i), widen(one.data(), dtype, 0))) << i;
    }
    EXPECT_TRUE(room.guards_intact());
  }
}

/// The kernel reads the bits that the plain loops read, on every instruction set, also of values
/// that are no numbers.
inline void expect_bits_of_plain_loops(BaseFormat format, std::span<const int64_t> sizes) {
  for (const bool special : {false, true}) {
    for (const int64_t numel : sizes) {
      Numbers source(3, special);
      std::vector<float> values(static_cast<size_t>(numel));
      for (auto& value : values) value = source.next();
      const auto bytes = packed_in(format, values);
      for (const auto dtype : dtypes()) {
        std::vector<float> plain(values.size());
        unpack_reference(format, bytes.data(), numel, plain.data(), dtype);
        on_each_instruction_set([&](const char* name) {
          std::vector<float> fast(values.size());
          unpack(format, bytes.data(), numel, fast.data(), dtype);
          for (int64_t i = 0; i < numel; ++i)
            ASSERT_TRUE(same(widen(fast.data(), dtype, i), widen(plain.data(), dtype, i)))
                << name << " " << i;
        });
      }
    }
  }
}

}  // namespace zero::optim
