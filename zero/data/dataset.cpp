#include "zero/data/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "zero/base/error.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

TokenRange whole(const fs::path& path) {
  auto file = std::make_shared<const TokenFile>(path);
  const int64_t size = file->size();
  return {std::move(file), 0, size};
}

// X_train.bin -> X_val.bin; empty when the name does not contain "train" or there is no such file.
fs::path validation_sibling(const fs::path& train) {
  auto name = train.filename().string();
  const auto at = name.rfind("train");
  if (at == std::string::npos) return {};
  name.replace(at, 5, "val");
  const auto sibling = train.parent_path() / name;
  std::error_code error;
  const bool exists = fs::exists(sibling, error);
  if (error) throw DataError(fmt::format("{}: {}.", sibling.string(), error.message()));
  return exists ? sibling : fs::path{};
}

fs::path training_file_of(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    std::error_code ignored;
    if (entry.is_regular_file(ignored) && !validation_sibling(entry.path()).empty())
      found.push_back(entry.path());
  }
  if (error) throw DataError(fmt::format("{}: {}.", folder.string(), error.message()));
  std::sort(found.begin(), found.end());
  for (const char* preferred : {"train.bin", "train.txt"}) {
    if (std::find(found.begin(), found.end(), folder / preferred) != found.end())
      return folder / preferred;
  }
  if (found.size() == 1) return found.front();
  if (found.empty()) {
    throw DataError(
        fmt::format("The folder {} holds no pair of training and validation files (train.bin and "
                    "val.bin). Make them with `zero data "
                    "prepare`, or give the path of a file.",
                    folder.string()));
  }
  throw DataError(fmt::format(
      "The folder {} holds {} training files, {} and {} among them. Give the path of one.",
      folder.string(), found.size(), found[0].filename().string(), found[1].filename().string()));
}

Dataset split(const fs::path& path, const SplitOptions& options) {
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1)) {
    throw ConfigError(
        fmt::format("The validation fraction is {}; it must be at least 0 and less than 1.",
                    options.validation_fraction));
  }
  auto all = whole(path);
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
  dataset.train = {all.file, 0, boundary};
  dataset.validation = {all.file, boundary, all.size()};
  return dataset;
}

// What `zero data prepare` says about the files beside it.
void read_meta(const fs::path& folder, Dataset& dataset) {
  const auto path = folder / "meta.json";
  std::ifstream file(path);
  if (!file) return;
  try {
    const auto meta = nlohmann::json::parse(file);
    dataset.vocab_size = meta.at("vocab_size").get<int64_t>();
    const auto tokenizer = meta.at("tokenizer").get<std::string>();
    dataset.by_bytes = tokenizer == "bytes";
    if (!dataset.by_bytes) dataset.tokenizer = folder / tokenizer;
  } catch (const nlohmann::json::exception& error) {
    throw DataError(fmt::format(
        "{} is not a description of token files: {}. Prepare the data again, or remove it.",
        path.string(), error.what()));
  }
}

}  // namespace

Dataset open_dataset(const fs::path& path, const SplitOptions& options) {
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  const auto train = folder ? training_file_of(path) : path;
  const auto sibling = validation_sibling(train);
  Dataset dataset;
  if (sibling.empty()) {
    dataset = split(train, options);
  } else {
    dataset.train = whole(train);
    dataset.validation = whole(sibling);
  }
  if (dataset.train.file->format() == TokenFormat::bytes) {
    dataset.vocab_size = 256;
    dataset.by_bytes = true;
  } else if (!train.parent_path().empty()) {
    read_meta(train.parent_path(), dataset);
  } else {
    read_meta(".", dataset);
  }
  return dataset;
}

}  // namespace zero
