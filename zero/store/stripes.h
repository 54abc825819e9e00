// The places of bytes in several files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zero::store {

/// Blocks dealt to files in proportion to their shares: every run of 64 blocks holds the same
/// numbers of each file's, spread evenly, so a transfer of some blocks keeps all disks busy. A
/// share is thereby rounded to 1/64; a file whose share is less than half of that may get nothing.
/// Within a file blocks follow each other without gaps.
class Stripes {
 public:
  struct Place {
    size_t file = 0;
    int64_t offset = 0;  ///< in that file, bytes
  };

  /// Deals `bytes` in blocks of `block_bytes`. Shares are not negative, and not all zero.
  Stripes(int64_t bytes, int64_t block_bytes, std::span<const double> shares);

  Place place(int64_t offset) const;
  /// Returns the bytes from `offset` on that follow each other in one file.
  int64_t contiguous(int64_t offset) const;
  /// Returns the size of a file.
  int64_t bytes_of(size_t file) const;

 private:
  struct Slot {
    size_t file = 0;
    int64_t turn = 0;  // how many of the file's blocks come before it in the pattern
  };
  int64_t bytes_;
  int64_t block_bytes_;
  std::vector<Slot> pattern_;
  std::vector<int64_t> blocks_;  // of each file in a pattern
};

}  // namespace zero::store
