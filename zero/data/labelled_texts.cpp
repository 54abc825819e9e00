#include "zero/data/labelled_texts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// The begins of all documents, and the end.
std::vector<int64_t> begins_of(const Tokens& tokens) {
  constexpr int64_t kBlock = 1 << 20;
  std::vector<int64_t> begins;
  std::vector<uint8_t> marks;
  for (int64_t begin = 0; begin < tokens.size(); begin += kBlock) {
    marks.resize(static_cast<size_t>(std::min(kBlock, tokens.size() - begin)));
    tokens.read_marks(begin, marks);
    for (size_t i = 0; i < marks.size(); ++i) {
      if ((marks[i] & kBeginsDocument) != 0) begins.push_back(begin + static_cast<int64_t>(i));
    }
  }
  begins.push_back(tokens.size());
  return begins;
}

}  // namespace

LabelledTexts::LabelledTexts(TokenRange range, int64_t vocab_size, int64_t classes)
    : range_(std::move(range)), vocab_size_(vocab_size) {
  ensure(range_.tokens != nullptr, "a range of tokens");
  const auto& tokens = *range_.tokens;
  const fs::path file = tokens.name();
  const auto labels = labels_of(file);
  std::error_code ignored;
  if (tokens.files() != 1 || !tokens.marked() || !fs::exists(labels, ignored)) {
    throw DataError(
        fmt::format("{} has no labels of its texts ({}). Prepare the data with `zero data prepare "
                    "--classify`.",
                    file.string(), labels.filename().string()));
  }
  const auto all = begins_of(tokens);
  const auto bytes = read_file(labels, &fail<DataError>);
  if (bytes.size() != sizeof(int32_t) * (all.size() - 1)) {
    throw DataError(fmt::format(
        "{} has {} bytes, but {} has {} documents with a label of 4 bytes each. Prepare "
        "the data again.",
        labels.string(), bytes.size(), file.string(), all.size() - 1));
  }
  for (size_t i = 0; i + 1 < all.size(); ++i) {
    if (all[i] < range_.begin || all[i] >= range_.end) continue;
    int32_t label = 0;
    std::memcpy(&label, bytes.data() + i * sizeof(label), sizeof(label));
    if (label < 0 || label >= classes) {
      throw DataError(fmt::format("{} has the label {} of text {}, and there are {} classes.",
                                  labels.string(), label, i, classes));
    }
    begins_.push_back(all[i]);
    labels_.push_back(label);
    if (i + 2 == all.size() || all[i + 1] >= range_.end) begins_.push_back(all[i + 1]);
  }
  if (labels_.empty())
    throw DataError(fmt::format("The split of {} has no text with a label.", file.string()));
}

int64_t LabelledTexts::tokens(int64_t index, int64_t most) const {
  const auto i = static_cast<size_t>(index);
  return std::min(most, begins_[i + 1] - begins_[i]);
}

LabelledTexts::Text LabelledTexts::read(int64_t index, int64_t most) const {
  const auto i = static_cast<size_t>(index);
  const auto count = static_cast<size_t>(begins_[i + 1] - begins_[i]);
  Text text{.tokens = std::vector<int64_t>(count), .second = 0, .label = labels_[i]};
  const int64_t largest = range_.tokens->read(begins_[i], text.tokens);
  if (largest >= vocab_size_) {
    throw DataError(
        fmt::format("{} holds the token {}, and the model's vocabulary has {}. Use the vocabulary "
                    "that the data "
                    "was prepared with.",
                    range_.tokens->name(), largest, vocab_size_));
  }
  std::vector<uint8_t> marks(count);
  range_.tokens->read_marks(begins_[i], marks);
  const auto second =
      std::find_if(marks.begin(), marks.end(), [](auto mark) { return (mark & kSecondText) != 0; });
  const int64_t first_part = second - marks.begin();
  const int64_t second_part = marks.end() - second;
  int64_t kept_first = first_part;
  int64_t kept_second = second_part;
  const int64_t over = first_part + second_part - most;
  if (over > 0) {
    // First the longer part comes down to the other, and then both lose alike.
    const int64_t apart = first_part - second_part;
    const int64_t longer = std::min(over, std::abs(apart));
    (apart > 0 ? kept_first : kept_second) -= longer;
    kept_first -= (over - longer) / 2;
    kept_second -= (over - longer) - (over - longer) / 2;
  }
  const auto shorten = [&](int64_t end, int64_t lost) {
    if (lost == 0) return;
    const auto last = text.tokens.begin() + end - 1;
    text.tokens.erase(last - lost, last);
  };
  shorten(first_part + second_part, second_part - kept_second);
  shorten(first_part, first_part - kept_first);
  text.second = kept_first;
  return text;
}

}  // namespace zero
