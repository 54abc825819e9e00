// Writes the documents of JSON lines as tokens and marks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/data/document.h"
#include "zero/data/text_files.h"
#include "zero/data/tokenizer.h"

namespace zero {

struct PrepareResult;

class LineWriter {
 public:
  /// All arguments are borrowed. The files go to `folder`. If the texts have labels, `labels` gets
  /// those of all lines, in their order. Throws what DocumentEncoder throws.
  LineWriter(const TextFiles& text, const Tokenizer& tokenizer, std::filesystem::path folder,
             std::vector<Label>* labels = nullptr)
      : text_(text),
        tokenizer_(tokenizer),
        encoder_(tokenizer),
        folder_(std::move(folder)),
        labels_(labels) {}

  /// Writes the lines [begin, end) of the text to NAME.bin and NAME.marks.bin, and their number of
  /// tokens to `tokens`. Lines of white space are left out. Throws DataError, with file and line,
  /// for a line that is no document (example.h), for one whose label is a name where others are
  /// numbers, or for no document at all.
  void write(size_t begin, size_t end, std::string_view name, int64_t& tokens,
             PrepareResult& result) const;

  const DocumentEncoder& encoder() const { return encoder_; }

 private:
  struct Line {
    std::string text;
    size_t offset = 0;
    Document document{};
  };
  [[noreturn]] void refuse(size_t offset, std::string_view why) const;

  const TextFiles& text_;
  const Tokenizer& tokenizer_;
  DocumentEncoder encoder_;
  std::filesystem::path folder_;
  std::vector<Label>* labels_;
};

}  // namespace zero
