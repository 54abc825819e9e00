// A range of addresses that this process has mapped, to memory of its own or to a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace zero {

/// A mapping that its owner unmaps. It may be empty.
class MemoryMapping {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kHugePage = size_t{2} << 20;

  struct Request {
    size_t bytes = 0;  ///< rounded up to whole pages by the system; 0 makes an empty mapping
    size_t alignment = kPage;  ///< alignment of the first byte: a power of two of at least a page
    /// If false, it may be larger than the memory, and takes memory only as it is touched.
    bool counted = true;
    int file = -1;  ///< a descriptor, which may be closed afterwards; -1 means zero-filled memory
    int64_t file_offset = 0;  ///< a multiple of a page
    bool shared = false;      ///< if true, writes go to the file; otherwise they stay in memory
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
  /// Returns the bytes that were requested.
  size_t bytes() const { return bytes_; }
  /// Returns the errno of the request, or 0.
  int error() const { return error_; }

  /// Advises the system to use huge pages for the first `bytes` bytes, as far as they fill whole
  /// ones. If the system has none, the memory is the same.
  void advise_huge(size_t bytes) const;
  /// Gives up the pages within [begin, begin + bytes). When they are touched again, memory reads as
  /// zeros, and a mapped file shows its own bytes.
  void discard(size_t begin, size_t bytes) const;

 private:
  void swap(MemoryMapping& other) noexcept;

  void* reserved_ = nullptr;  // the mapping with the extra bytes for the alignment
  size_t reserved_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int error_ = 0;
};

}  // namespace zero
