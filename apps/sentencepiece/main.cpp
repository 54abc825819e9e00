// The helper of `zero data prepare` and of text samples: runs sentencepiece for
// zero/data/tokenizer.cpp.
//
// - zero-sentencepiece train MODEL VOCAB_SIZE: text on the standard input -> a BPE model in the
//   file MODEL
// - zero-sentencepiece encode MODEL: text on the standard input -> u32 tokens on the standard
// output
// - zero-sentencepiece pieces MODEL: for each token a u32 length and the bytes that it stands for
//
// Exit status 0, or 1 with one sentence on the standard error.
//
// Note [Why a process of its own]
// sentencepiece and LibTorch's libc10 both define the global FLAGS_minloglevel, of different types
// and sizes. In one process the dynamic linker makes them one object, and sentencepiece's
// initialiser overwrites libc10's memory.
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "apps/sentencepiece/sentences.h"

namespace {

using zero::kMaxSentence;
using zero::Sentences;

constexpr int64_t kMaxTrainingSentences = 1'000'000;

int fail(const std::string& message) {
  std::cerr << message << "\n";
  return 1;
}

Sentences standard_input() {
  return Sentences([](char* data, size_t size) { return std::fread(data, 1, size, stdin); });
}

class TrainingSentences final : public sentencepiece::SentenceIterator {
 public:
  TrainingSentences() { Next(); }
  bool done() const override { return done_; }
  void Next() override {
    do {
      done_ = !sentences_.next(value_);
      if (!done_ && value_.back() == '\n') value_.pop_back();
    } while (!done_ && value_.empty());
  }
  const std::string& value() const override { return value_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  Sentences sentences_ = standard_input();
  std::string value_;
  bool done_ = false;
};

int train(const std::string& model, const std::string& vocab_size) {
  sentencepiece::SetRandomGeneratorSeed(0);
  TrainingSentences sentences;
  // Every text is encoded and decoded without loss: nothing is normalised, and what has no piece
  // falls back to its bytes.
  const std::unordered_map<std::string, std::string> options{
      {"model_type", "bpe"},
      {"vocab_size", vocab_size},
      {"character_coverage", "0.9999"},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"split_digits", "true"},
      {"input_sentence_size", std::to_string(kMaxTrainingSentences)},
      {"shuffle_input_sentence", "true"},
      {"max_sentence_length", std::to_string(2 * kMaxSentence)},
      {"num_threads", "1"},
      {"minloglevel", "2"},
  };
  std::string bytes;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &sentences, &bytes);
  if (!status.ok()) return fail(status.ToString());
  FILE* file = std::fopen(model.c_str(), "wb");
  const bool written =
      file != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  const bool closed = file != nullptr && std::fclose(file) == 0;
  if (!written || !closed) return fail("Cannot write " + model + ".");
  return 0;
}

bool put(const void* data, size_t size) { return std::fwrite(data, 1, size, stdout) == size; }

int encode(const sentencepiece::SentencePieceProcessor& processor) {
  auto sentences = standard_input();
  std::string sentence;
  std::vector<int> ids;
  std::vector<uint32_t> tokens;
  while (sentences.next(sentence)) {
    const auto status = processor.Encode(sentence, &ids);
    if (!status.ok()) return fail(status.ToString());
    tokens.assign(ids.begin(), ids.end());
    if (!put(tokens.data(), tokens.size() * sizeof(uint32_t)))
      return fail("Cannot write the tokens.");
  }
  if (std::fflush(stdout) != 0) return fail("Cannot write the tokens.");
  return 0;
}

// The bytes that a token stands for in running text.
std::string text_of(const sentencepiece::SentencePieceProcessor& processor, int id) {
  if (processor.IsControl(id)) return "";
  if (processor.IsUnknown(id)) return "\xEF\xBF\xBD";  // U+FFFD
  const std::string& piece = processor.IdToPiece(id);
  if (processor.IsByte(id))
    return {static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16))};  // <0xAB>
  constexpr std::string_view kBlank = "\xE2\x96\x81";  // U+2581 stands for a blank
  std::string text;
  for (size_t i = 0; i < piece.size();) {
    const bool blank = piece.compare(i, kBlank.size(), kBlank) == 0;
    text += blank ? ' ' : piece[i];
    i += blank ? kBlank.size() : 1;
  }
  return text;
}

int pieces(const sentencepiece::SentencePieceProcessor& processor) {
  for (int id = 0; id < processor.GetPieceSize(); ++id) {
    const auto text = text_of(processor, id);
    const auto length = static_cast<uint32_t>(text.size());
    if (!put(&length, sizeof length) || !put(text.data(), text.size()))
      return fail("Cannot write the pieces.");
  }
  if (std::fflush(stdout) != 0) return fail("Cannot write the pieces.");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string mode = arguments.empty() ? "" : arguments[0];
  if (mode == "train" && arguments.size() == 3) return train(arguments[1], arguments[2]);
  if ((mode != "encode" && mode != "pieces") || arguments.size() != 2) {
    return fail("usage: zero-sentencepiece train MODEL VOCAB_SIZE | encode MODEL | pieces MODEL");
  }
  sentencepiece::SentencePieceProcessor processor;
  const auto status = processor.Load(arguments[1]);
  if (!status.ok()) return fail(status.ToString());
  return mode == "encode" ? encode(processor) : pieces(processor);
}
