// Files that are neither text nor tokens, told by how they begin.
#pragma once

#include <cstdint>
#include <string_view>

namespace zero {

class InputFile;

/// Throws DataError for a file of a known other format, which names the format and the remedy:
/// compressed files and archives, tables, documents, pictures, programs, arrays, weights, models of
/// tokenizers, text in UTF-16 or UTF-32. For `binary` files, which may begin with any bytes, only
/// signatures of four bytes or more count.
void refuse_foreign(const InputFile& file, bool binary);

/// Throws DataError for text that holds a NUL: no text does. `offset` is where `text` lies in the
/// file.
void refuse_nul(const InputFile& file, std::string_view text, uint64_t offset);

}  // namespace zero
