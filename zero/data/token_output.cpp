#include "zero/data/token_output.h"

#include <fmt/format.h>

#include <limits>

#include "zero/base/error.h"

namespace zero {

TokenOutput::TokenOutput(std::filesystem::path path, int64_t vocab_size)
    : path_(std::move(path)), wide_(vocab_size > 65536), file_(path_, &fail<DataError>) {
  header_[0] = wide_ ? kLlmC32Magic : kLlmCMagic;
  header_[1] = wide_ ? kLlmC32Version : kLlmCVersion;
  file_.write(header_.data(), kLlmCHeaderBytes);
}

void TokenOutput::write(std::span<const uint32_t> tokens) {
  count_ += static_cast<int64_t>(tokens.size());
  if (wide_) return file_.write(tokens.data(), tokens.size_bytes());
  narrow_.assign(tokens.begin(), tokens.end());
  file_.write(narrow_.data(), narrow_.size() * sizeof(uint16_t));
}

int64_t TokenOutput::commit() {
  if (count_ > std::numeric_limits<int32_t>::max()) {
    throw DataError(fmt::format(
        "{} would hold {} tokens; llm.c's format counts at most {}. Prepare the text in parts.",
        path_.string(), count_, std::numeric_limits<int32_t>::max()));
  }
  header_[2] = static_cast<int32_t>(count_);
  file_.write_at(0, header_.data(), kLlmCHeaderBytes);
  file_.commit();
  return count_;
}

}  // namespace zero
