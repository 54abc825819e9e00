// 32-bit checksums of the pages that were written to a file.
#pragma once

#include <ATen/ceil_div.h>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero::store {

/// Offsets in a file, sizes of transfers and addresses of their memory are multiples of this many
/// bytes: one page of a file.
inline constexpr int64_t kAlignment = 4096;

/// A table in memory with the low 32 bits of each page's XXH3. A page that was never recorded is
/// not checked. Several threads may use the table at once for different pages.
class Checksums {
 public:
  Checksums() = default;
  /// Makes a table for a file of `bytes` bytes.
  explicit Checksums(int64_t bytes)
      : table_(static_cast<size_t>(at::ceil_div(bytes, kAlignment))) {}

  /// Records the checksums of `bytes` bytes of pages at `offset`. Offsets and sizes are multiples
  /// of kAlignment.
  void record(int64_t offset, const std::byte* memory, int64_t bytes);
  /// Returns the offset of the first page of `memory` that is not what was recorded, or -1.
  int64_t first_difference(int64_t offset, const std::byte* memory, int64_t bytes) const;
  /// Returns the bytes of the table: a thousandth of the bytes that it covers.
  int64_t table_bytes() const { return static_cast<int64_t>(table_.size() * sizeof(uint32_t)); }

 private:
  std::vector<uint32_t> table_;  // 0: never recorded
};

}  // namespace zero::store
