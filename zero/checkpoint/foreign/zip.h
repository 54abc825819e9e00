// Reads the directory of a zip archive whose entries are not compressed, as torch.save writes it.
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

/// Reads the directory of the archive in bytes [begin, begin + size) of a file. Its numbers may be
/// of 32 or 64 bits. Throws CheckpointError, which says what is wrong without naming the file, for
/// entries that are compressed or encrypted, have the same name, or lie outside the archive.
std::map<std::string, ZipEntry> read_zip_directory(const InputFile& file, uint64_t begin,
                                                   uint64_t size);

/// Returns the CRC-32 (IEEE 802.3, as zip has it) of all bytes so far: `before` is the CRC of those
/// before `data`.
uint32_t crc32_of(const void* data, size_t size, uint32_t before = 0);

}  // namespace zero::foreign
