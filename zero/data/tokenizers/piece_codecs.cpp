// The tokenizers whose tokens stand for bytes each: bytes, and sentencepiece's models.
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "zero/base/error.h"
#include "zero/data/filter.h"
#include "zero/data/token_pipe.h"
#include "zero/data/tokenizers/codec.h"

namespace zero::tokenizers {
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

class PieceCodec : public Codec {
 public:
  PieceCodec(fs::path file, std::vector<std::string> pieces)
      : Codec(std::move(file)), pieces_(std::move(pieces)) {}

  int64_t vocab_size() const override { return static_cast<int64_t>(pieces_.size()); }
  const std::string& piece(uint32_t token) const override { return pieces_[token]; }
  using Codec::encode;
  void encode(std::string_view text, SpecialTokens /*special*/,
              std::vector<uint32_t>& tokens) const override {
    encode([rest = text]() mutable { return std::exchange(rest, {}); },
           [&](std::span<const uint32_t> some) {
             tokens.insert(tokens.end(), some.begin(), some.end());
           });
  }
  std::string decode(const std::vector<uint32_t>& tokens,
                     SpecialTokens /*special*/) const override {
    std::string text;
    for (const auto token : tokens) text += pieces_[token];
    return text;
  }

 private:
  std::vector<std::string> pieces_;
};

class ByteCodec final : public PieceCodec {
 public:
  ByteCodec() : PieceCodec({}, all_bytes()) {}
  using PieceCodec::encode;
  void encode(const TextInput& text, const TokenOutput& tokens) const override {
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
  }

 private:
  static std::vector<std::string> all_bytes() {
    std::vector<std::string> pieces;
    for (int byte = 0; byte < 256; ++byte) pieces.emplace_back(1, static_cast<char>(byte));
    return pieces;
  }
};

class SentencePieceCodec final : public PieceCodec {
 public:
  using PieceCodec::encode;
  using PieceCodec::PieceCodec;
  void encode(const TextInput& text, const TokenOutput& tokens) const override {
    TokenStream stream(vocab_size());
    run_filter({find_program(), "encode", file().string()}, text,
               [&](std::string_view piece) { stream.feed(piece, tokens); });
    stream.finish();
  }
};

}  // namespace

std::shared_ptr<const Codec> byte_codec() { return std::make_shared<ByteCodec>(); }

std::shared_ptr<const Codec> sentencepiece_codec(const fs::path& model) {
  std::string table;
  run_filter({find_program(), "pieces", model.string()}, no_input,
             [&](std::string_view piece) { table += piece; });
  return std::make_shared<SentencePieceCodec>(model, parse_pieces(table));
}

void train_sentencepiece(const TextInput& text, int64_t vocab_size, const fs::path& model) {
  run_filter({find_program(), "train", model.string(), std::to_string(vocab_size)}, text,
             [](std::string_view) {});
}

}  // namespace zero::tokenizers
