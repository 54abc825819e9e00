#include "zero/data/dataset.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/data/mixture.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

TokenRange whole(const std::vector<fs::path>& paths) {
  auto tokens = std::make_shared<const Tokens>(paths);
  const int64_t size = tokens->size();
  return {std::move(tokens), 0, size};
}

// Describes one of many files, as X_train_000001.bin. Its set is the name with # for the number.
struct Shard {
  std::string set;
  int64_t number = 0;
};

std::optional<Shard> shard_of(const fs::path& path) {
  const auto stem = path.stem().string();
  const auto digits = stem.find_last_not_of("0123456789") + 1;
  if (digits == stem.size() || stem.size() - digits > 18) return {};
  const auto name = std::string_view(stem).substr(0, digits);
  if (!name.ends_with("train_") && !name.ends_with("val_")) return {};
  return Shard{fmt::format("{}#{}", name, path.extension().string()),
               std::stoll(stem.substr(digits))};
}

// Returns the name with its last "train" replaced; empty without one.
std::string validation_name(std::string name) {
  const auto at = name.rfind("train");
  return at == std::string::npos ? std::string() : name.replace(at, 5, "val");
}

// Turns X_train.bin into X_val.bin. The result is empty when the name does not contain "train" or
// there is no such file.
fs::path validation_sibling(const fs::path& train) {
  const auto name = validation_name(train.filename().string());
  if (name.empty()) return {};
  const auto sibling = train.parent_path() / name;
  std::error_code error;
  const bool exists = fs::exists(sibling, error);
  if (error) throw DataError(fmt::format("{}: {}.", sibling.string(), error.message()));
  return exists ? sibling : fs::path{};
}

// The files of a data set; without `validation` the end of `train` may serve.
struct Files {
  std::vector<fs::path> train;
  std::vector<fs::path> validation;
};

// The shards of a folder by set and number.
using Shards = std::map<std::string, std::map<int64_t, fs::path>>;

std::vector<fs::path> in_order(const std::map<int64_t, fs::path>& shards) {
  std::vector<fs::path> paths;
  for (int64_t expected = shards.begin()->first; const auto& [number, path] : shards) {
    if (number != expected++) {
      throw DataError(fmt::format(
          "Between {} and {} a shard is missing, number {}. Complete the data, or move those after "
          "it to another folder.",
          paths.back().string(), path.filename().string(), expected - 1));
    }
    paths.push_back(path);
  }
  return paths;
}

Files files_of(const fs::path& folder, bool needs_validation) {
  Shards shards;
  std::vector<Files> pairs;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    std::error_code ignored;
    if (!entry.is_regular_file(ignored)) continue;
    const auto name = entry.path().filename().string();
    if (name.ends_with(".marks.bin") || name.ends_with(".labels.bin") || name.ends_with(".idx"))
      continue;  // beside tokens
    if (const auto shard = shard_of(entry.path())) {
      const auto [other, added] = shards[shard->set].try_emplace(shard->number, entry.path());
      if (!added)
        throw DataError(fmt::format("{} and {} have the same number. Remove one.",
                                    other->second.string(), entry.path().filename().string()));
    } else if (auto sibling = validation_sibling(entry.path()); !sibling.empty()) {
      pairs.push_back({{entry.path()}, {std::move(sibling)}});
    }
  }
  if (error) throw DataError(fmt::format("{}: {}.", folder.string(), error.message()));
  std::sort(pairs.begin(), pairs.end(),
            [](const Files& a, const Files& b) { return a.train < b.train; });
  for (const char* preferred : {"train.bin", "train.txt"}) {
    for (const auto& pair : pairs) {
      if (pair.train.front() == folder / preferred) return pair;
    }
  }
  for (const auto& [set, train] : shards) {
    if (set.find("train_#") == std::string::npos) continue;
    const auto name = validation_name(set);
    const auto validation = shards.find(name);
    if (validation == shards.end() && needs_validation) {
      throw DataError(fmt::format(
          "The folder {} holds {} shards {}, but none to validate with, {}. Put those there, "
          "validate with other data, or not at all.",
          folder.string(), train.size(), set, name));
    }
    pairs.push_back({in_order(train), validation == shards.end() ? std::vector<fs::path>()
                                                                 : in_order(validation->second)});
  }
  if (pairs.size() == 1) return pairs.front();
  if (pairs.empty()) {
    throw DataError(
        fmt::format("The folder {} holds no pair of training and validation files (train.bin and "
                    "val.bin) and no shards of such (X_train_000001.bin, X_val_000000.bin). Make "
                    "them with `zero data prepare`, or give the path of a file.",
                    folder.string()));
  }
  throw DataError(fmt::format(
      "The folder {} holds {} data sets, with {} and {} among their training files. Give the path "
      "of one file, or put each set in a folder of its own.",
      folder.string(), pairs.size(), pairs[0].train[0].filename().string(),
      pairs[1].train[0].filename().string()));
}

Files files_of_file(const fs::path& train) {
  const auto shard = shard_of(train);
  if (!shard) {
    const auto sibling = validation_sibling(train);
    return {{train}, sibling.empty() ? std::vector<fs::path>() : std::vector{sibling}};
  }
  std::map<int64_t, fs::path> validation;
  std::error_code error;
  const auto folder = train.has_parent_path() ? train.parent_path() : fs::path(".");
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto other = shard_of(entry.path());
    if (other && other->set == validation_name(shard->set))
      validation.emplace(other->number, entry.path());
  }
  return {{train}, validation.empty() ? std::vector<fs::path>() : in_order(validation)};
}

Dataset split(const fs::path& path, const SplitOptions& options) {
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1)) {
    throw ConfigError(
        fmt::format("The validation fraction is {}; it must be at least 0 and less than 1.",
                    options.validation_fraction));
  }
  auto all = whole({path});
  auto validation =
      static_cast<int64_t>(static_cast<double>(all.size()) * options.validation_fraction);
  validation = std::min(validation, options.max_validation_tokens);
  if (options.validation_fraction > 0 && validation == 0) {
    throw DataError(
        fmt::format("The validation split of {} would be empty: {} of its {} tokens is less than "
                    "one. Give more data or a larger fraction.",
                    path.string(), options.validation_fraction, all.size()));
  }
  const int64_t boundary = all.size() - validation;
  Dataset dataset;
  dataset.train = TokenRange{all.tokens, 0, boundary};
  dataset.validation = TokenRange{all.tokens, boundary, all.size()};
  return dataset;
}

// Reads the record that `zero data prepare` writes beside the files.
void read_meta(const fs::path& folder, Dataset& dataset) {
  const auto path = folder / "meta.json";
  const auto refuse = [&](const std::string& why) {
    throw DataError(
        fmt::format("{} is not a description of token files: it {}. Prepare the data again, or "
                    "remove it.",
                    path.string(), why));
  };
  std::error_code error;
  if (!fs::exists(path, error)) return;
  try {
    const auto meta = parse_json(read_file(path, &fail<DataError>));
    const auto find = [&](const char* key) {
      const auto found = meta.find(key);
      return found == meta.end() ? nlohmann::json() : *found;
    };
    const auto size = find("vocab_size");
    if (!size.is_number_unsigned() || size < 1 || size > (1 << 24))
      refuse(fmt::format("has the vocab_size {}", excerpt(size.dump())));
    const auto tokenizer = find("tokenizer");
    if (!tokenizer.is_string())
      refuse(fmt::format("has the tokenizer {}", excerpt(tokenizer.dump())));
    for (const auto& label : find("labels")) {
      if (!label.is_string()) refuse(fmt::format("has the label {}", excerpt(label.dump())));
      dataset.labels.push_back(label.get<std::string>());
    }
    dataset.vocab_size = size.get<int64_t>();
    dataset.by_bytes = tokenizer == "bytes";
    if (!dataset.by_bytes) dataset.tokenizer = folder / tokenizer.get<std::string>();
  } catch (const DataError&) {
    throw;
  } catch (const Error& error) {
    refuse(error.what());
  }
}

bool same_contents(const fs::path& one, const fs::path& other) {
  return read_file(one, &fail<DataError>) == read_file(other, &fail<DataError>);
}

std::string tokens_of(const Dataset& data) {
  if (data.by_bytes) return "bytes";
  if (data.vocab_size == 0) return "tokens of a vocabulary that it does not tell";
  return fmt::format("the {} tokens of {}", data.vocab_size, data.tokenizer.string());
}

}  // namespace

int64_t Split::size() const {
  int64_t tokens = 0;
  for (const auto& source : sources) tokens += source.size();
  return tokens;
}

bool Split::marked() const {
  return std::ranges::any_of(sources,
                             [](const TokenRange& source) { return source.tokens->marked(); });
}

std::string Split::name() const {
  std::vector<std::string> names;
  for (const auto& source : sources) names.push_back(source.tokens->name());
  return fmt::format("{}", fmt::join(names, ", "));
}

void check_same_tokens(const Dataset& one, const Dataset& other,
                       const std::array<std::string, 2>& names, std::string_view why) {
  const bool told = one.vocab_size > 0 && other.vocab_size > 0;
  const bool same =
      one.by_bytes == other.by_bytes &&
      (one.by_bytes || !told ||
       (one.vocab_size == other.vocab_size && same_contents(one.tokenizer, other.tokenizer)));
  if (same) return;
  throw DataError(fmt::format("{} holds {}, but {} is {}: {}", names[1], tokens_of(other), names[0],
                              tokens_of(one), why));
}

Dataset join(std::vector<Dataset> parts, const std::vector<double>& weights) {
  ensure(!parts.empty(), "data to join");
  if (!weights.empty()) {
    if (weights.size() != parts.size()) {
      throw ConfigError(
          fmt::format("There are {} weights of the data ({}), and {} data sets. Give a weight for "
                      "each (--data A --data B --data-weights 0.7,0.3), or none.",
                      weights.size(), fmt::join(weights, ", "), parts.size()));
    }
    (void)Mixture(weights);  // checks them
  }
  auto all = std::move(parts.front());
  for (size_t i = 1; i < parts.size(); ++i) {
    auto& part = parts[i];
    check_same_tokens(all, part, {all.train.name(), part.train.name()},
                      "data that are mixed have the same tokens. Prepare all with the same "
                      "--tokenizer.");
    if (all.labels != part.labels) {
      throw DataError(fmt::format(
          "{} has {} labels of its texts, and {} has {}, or others: data that are mixed "
          "have the same. Prepare them together.",
          part.train.name(), part.labels.size(), all.train.name(), all.labels.size()));
    }
    if (all.vocab_size == 0) {
      all.vocab_size = part.vocab_size;
      all.tokenizer = std::move(part.tokenizer);
    }
    std::ranges::move(part.train.sources, std::back_inserter(all.train.sources));
    std::ranges::move(part.validation.sources, std::back_inserter(all.validation.sources));
  }
  all.train.weights = weights;
  return all;
}

Dataset open_mixture(const std::vector<fs::path>& paths, const std::vector<double>& weights,
                     const SplitOptions& options) {
  std::vector<Dataset> parts;
  for (const auto& path : paths) parts.push_back(open_dataset(path, options));
  return join(std::move(parts), weights);
}

Dataset open_dataset(const fs::path& path, const SplitOptions& options) {
  std::error_code error;
  const auto files = fs::is_directory(path, error) ? files_of(path, options.validation_fraction > 0)
                                                   : files_of_file(path);
  const auto& train = files.train.front();
  Dataset dataset;
  if (files.validation.empty() && files.train.size() == 1) {
    dataset = split(train, options);
  } else {
    dataset.train = whole(files.train);
    if (!files.validation.empty()) dataset.validation = whole(files.validation);
  }
  if (dataset.train.sources.front().tokens->format() == TokenFormat::bytes) {
    dataset.vocab_size = 256;
    dataset.by_bytes = true;
  } else {
    read_meta(train.has_parent_path() ? train.parent_path() : ".", dataset);
  }
  return dataset;
}

}  // namespace zero
