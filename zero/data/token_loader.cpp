#include "zero/data/token_loader.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <type_traits>
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
  nlohmann::ordered_json object{
      {"sample", sample}, {"sequence", sequence}, {"sequences", sequences}, {"seed", seed}};
  if (!sources.empty()) object["sources"] = sources;
  if (!shares.empty()) object["shares"] = shares;
  return object.dump();
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
  const auto integers = [&](const char* key) {
    std::vector<int64_t> values;
    const auto found = object.find(key);
    if (found == object.end()) return values;
    const bool fits = found->is_array() && std::ranges::all_of(*found, [](const auto& value) {
                        return value.is_number_integer();
                      });
    if (!fits) {
      throw DataError(
          fmt::format("The state of the data has the {} {}, which are not whole numbers.", key,
                      excerpt(found->dump())));
    }
    return found->template get<std::vector<int64_t>>();
  };
  return {integer("sample"), integer("sequence"), integer("sequences"),
          integer("seed"),   integers("sources"), integers("shares")};
}

TokenLoader::TokenLoader(Split split, const LoaderOptions& options)
    : split_(std::move(split)), options_(options) {
  check(options_);
  if (split_.sources.empty()) throw ConfigError("The loader was given a split without sources.");
  if (!split_.weights.empty()) mixture_.emplace(split_.weights);
  row_.resize(static_cast<size_t>(options_.sequence) + 1);
  for (const auto& source : split_.sources) {
    if (source.tokens == nullptr)
      throw ConfigError("The loader was given a range of no tokens: TokenRange::tokens is null.");
    const int64_t count = std::max<int64_t>(0, source.size() - 1) / options_.sequence;
    if (count == 0) {
      throw DataError(fmt::format(
          "The split of {} has {} tokens, and one sequence of {} with its target needs "
          "{}. Use a shorter sequence or more data.",
          source.tokens->name(), source.size(), options_.sequence, options_.sequence + 1));
    }
    ends_.push_back(sequences() + count);
    check_source(source);
    const bool marked = options_.marks && source.tokens->marked();
    if (marked || options_.documents) marks_.resize(row_.size());
  }
  const int64_t together = options_.world_size * options_.micro_batch;
  if (sequences() < together) {
    throw DataError(fmt::format(
        "The split of {} has {} sequences of {} tokens, fewer than the {} that {} ranks take at a "
        "time with a micro-batch of {}. Use fewer ranks, a "
        "smaller micro-batch, a shorter sequence or more data.",
        split_.name(), sequences(), options_.sequence, together, options_.world_size,
        options_.micro_batch));
  }
}

void TokenLoader::check_source(const TokenRange& source) {
  const auto& tokens = *source.tokens;
  const int64_t end =
      std::min(source.end, source.begin + kTokensCheckedAtStart / std::ssize(split_.sources));
  constexpr int64_t kBlock = int64_t{1} << 16;
  const auto for_blocks = [&](const auto& visit) {
    for (int64_t begin = source.begin; begin < end; begin += kBlock) {
      if (visit(begin, static_cast<size_t>(std::min(kBlock, end - begin)))) return true;
    }
    return false;
  };
  if (options_.documents) {
    std::vector<uint8_t> block(kBlock);
    const bool found = tokens.tells_documents() && for_blocks([&](int64_t begin, size_t count) {
                         const auto marks = std::span(block).first(count);
                         tokens.read_marks(begin, marks);
                         return std::ranges::any_of(
                             marks, [](uint8_t mark) { return (mark & kBeginsDocument) != 0; });
                       });
    if (!found) {
      throw DataError(fmt::format(
          "Attention is to stay inside of documents (--document-attention), and {} {}. Prepare "
          "JSON lines, each of which is a document (zero data prepare --jsonl), give Megatron's "
          "files, or leave the option out.",
          tokens.name(),
          tokens.tells_documents() ? "has marks, none of which says that a document begins"
                                   : "has no marks that say where they begin"));
    }
  }
  if (options_.vocab_size > 0 && options_.vocab_size < tokens.vocab_limit()) {
    std::vector<int64_t> block(kBlock);
    for_blocks([&](int64_t begin, size_t count) {
      check_token(source, tokens.read(begin, std::span(block).first(count)), begin,
                  static_cast<int64_t>(count));
      return false;
    });
  }
}

void TokenLoader::check_token(const TokenRange& source, int64_t largest, int64_t begin,
                              int64_t count) const {
  if (options_.vocab_size <= 0 || largest < options_.vocab_size) return;
  throw DataError(fmt::format(
      "{} holds the token {} (among tokens {} to {}), and the model's vocabulary has {}. Use the "
      "vocabulary that the data was "
      "prepared with.",
      source.tokens->name(), largest, begin, begin + count - 1, options_.vocab_size));
}

TokenLoader::Place TokenLoader::place(size_t source, int64_t sequence) const {
  const auto& range = split_.sources[source];
  return {range, range.begin + sequence * options_.sequence};
}

TokenLoader::Place TokenLoader::place_of(int64_t sample) const {
  const auto shuffled = [&](int64_t of, int64_t sequences, uint64_t seed) {
    const int64_t within = of % sequences;
    if (!options_.shuffle) return within;
    return Permutation(sequences, seed, static_cast<uint64_t>(of / sequences))(within);
  };
  const auto before = [&](size_t source) { return source == 0 ? 0 : ends_[source - 1]; };
  if (mixture_) {
    const auto [source, of_source] = (*mixture_)(sample);
    return place(source,
                 shuffled(of_source, ends_[source] - before(source), options_.seed + source));
  }
  const int64_t sequence = shuffled(sample, sequences(), options_.seed);
  const auto source =
      static_cast<size_t>(std::ranges::upper_bound(ends_, sequence) - ends_.begin());
  return place(source, sequence - before(source));
}

void TokenLoader::follow_marks(const Place& place, int64_t row) {
  if (marks_.empty()) return;
  place.source.tokens->read_marks(place.begin, marks_);
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
    const auto at = place_of(first + row);
    check_token(at.source, at.source.tokens->read(at.begin, row_), at.begin, length + 1);
    std::copy_n(row_.begin(), length, tokens + row * length);
    std::copy_n(row_.begin() + 1, length, targets + row * length);
    follow_marks(at, row);
  }
  sample_ += options_.world_size * rows;
  // The disk works while the model does.
  for (int64_t row = 0; row < rows; ++row) {
    const auto at = place_of(sample_ + options_.rank * rows + row);
    at.source.tokens->will_need(at.begin, length + 1);
  }
  return batch_;
}

LoaderState TokenLoader::state() const {
  LoaderState state{.sample = sample_,
                    .sequence = options_.sequence,
                    .sequences = sequences(),
                    .seed = options_.seed};
  if (ends_.size() > 1 || mixture_)
    std::adjacent_difference(ends_.begin(), ends_.end(), std::back_inserter(state.sources));
  if (mixture_) state.shares = mixture_->counts();
  return state;
}

void check_same_data(const LoaderState& state, const LoaderState& here) {
  const auto expect = [&](const char* what, const auto& saved, const auto& now) {
    if (saved == now) return;
    const auto text = [](const auto& value) {
      if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(value)>>) {
        return fmt::format("{}", value);
      } else {
        return value.empty() ? std::string("none") : fmt::format("{}", fmt::join(value, ", "));
      }
    };
    throw DataError(
        fmt::format("The run that is resumed had {} {}, and this one has {}: its position in the "
                    "data would mean something else. Use the same data, weights, sequence "
                    "length and seed.",
                    what, text(saved), text(now)));
  };
  expect("a sequence length of", state.sequence, here.sequence);
  expect("the numbers of sequences in a mixture", state.sources, here.sources);
  expect("the shares of 4096 samples (by --data-weights)", state.shares, here.shares);
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
