// Files of tokens as Megatron writes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace zero {

template <typename Number>
std::string bytes_of(const std::vector<Number>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number)};
}

/// The tokens of each document, in one or several sequences.
template <typename Token>
using MegatronDocuments = std::vector<std::vector<std::vector<Token>>>;

/// The bytes of NAME.bin and of NAME.idx.
struct MegatronBytes {
  std::string tokens;
  std::string index;

  std::filesystem::path write(const TemporaryFolder& folder, const std::string& name) const {
    folder.write(name + ".idx", index);
    return folder.write(name + ".bin", tokens);
  }
};

/// `code` is that of the type of tokens: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16.
template <typename Token>
MegatronBytes megatron_bytes(uint8_t code, const MegatronDocuments<Token>& documents) {
  MegatronBytes bytes;
  std::vector<int32_t> lengths;
  std::vector<int64_t> pointers;
  std::vector<int64_t> begins{0};
  for (const auto& document : documents) {
    for (const auto& sequence : document) {
      lengths.push_back(static_cast<int32_t>(sequence.size()));
      pointers.push_back(static_cast<int64_t>(bytes.tokens.size()));
      bytes.tokens += bytes_of(sequence);
    }
    begins.push_back(static_cast<int64_t>(lengths.size()));
  }
  bytes.index = std::string("MMIDIDX\0\0", 9) + bytes_of<uint64_t>({1}) + static_cast<char>(code) +
                bytes_of<uint64_t>({lengths.size(), begins.size()}) + bytes_of(lengths) +
                bytes_of(pointers) + bytes_of(begins);
  return bytes;
}

}  // namespace zero
