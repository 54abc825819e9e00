#include "zero/data/line_writer.h"

#include <fmt/format.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/base/parallel.h"
#include "zero/checkpoint/file.h"
#include "zero/data/example.h"
#include "zero/data/prepare.h"
#include "zero/data/token_output.h"

namespace zero {
namespace {

constexpr size_t kBytesAtOnce = size_t{4} << 20;

}  // namespace

void LineWriter::refuse(size_t offset, std::string_view why) const {
  const auto place = text_.place(offset);
  size_t line = 1;
  const auto pieces = text_.pieces(place.begin, offset);
  for (auto piece = pieces(); !piece.empty(); piece = pieces())
    line += static_cast<size_t>(std::count(piece.begin(), piece.end(), '\n'));
  throw DataError(fmt::format("{}, line {}: {} Nothing was written.", place.file.string(), line,
                              sentence_about_line(why)));
}

void LineWriter::write(size_t begin, size_t end, std::string_view name, int64_t& tokens,
                       PrepareResult& result) const {
  TokenOutput output(folder_ / fmt::format("{}.bin", name), tokenizer_.vocab_size());
  OutputFile marks(folder_ / fmt::format("{}.marks.bin", name), &fail<DataError>);
  std::vector<Line> lines;
  std::vector<uint32_t> narrow;
  const auto no_token = tokenizer_.unknown_token();
  const auto flush = [&] {
    std::vector<std::string> faults(lines.size());
    parallel_for(0, static_cast<int64_t>(lines.size()), 16, [&](int64_t first, int64_t last) {
      for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
        try {
          const auto& line = lines[i].text;
          lines[i].document = labels_ != nullptr ? encoder_.encode(read_labelled(line))
                                                 : encoder_.encode(encoder_.read(line));
        } catch (const DataError& error) {
          faults[i] = error.what();
        }
      }
    });
    for (size_t i = 0; i < lines.size(); ++i) {
      if (!faults[i].empty()) refuse(lines[i].offset, faults[i]);
      const auto& made = lines[i].document;
      narrow.assign(made.tokens.begin(), made.tokens.end());
      output.write(narrow);
      marks.write(made.marks.data(), made.marks.size());
      ++result.documents;
      result.open_documents += made.ends_open ? 1 : 0;
      if (labels_ != nullptr) {
        const auto& label = made.label;
        if (!labels_->empty() && labels_->front().number.has_value() != label.number.has_value())
          refuse(lines[i].offset,
                 "has a label that is a name, and others are numbers, or the other "
                 "way round");
        labels_->push_back(label);
      }
      for (const auto mark : made.marks) result.supervised_tokens += mark & kSupervised;
      if (no_token)
        result.unknown_tokens += std::count(made.tokens.begin(), made.tokens.end(), *no_token);
    }
    lines.clear();
  };
  const int64_t documents = result.documents;
  const auto pieces = text_.pieces(begin, end);
  size_t bytes = 0;
  size_t offset = begin;
  std::string pending;
  for (auto piece = pieces(); !piece.empty(); piece = pieces()) {
    while (!piece.empty()) {
      const auto newline = piece.find('\n');
      const auto part = piece.substr(0, newline == std::string_view::npos ? newline : newline + 1);
      piece.remove_prefix(part.size());
      pending += part;
      if (newline == std::string_view::npos) continue;
      const size_t size = pending.size();
      if (!is_blank(pending)) lines.push_back({std::move(pending), offset, {}});
      pending.clear();
      offset += size;
      bytes += size;
      if (bytes < kBytesAtOnce) continue;
      flush();
      bytes = 0;
    }
  }
  flush();
  if (result.documents == documents) refuse(begin, "has no text, and no line behind it has any");
  tokens = output.commit();
  marks.commit();
}

}  // namespace zero
