// The directory of a zip archive whose entries are stored as they are, as torch.save writes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "zero/checkpoint/file.h"

namespace zero::foreign {

/// The place of an entry's bytes in the file.
struct ZipEntry {
  uint64_t offset = 0;
  uint64_t size = 0;
  uint32_t crc = 0;  ///< 0: the writer has left it out
};

/// Reads the directory of the archive in bytes [begin, begin + size) of a file, of either width of
/// numbers. Throws CheckpointError, which says what is wrong without naming the file, for entries
/// that are compressed, encrypted, of one name or outside the archive.
std::map<std::string, ZipEntry> read_zip_directory(const InputFile& file, uint64_t begin,
                                                   uint64_t size);

/// Returns the CRC-32 (IEEE 802.3, as zip has it) of bytes behind those whose CRC is `before`.
uint32_t crc32_of(const void* data, size_t size, uint32_t before = 0);

}  // namespace zero::foreign
