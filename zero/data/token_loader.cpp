#include "zero/data/token_loader.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/data/permutation.h"

namespace zero {
namespace {

constexpr int64_t kTokensCheckedAtStart = int64_t{1} << 24;
constexpr int64_t kIgnored = -100;  // a target that has no loss, as in LibTorch

void check(const LoaderOptions& options) {
  if (options.sequence <= 0)
    throw ConfigError(
        fmt::format("The sequence length is {}; it must be positive.", options.sequence));
  if (options.micro_batch <= 0)
    throw ConfigError(
        fmt::format("The micro-batch is {}; it must be positive.", options.micro_batch));
  if (options.rank < 0 || options.rank >= options.world_size) {
    throw ConfigError(fmt::format("The rank is {} of {}; it must be at least 0 and below that.",
                                  options.rank, options.world_size));
  }
}

// Returns whether nobody but `tensor` itself can see its values; autograd may hold the tensor or a
// view of it.
bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

}  // namespace

std::string LoaderState::to_json() const {
  return nlohmann::ordered_json{
      {"sample", sample}, {"sequence", sequence}, {"sequences", sequences}, {"seed", seed}}
      .dump();
}

LoaderState LoaderState::from_json(std::string_view json) {
  const auto object = [&] {
    try {
      return parse_json(json);
    } catch (const Error& error) {
      throw DataError(fmt::format("The state of the data {}.", error.what()));
    }
  }();
  const auto integer = [&](const char* key) {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_number_integer()) {
      throw DataError(
          fmt::format("The state of the data has the {} {}, which is not a whole number.", key,
                      found == object.end() ? "null" : excerpt(found->dump())));
    }
    return *found;
  };
  return {integer("sample"), integer("sequence"), integer("sequences"), integer("seed")};
}

TokenLoader::TokenLoader(TokenRange tokens, const LoaderOptions& options)
    : tokens_(std::move(tokens)), options_(options) {
  check(options_);
  if (tokens_.tokens == nullptr)
    throw ConfigError("The loader was given a range of no tokens: TokenRange::tokens is null.");
  const auto file = tokens_.tokens->name();
  sequences_ = std::max<int64_t>(0, tokens_.size() - 1) / options_.sequence;
  if (sequences_ == 0) {
    throw DataError(
        fmt::format("The split of {} has {} tokens, and one sequence of {} with its target needs "
                    "{}. Use a shorter sequence or more data.",
                    file, tokens_.size(), options_.sequence, options_.sequence + 1));
  }
  const int64_t together = options_.world_size * options_.micro_batch;
  if (sequences_ < together) {
    throw DataError(fmt::format(
        "The split of {} has {} sequences of {} tokens, fewer than the {} that {} ranks take at a "
        "time with a micro-batch of {}. Use fewer ranks, a "
        "smaller micro-batch, a shorter sequence or more data.",
        file, sequences_, options_.sequence, together, options_.world_size, options_.micro_batch));
  }
  row_.resize(static_cast<size_t>(options_.sequence) + 1);
  if (options_.documents) check_documents();
  if ((options_.marks || options_.documents) && tokens_.tokens->marked())
    marks_.resize(row_.size());
  if (options_.vocab_size > 0 && options_.vocab_size < tokens_.tokens->vocab_limit()) {
    std::vector<int64_t> block(size_t{1} << 16);
    const int64_t end = std::min(tokens_.end, tokens_.begin + kTokensCheckedAtStart);
    for (int64_t begin = tokens_.begin; begin < end; begin += static_cast<int64_t>(block.size())) {
      const auto count = std::min<int64_t>(static_cast<int64_t>(block.size()), end - begin);
      check_token(tokens_.tokens->read(begin, std::span(block).first(count)), begin, count);
    }
  }
}

void TokenLoader::check_token(int64_t largest, int64_t begin, int64_t count) const {
  if (options_.vocab_size <= 0 || largest < options_.vocab_size) return;
  throw DataError(fmt::format(
      "{} holds the token {} (among tokens {} to {}), and the model's vocabulary has {}. Use the "
      "vocabulary that the data was "
      "prepared with.",
      tokens_.tokens->name(), largest, begin, begin + count - 1, options_.vocab_size));
}

int64_t TokenLoader::sequence_of(int64_t sample) const {
  const int64_t within = sample % sequences_;
  if (!options_.shuffle) return within;
  return Permutation(sequences_, options_.seed, static_cast<uint64_t>(sample / sequences_))(within);
}

void TokenLoader::check_documents() const {
  const auto refuse = [&](std::string_view why) {
    throw DataError(fmt::format(
        "Attention is to stay inside of documents (--document-attention), and {} {}. Prepare JSON "
        "lines, each of which is a document (zero data prepare --jsonl), or leave the option out.",
        tokens_.tokens->name(), why));
  };
  if (!tokens_.tokens->marked()) refuse("has no marks that say where they begin");
  std::vector<uint8_t> block(size_t{1} << 16);
  const int64_t end = std::min(tokens_.end, tokens_.begin + kTokensCheckedAtStart);
  for (int64_t begin = tokens_.begin; begin < end; begin += static_cast<int64_t>(block.size())) {
    const auto count = std::min<int64_t>(static_cast<int64_t>(block.size()), end - begin);
    const auto marks = std::span(block).first(static_cast<size_t>(count));
    tokens_.tokens->read_marks(begin, marks);
    if (std::ranges::any_of(marks, [](uint8_t mark) { return (mark & kBeginsDocument) != 0; }))
      return;
  }
  refuse("has marks, none of which says that a document begins");
}

void TokenLoader::follow_marks(int64_t begin, int64_t row) {
  if (marks_.empty()) return;
  tokens_.tokens->read_marks(begin, marks_);
  const auto is = [&](int64_t i, uint8_t mark) {
    return (marks_[static_cast<size_t>(i)] & mark) != 0;
  };
  const int64_t length = options_.sequence;
  auto* targets = batch_.targets.mutable_data_ptr<int64_t>() + row * length;
  for (int64_t i = 0; i < length; ++i) {
    const bool supervised = !options_.marks || is(i + 1, kSupervised);
    const bool of_another = options_.documents && is(i + 1, kBeginsDocument);
    if (!supervised || of_another) targets[i] = kIgnored;
  }
  if (!options_.documents) return;
  auto* positions = batch_.positions.mutable_data_ptr<int64_t>() + row * length;
  for (int64_t i = 0; i < length; ++i)
    positions[i] = i == 0 || is(i, kBeginsDocument) ? 0 : positions[i - 1] + 1;
}

TokenLoader::Batch TokenLoader::next() {
  const int64_t rows = options_.micro_batch;
  const int64_t length = options_.sequence;
  for (auto* tensor : {&batch_.tokens, &batch_.targets, &batch_.positions}) {
    if (tensor == &batch_.positions && !options_.documents) continue;
    if (!is_ours(*tensor)) *tensor = at::empty({rows, length}, at::kLong);
  }
  const int64_t first = sample_ + options_.rank * rows;
  auto* tokens = batch_.tokens.mutable_data_ptr<int64_t>();
  auto* targets = batch_.targets.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t begin = tokens_.begin + sequence_of(first + row) * length;
    check_token(tokens_.tokens->read(begin, row_), begin, length + 1);
    std::copy_n(row_.begin(), length, tokens + row * length);
    std::copy_n(row_.begin() + 1, length, targets + row * length);
    follow_marks(begin, row);
  }
  sample_ += options_.world_size * rows;
  // The disk works while the model does.
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t begin =
        tokens_.begin + sequence_of(sample_ + options_.rank * rows + row) * length;
    tokens_.tokens->will_need(begin, length + 1);
  }
  return batch_;
}

LoaderState TokenLoader::state() const {
  return {.sample = sample_,
          .sequence = options_.sequence,
          .sequences = sequences_,
          .seed = options_.seed};
}

void check_same_data(const LoaderState& state, const LoaderState& here) {
  const auto expect = [&](const char* what, auto saved, auto now) {
    if (saved != now) {
      throw DataError(
          fmt::format("The run that is resumed had {} {}, and this one has {}: its position in the "
                      "data would mean something else. Use the same data, sequence "
                      "length and seed.",
                      what, saved, now));
    }
  };
  expect("a sequence length of", state.sequence, here.sequence);
  expect("a number of sequences of", state.sequences, here.sequences);
  expect("the seed", state.seed, here.seed);
  if (state.sample < 0)
    throw DataError(fmt::format("The state of the data has the negative sample {}.", state.sample));
}

void TokenLoader::restore(const LoaderState& state) {
  check_same_data(state, this->state());
  sample_ = state.sample;
}

}  // namespace zero
