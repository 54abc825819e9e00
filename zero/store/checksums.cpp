#include "zero/store/checksums.h"

#include <algorithm>

#include "zero/base/hash.h"

namespace zero::store {

namespace {

// Returns the checksum of a page. It is never 0, which means that a page was not recorded.
uint32_t checksum(const std::byte* page) {
  return std::max<uint32_t>(
      1, static_cast<uint32_t>(hash_of({page, static_cast<size_t>(kAlignment)})));
}

}  // namespace

void Checksums::record(int64_t offset, const std::byte* memory, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kAlignment)
    table_[static_cast<size_t>((offset + at) / kAlignment)] = checksum(memory + at);
}

int64_t Checksums::first_difference(int64_t offset, const std::byte* memory, int64_t bytes) const {
  for (int64_t at = 0; at < bytes; at += kAlignment) {
    const auto expected = table_[static_cast<size_t>((offset + at) / kAlignment)];
    if (expected != 0 && expected != checksum(memory + at)) return offset + at;
  }
  return -1;
}

}  // namespace zero::store
