#include "zero/base/memory_mapping.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "zero/base/descriptor.h"

namespace zero {
namespace {

constexpr size_t kPage = MemoryMapping::kPage;

Descriptor file_of(size_t bytes, char filled) {
  Descriptor file(memfd_create("mapping", MFD_CLOEXEC));
  const std::string text(bytes, filled);
  EXPECT_EQ(::write(file.get(), text.data(), text.size()), static_cast<ssize_t>(bytes));
  return file;
}

char byte_of(const Descriptor& file, off_t offset) {
  char byte = 0;
  EXPECT_EQ(pread(file.get(), &byte, 1, offset), 1);
  return byte;
}

bool mapped(const void* address) {
  unsigned char resident = 0;
  return mincore(const_cast<void*>(address), kPage, &resident) == 0;
}

TEST(MemoryMapping, OfMemoryIsZeroAndAligned) {
  for (const size_t alignment : {kPage, MemoryMapping::kHugePage}) {
    const MemoryMapping memory({.bytes = 3 * kPage + 5, .alignment = alignment});
    ASSERT_TRUE(memory);
    EXPECT_EQ(memory.error(), 0);
    EXPECT_EQ(memory.bytes(), 3 * kPage + 5);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % alignment, 0u);
    for (size_t i = 0; i < memory.bytes(); ++i) ASSERT_EQ(memory.data()[i], std::byte{0});
    memory.data()[kPage] = std::byte{7};
    memory.discard(kPage, kPage);
    EXPECT_EQ(memory.data()[kPage], std::byte{0});
  }
}

TEST(MemoryMapping, GoesWithItsOwnerAlone) {
  const void* address = nullptr;
  {
    MemoryMapping first({.bytes = kPage, .alignment = MemoryMapping::kHugePage});
    address = first.data();
    MemoryMapping second(std::move(first));
    EXPECT_EQ(second.data(), address);
    MemoryMapping third;
    EXPECT_FALSE(third);
    third = std::move(second);
    EXPECT_EQ(third.data(), address);
    EXPECT_TRUE(mapped(address));
  }
  EXPECT_FALSE(mapped(address));
}

TEST(MemoryMapping, OfAFileIsSharedOrStaysHere) {
  const auto file = file_of(3 * kPage, 'a');
  for (const size_t alignment : {kPage, MemoryMapping::kHugePage}) {
    const MemoryMapping shared({.bytes = kPage,
                                .alignment = alignment,
                                .file = file.get(),
                                .file_offset = kPage,
                                .shared = true});
    const MemoryMapping own({.bytes = kPage,
                             .alignment = alignment,
                             .counted = false,
                             .file = file.get(),
                             .file_offset = kPage});
    ASSERT_TRUE(shared && own);
    own.data()[0] = std::byte{'o'};
    EXPECT_EQ(byte_of(file, kPage), 'a');
    shared.data()[0] = std::byte{'s'};
    EXPECT_EQ(byte_of(file, kPage), 's');
    EXPECT_EQ(own.data()[0], std::byte{'o'}) << "a page of its own since it was written";
    own.discard(0, kPage);
    EXPECT_EQ(own.data()[0], std::byte{'s'}) << "the file shows through";
    shared.data()[0] = std::byte{'a'};
  }
  EXPECT_EQ(byte_of(file, 0), 'a');
}

TEST(MemoryMapping, SaysWhyItIsEmpty) {
  const MemoryMapping none(MemoryMapping::Request{});
  EXPECT_FALSE(none);
  EXPECT_EQ(none.error(), 0);
  for (const size_t bytes : {size_t{1} << 60, std::numeric_limits<size_t>::max()}) {
    for (const size_t alignment : {kPage, MemoryMapping::kHugePage}) {
      const MemoryMapping huge({.bytes = bytes, .alignment = alignment, .counted = false});
      EXPECT_FALSE(huge);
      EXPECT_EQ(huge.error(), ENOMEM);
    }
  }
  const auto file = file_of(kPage, 'a');
  const MemoryMapping unaligned({.bytes = kPage, .file = file.get(), .file_offset = 5});
  EXPECT_FALSE(unaligned);
  EXPECT_EQ(unaligned.error(), EINVAL);
}

}  // namespace
}  // namespace zero
