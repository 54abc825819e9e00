// What was written to each page of a file, in 32 bits.
#pragma once

#include <ATen/ceil_div.h>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero::store {

/// Of offsets in a file, sizes of transfers and their memory, in bytes. A page of a file is as
/// large.
inline constexpr int64_t kAlignment = 4096;

/// A table in memory: the low 32 bits of each page's XXH3. A page that was never recorded is not
/// checked. Threads may use it at once for different pages.
class Checksums {
 public:
  Checksums() = default;
  /// For `bytes` of pages.
  explicit Checksums(int64_t bytes)
      : table_(static_cast<size_t>(at::ceil_div(bytes, kAlignment))) {}

  /// Offsets and sizes are multiples of kAlignment.
  void record(int64_t offset, const std::byte* memory, int64_t bytes);
  /// The offset of the first page of `memory` that is not what was recorded, or -1.
  int64_t first_difference(int64_t offset, const std::byte* memory, int64_t bytes) const;
  /// Of the table itself: a thousandth of what it covers.
  int64_t table_bytes() const { return static_cast<int64_t>(table_.size() * sizeof(uint32_t)); }

 private:
  std::vector<uint32_t> table_;  // 0: never recorded
};

}  // namespace zero::store
