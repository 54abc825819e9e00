// Deals the bytes of one range to several files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zero::store {

/// Deals blocks to files in proportion to the files' shares. In every run of 64 blocks each file
/// has the same number of blocks, spread evenly, so a transfer of some blocks keeps all disks busy.
/// A share is thereby rounded to 1/64; a file whose share is less than half of that may get
/// nothing. Within a file, blocks follow each other without gaps.
class Stripes {
 public:
  struct Place {
    size_t file = 0;
    int64_t offset = 0;  ///< in that file, bytes
  };

  /// Deals `bytes` bytes in blocks of `block_bytes`. Shares are not negative, and not all zero.
  Stripes(int64_t bytes, int64_t block_bytes, std::span<const double> shares);

  /// Returns the file that has the byte at `offset`, and its place there.
  Place place(int64_t offset) const;
  /// Returns how many bytes from `offset` on follow each other in one file.
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
  std::vector<int64_t> blocks_;  // by file: its blocks in a pattern
};

}  // namespace zero::store
