#include "zero/base/memory_mapping.h"

#include <ATen/ceil_div.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace zero {

MemoryMapping::MemoryMapping(const Request& request) {
  if (request.bytes == 0) return;
  const size_t whole = at::round_up(request.bytes, kPage);
  if (whole < request.bytes || whole + request.alignment < whole) {
    error_ = ENOMEM;
    return;
  }
  const int flags = (request.shared ? MAP_SHARED : MAP_PRIVATE) |
                    (request.file < 0 ? MAP_ANONYMOUS : 0) | (request.counted ? 0 : MAP_NORESERVE);
  void* place = nullptr;
  if (request.alignment > kPage) {
    // Addresses are reserved first, and then the aligned ones among them are used.
    reserved_bytes_ = whole + request.alignment;
    void* const addresses = mmap(nullptr, reserved_bytes_, PROT_NONE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (addresses == MAP_FAILED) {
      error_ = errno;
      return;
    }
    reserved_ = addresses;
    place = reinterpret_cast<void*>(
        at::round_up(reinterpret_cast<uintptr_t>(addresses), uintptr_t{request.alignment}));
  }
  void* const data =
      mmap(place, whole, PROT_READ | PROT_WRITE, flags | (place != nullptr ? MAP_FIXED : 0),
           request.file, request.file_offset);
  if (data == MAP_FAILED) {
    error_ = errno;
    return;
  }
  if (reserved_ == nullptr) {
    reserved_ = data;
    reserved_bytes_ = whole;
  }
  data_ = static_cast<std::byte*>(data);
  bytes_ = request.bytes;
}

MemoryMapping::~MemoryMapping() {
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
}

void MemoryMapping::advise_huge(size_t bytes) const { madvise(data_, bytes, MADV_HUGEPAGE); }

void MemoryMapping::discard(size_t begin, size_t bytes) const {
  madvise(data_ + begin, bytes, MADV_DONTNEED);
}

void MemoryMapping::swap(MemoryMapping& other) noexcept {
  std::swap(reserved_, other.reserved_);
  std::swap(reserved_bytes_, other.reserved_bytes_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(error_, other.error_);
}

}  // namespace zero
