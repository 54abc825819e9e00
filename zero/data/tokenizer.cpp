#include "zero/data/tokenizer.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "zero/base/error.h"
#include "zero/data/filter.h"
#include "zero/data/token_pipe.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr const char* kProgram = "zero-sentencepiece";

// Looks for the program beside the running one, in the installation that this library belongs to,
// and on the PATH.
std::string find_program() {
  if (const char* chosen = std::getenv("ZERO_SENTENCEPIECE"); chosen != nullptr && *chosen != '\0')
    return chosen;
  std::vector<fs::path> candidates;
  std::error_code error;
  if (const auto self = fs::read_symlink("/proc/self/exe", error); !error)
    candidates.push_back(self.parent_path() / kProgram);
  Dl_info library{};
  if (::dladdr(reinterpret_cast<const void*>(&find_program), &library) != 0 &&
      library.dli_fname != nullptr) {
    const auto folder = fs::absolute(library.dli_fname, error).parent_path();
    candidates.push_back(folder / kProgram);
    candidates.push_back(folder.parent_path() / "bin" / kProgram);
    candidates.push_back(folder.parent_path().parent_path() / "bin" /
                         kProgram);  // lib/x86_64-linux-gnu
  }
  const char* variable = std::getenv("PATH");
  std::string_view path = variable != nullptr ? variable : "";
  while (!path.empty()) {
    const auto folder = path.substr(0, path.find(':'));
    path.remove_prefix(std::min(path.size(), folder.size() + 1));
    if (!folder.empty()) candidates.push_back(fs::path(folder) / kProgram);
  }
  for (const auto& candidate : candidates) {
    if (fs::is_regular_file(candidate, error)) return candidate.string();
  }
  throw DataError(
      fmt::format("The program {} is neither beside this one nor on the PATH. It is built and "
                  "installed with zero; or set ZERO_SENTENCEPIECE to its path.",
                  kProgram));
}

std::string_view no_input() { return {}; }

}  // namespace

Tokenizer Tokenizer::bytes() {
  Tokenizer tokenizer;
  for (int byte = 0; byte < 256; ++byte) tokenizer.pieces_.emplace_back(1, static_cast<char>(byte));
  return tokenizer;
}

Tokenizer Tokenizer::load(const fs::path& model) {
  std::string table;
  run_filter({find_program(), "pieces", model.string()}, no_input,
             [&](std::string_view piece) { table += piece; });
  Tokenizer tokenizer;
  tokenizer.model_ = model;
  tokenizer.pieces_ = parse_pieces(table);
  return tokenizer;
}

void Tokenizer::train(const std::function<std::string_view()>& text, int64_t vocab_size,
                      const fs::path& model) {
  run_filter({find_program(), "train", model.string(), std::to_string(vocab_size)}, text,
             [](std::string_view) {});
}

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int64_t> tokens;
  encode([rest = text]() mutable { return std::exchange(rest, {}); },
         [&](std::span<const uint32_t> some) {
           tokens.insert(tokens.end(), some.begin(), some.end());
         });
  return tokens;
}

void Tokenizer::encode(const std::function<std::string_view()>& text,
                       const std::function<void(std::span<const uint32_t>)>& tokens) const {
  if (by_bytes()) {
    std::vector<uint32_t> block;
    for (auto piece = text(); !piece.empty(); piece = text()) {
      while (!piece.empty()) {
        const auto part = piece.substr(0, size_t{1} << 16);
        block.resize(part.size());
        for (size_t i = 0; i < part.size(); ++i) block[i] = static_cast<unsigned char>(part[i]);
        tokens(block);
        piece.remove_prefix(part.size());
      }
    }
    return;
  }
  TokenStream stream(vocab_size());
  run_filter({find_program(), "encode", model_.string()}, text,
             [&](std::string_view piece) { stream.feed(piece, tokens); });
  stream.finish();
}

std::string Tokenizer::decode(std::span<const int64_t> tokens) const {
  std::string text;
  for (const int64_t token : tokens) {
    if (token < 0 || token >= vocab_size()) {
      throw DataError(fmt::format("Token {} is outside of the tokenizer's vocabulary of {}.", token,
                                  vocab_size()));
    }
    text += pieces_[static_cast<size_t>(token)];
  }
  return text;
}

}  // namespace zero
