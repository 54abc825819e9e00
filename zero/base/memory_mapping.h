// Addresses that this process has mapped, to memory of its own or to a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace zero {

/// A mapping, which its owner unmaps. It may be empty.
class MemoryMapping {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kHugePage = size_t{2} << 20;

  struct Request {
    size_t bytes = 0;  ///< rounded up to whole pages by the system; 0 makes an empty mapping
    size_t alignment = kPage;  ///< the first byte's: a power of two of at least a page
    /// if false, it may be larger than memory, which it takes as it is touched
    bool counted = true;
    int file = -1;  ///< a descriptor, which may be closed afterwards; -1 means zero-filled memory
    int64_t file_offset = 0;  ///< a multiple of a page
    bool shared = false;      ///< if true, writes go to the file; else they stay here
  };

  MemoryMapping() = default;
  /// Maps memory to read and write. If the system refuses, the mapping is empty and `error` says
  /// why.
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
  /// The bytes as requested.
  size_t bytes() const { return bytes_; }
  /// Returns the errno of the request, or 0.
  int error() const { return error_; }

  /// Advises huge pages for the whole ones within `bytes` bytes from the front. If the system has
  /// none the memory is the same.
  void advise_huge(size_t bytes) const;
  /// Gives up the pages within [begin, begin + bytes). When they are touched again, memory reads as
  /// zeros, and a file shows through.
  void discard(size_t begin, size_t bytes) const;

 private:
  void swap(MemoryMapping& other) noexcept;

  void* reserved_ = nullptr;  // with the bytes that the alignment takes
  size_t reserved_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int error_ = 0;
};

}  // namespace zero
