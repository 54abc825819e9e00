// Reads text files as one text.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "zero/checkpoint/file.h"

namespace zero {

/// The files as one text, in which each file's last line is ended.
class TextFiles {
 public:
  /// Reads all of them. Throws DataError for a file that is missing, empty, of another known
  /// format, has a NUL, or is not UTF-8 where it must be.
  TextFiles(const std::vector<std::filesystem::path>& paths, bool must_be_utf8);

  /// Returns its bytes.
  size_t size() const { return size_; }
  /// Gives the pieces of [begin, end), one after the other, and then an empty one. A piece lies in
  /// one file.
  std::function<std::string_view()> pieces(size_t begin, size_t end) const;
  /// Returns the first start of a line at or after `offset`.
  size_t line_at(size_t offset) const;

  struct Place {
    std::filesystem::path file;
    size_t begin = 0;  ///< of the file, in the text
    size_t end = 0;
  };
  /// Returns the file in which `offset`, below size, lies.
  Place place(size_t offset) const;

 private:
  struct Part {
    InputFile file;
    size_t end;  // in the text
  };
  size_t part_at(size_t offset) const;
  void read(size_t offset, std::string& block) const;

  std::vector<Part> parts_;
  size_t size_ = 0;
};

}  // namespace zero
