#include "zero/data/text_files.h"

#include <fmt/format.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/data/foreign.h"
#include "zero/data/utf8.h"

namespace zero {
namespace {

constexpr size_t kBlock = size_t{1} << 20;

// Throws for what is no text.
void check_text(const InputFile& file, bool must_be_utf8) {
  if (file.size() == 0) throw DataError(fmt::format("{} is empty.", file.path().string()));
  refuse_foreign(file, false);
  std::string block;
  for (uint64_t at = 0; at < file.size();) {
    block.resize(std::min<uint64_t>(kBlock, file.size() - at));
    file.read_at(at, block.data(), block.size());
    refuse_nul(file, block, at);
    const size_t good = must_be_utf8 ? valid_utf8(block) : block.size();
    const bool cut = at + block.size() < file.size() && block.size() - good < 4;
    at += good;
    if (good < block.size() && !cut) {
      throw DataError(
          fmt::format("{} is not UTF-8 text at byte {}. Convert it, or prepare it by bytes.",
                      file.path().string(), at));
    }
  }
}

}  // namespace

TextFiles::TextFiles(const std::vector<std::filesystem::path>& paths, bool must_be_utf8) {
  for (const auto& path : paths) {
    InputFile file(path, &fail<DataError>);
    check_text(file, must_be_utf8);
    char last = 0;
    file.read_at(file.size() - 1, &last, 1);
    size_ += file.size() + (last == '\n' ? 0 : 1);
    parts_.push_back({std::move(file), size_});
  }
}

size_t TextFiles::part_at(size_t offset) const {
  const auto part = std::upper_bound(parts_.begin(), parts_.end(), offset,
                                     [](size_t at, const Part& one) { return at < one.end; });
  return static_cast<size_t>(part - parts_.begin());
}

TextFiles::Place TextFiles::place(size_t offset) const {
  const size_t index = part_at(offset);
  ensure(index < parts_.size(), "an offset within the text");
  return {parts_[index].file.path(), index == 0 ? 0 : parts_[index - 1].end, parts_[index].end};
}

// Returns its bytes from `offset` on: all that one file has, but at most kBlock, and none at the
// end.
void TextFiles::read(size_t offset, std::string& block) const {
  block.clear();
  const size_t index = part_at(offset);
  if (index == parts_.size()) return;
  const auto& part = parts_[index];
  const size_t begin = index == 0 ? 0 : parts_[index - 1].end;
  block.resize(std::min(kBlock, part.end - offset), '\n');
  const size_t stored = part.file.size() - std::min(part.file.size(), offset - begin);
  part.file.read_at(offset - begin, block.data(), std::min(block.size(), stored));
}

std::function<std::string_view()> TextFiles::pieces(size_t begin, size_t end) const {
  return [this, begin, end, block = std::string()]() mutable -> std::string_view {
    if (begin == end) return {};
    read(begin, block);
    block.resize(std::min(block.size(), end - begin));
    begin += block.size();
    return block;
  };
}

size_t TextFiles::line_at(size_t offset) const {
  if (offset == 0) return 0;
  std::string block;
  for (size_t at = offset - 1; at < size_; at += block.size()) {
    read(at, block);
    const auto newline = block.find('\n');
    if (newline != std::string::npos) return at + newline + 1;
  }
  return size_;
}

}  // namespace zero
