// Addresses that this process has mapped, to memory of its own or to a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace zero {

/// Unmapped with its owner; may be empty.
class MemoryMapping {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kHugePage = size_t{2} << 20;

  struct Request {
    size_t bytes = 0;          ///< rounded up to whole pages by the system; 0: an empty mapping
    size_t alignment = kPage;  ///< of the first byte: a power of two of at least a page
    bool counted = true;  ///< false: may be larger than memory, which it takes as it is touched
    int file = -1;        ///< a descriptor, which may be closed afterwards; -1: zero-filled memory
    int64_t file_offset = 0;  ///< a multiple of a page
    bool shared = false;      ///< what is written goes to the file; else it stays here
  };

  MemoryMapping() = default;
  /// Readable and writable. Where the system refuses, the mapping is empty and `error` says why.
  explicit MemoryMapping(const Request& request);
  MemoryMapping(MemoryMapping&& other) noexcept { swap(other); }
  MemoryMapping& operator=(MemoryMapping&& other) noexcept {
    swap(other);
    return *this;
  }
  MemoryMapping(const MemoryMapping&) = delete;
  MemoryMapping& operator=(const MemoryMapping&) = delete;
  ~MemoryMapping();

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  /// As requested.
  size_t bytes() const { return bytes_; }
  /// The errno of the request, or 0.
  int error() const { return error_; }

  /// Wishes that the whole huge pages within `bytes` bytes from the front be huge; without them the
  /// memory is the same.
  void advise_huge(size_t bytes) const;
  /// Gives up the pages within [begin, begin + bytes): memory reads as zeros, and a file shows
  /// through, when they are touched again.
  void discard(size_t begin, size_t bytes) const;

 private:
  void swap(MemoryMapping& other) noexcept;

  void* reserved_ = nullptr;  // with what the alignment takes
  size_t reserved_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int error_ = 0;
};

}  // namespace zero
