#include "zero/checkpoint/weight_files.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"

namespace zero {

namespace fs = std::filesystem;

WeightFiles::WeightFiles(const fs::path& path) : path_(path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    add(path);
  } else if (fs::exists(path / kWeightsFile, ignored)) {
    add(path / kWeightsFile);
  } else if (fs::exists(path / kWeightsIndex, ignored)) {
    add_index(path / kWeightsIndex);
  } else {
    throw CheckpointError(
        fmt::format("The folder {} holds neither {} nor {}, so there are no weights to read. Give "
                    "a folder that transformers' save_pretrained wrote.",
                    path.string(), kWeightsFile, kWeightsIndex));
  }
}

void WeightFiles::add(const fs::path& file) {
  files_.push_back(std::make_unique<SafetensorsReader>(file));
  for (const auto& info : files_.back()->tensors()) {
    const auto [found, is_new] = file_of_.try_emplace(info.name, files_.size() - 1);
    if (is_new) continue;
    throw CheckpointError(fmt::format("Both {} and {} hold a tensor '{}'.",
                                      files_[found->second]->path().string(), file.string(),
                                      info.name));
  }
}

WeightIndex read_weight_index(const fs::path& index) {
  const auto text = read_file(index, fail<CheckpointError>);
  const auto object = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto map = object.is_object() ? object.find("weight_map") : object.end();
  if (map == object.end() || !map->is_object() || map->empty()) {
    throw CheckpointError(fmt::format(
        "{} is damaged: it has no object 'weight_map' of tensors and files.", index.string()));
  }
  WeightIndex read;
  for (const auto& [tensor, file] : map->items()) {
    const auto name = file.is_string() ? file.get<std::string>() : std::string();
    if (name.empty() || fs::path(name).filename() != name) {
      throw CheckpointError(fmt::format(
          "{} is damaged: it gives the tensor '{}' the file {}, which is no name of a file beside "
          "it.",
          index.string(), tensor, file.dump()));
    }
    std::error_code ignored;
    if (!fs::exists(index.parent_path() / name, ignored)) {
      throw CheckpointError(fmt::format("The file {} is missing, which {} names.",
                                        (index.parent_path() / name).string(), index.string()));
    }
    read.file_of[tensor] = name;
  }
  const auto metadata = object.find("metadata");
  if (metadata == object.end() || !metadata->is_object()) return read;
  for (const auto& [key, value] : metadata->items()) {
    if (value.is_string()) read.metadata[key] = value.get<std::string>();
  }
  return read;
}

void WeightFiles::add_index(const fs::path& index) {
  const auto files = read_weight_index(index).file_of;
  std::set<std::string> names;
  for (const auto& [tensor, name] : files) names.insert(name);
  for (const auto& name : names) add(index.parent_path() / name);
  for (const auto& [tensor, name] : files) {
    if (contains(tensor)) continue;
    throw CheckpointError(fmt::format("{} holds no tensor '{}', which {} says it has.",
                                      (index.parent_path() / name).string(), tensor,
                                      index.string()));
  }
}

std::vector<std::string> WeightFiles::names() const {
  std::vector<std::string> names;
  for (const auto& entry : file_of_) names.push_back(entry.first);
  return names;
}

const SafetensorsReader& WeightFiles::reader(std::string_view name) const {
  const auto found = file_of_.find(name);
  if (found != file_of_.end()) return *files_[found->second];
  throw CheckpointError(
      fmt::format("{} holds no tensor '{}'.{}", path_.string(), name, did_you_mean(name, names())));
}

}  // namespace zero
