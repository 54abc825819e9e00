#include "zero/checkpoint/weight_files.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/bitsandbytes.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/foreign/readers.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

bool is_torch_file(const fs::path& path) {
  const auto extension = path.extension().string();
  return extension == ".pt" || extension == ".bin" || extension == ".pth" || extension == ".ckpt";
}

// Returns the value with the weights: programs keep them among other things under one of these
// keys.
const foreign::Value* weights_within(const foreign::Value& root,
                                     std::vector<std::string>& left_out) {
  for (const auto* key : {"state_dict", "model_state_dict", "model", "module"}) {
    const auto* found = root.find(key);
    if (found == nullptr || !found->is(foreign::Value::Kind::dict)) continue;
    std::vector<std::string> others;
    for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
      const auto name = root.items[i]->as_text().value_or("(a key that is no text)");
      if (name != key) others.push_back(name);
    }
    if (!others.empty()) {
      left_out.push_back(foreign::listed(others, fmt::format("the weights are under '{}'", key)));
    }
    return found;
  }
  return &root;
}

struct Index {
  std::map<std::string, std::string> file_of;
  std::map<std::string, std::string> metadata;  // its texts
};

Index read_index(const fs::path& index) {
  nlohmann::json object;
  try {
    object = parse_json(read_file(index, fail<CheckpointError>));
  } catch (const CheckpointError&) {
    throw;
  } catch (const Error& error) {
    throw CheckpointError(
        fmt::format("{} is damaged: it {}. It should have an object 'weight_map' of tensors and "
                    "files.",
                    index.string(), error.what()));
  }
  const auto map = object.is_object() ? object.find("weight_map") : object.end();
  if (map == object.end() || !map->is_object() || map->empty()) {
    throw CheckpointError(fmt::format(
        "{} is damaged: it has no object 'weight_map' of tensors and files.", index.string()));
  }
  Index read;
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

// Returns whether this is the name of one of several files of weights.
bool is_numbered_weights(std::string_view name) {
  constexpr size_t kDigits = 5;
  const auto skip = [&](std::string_view word) {
    if (!name.starts_with(word)) return false;
    name.remove_prefix(word.size());
    return true;
  };
  const auto skip_number = [&] {
    const auto digits = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(digits);
    return digits >= kDigits;
  };
  return skip("model-") && skip_number() && skip("-of-") && skip_number() && name == ".safetensors";
}

}  // namespace

std::vector<fs::path> own_weights_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const auto name = entry.path().filename().string();
    if (is_numbered_weights(name) || name == kWeightsFile || name == kWeightsIndex)
      found.push_back(entry.path());
  }
  std::ranges::sort(found);
  return found;
}

WeightFiles::WeightFiles(const fs::path& path, Folder folder) : path_(path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    add_folder(folder);
  } else if (folder == Folder::any && path.extension() != ".safetensors") {
    add_torch_file(path);
  } else {
    add(path);
  }
  drop_wrapper();
  read_back_quantised();
}

void WeightFiles::add_folder(Folder folder) {
  std::error_code ignored;
  for (const auto* name : {kWeightsFile, kWeightsIndex, kTorchWeightsFile, kTorchWeightsIndex,
                           "model.pt", "pytorch_model.pt"}) {
    if (!fs::exists(path_ / name, ignored)) continue;
    return path_ / name == path_ / kWeightsIndex || path_ / name == path_ / kTorchWeightsIndex
               ? add_index(path_ / name)
               : add(path_ / name);
  }
  if (folder == Folder::of_a_model) {
    throw CheckpointError(
        fmt::format("The folder {} holds neither {} nor {}, so there are no weights to read ({} "
                    "and its index would do too). Give a folder that transformers' save_pretrained "
                    "wrote.",
                    path_.string(), kWeightsFile, kWeightsIndex, kTorchWeightsFile));
  }
  std::array<std::vector<fs::path>, 3> kinds;  // indices, safetensors, and the rest
  for (const auto& entry : fs::directory_iterator(path_)) {
    const auto name = entry.path().filename().string();
    if (name.ends_with(".index.json")) kinds[0].push_back(entry.path());
    if (name.ends_with(".safetensors")) kinds[1].push_back(entry.path());
    if (is_torch_file(entry.path())) kinds[2].push_back(entry.path());
  }
  for (auto& files : kinds) {
    if (files.empty()) continue;
    std::sort(files.begin(), files.end());
    if (&files == &kinds[0]) return add_index(files.back());
    for (const auto& file : files) add(file);
    return;
  }
  throw CheckpointError(fmt::format(
      "'{}' is no checkpoint of a known form: it has no manifest.json, no latest and "
      "*model_states.pt (DeepSpeed), no .metadata (PyTorch distributed), and no .safetensors, .bin "
      "or .pt files.",
      path_.string()));
}

void WeightFiles::add(const fs::path& file) {
  if (is_torch_file(file)) {
    add_torch_file(file);
  } else {
    add_safetensors(file);
  }
}

void WeightFiles::add_safetensors(const fs::path& file) {
  const auto reader = std::make_shared<const SafetensorsReader>(file);
  for (const auto& info : reader->tensors()) {
    add_place({info, file, [reader, name = info.name] { return reader->read(name); },
               [reader, name = info.name](int64_t begin, int64_t count) {
                 return reader->read(name, begin, count);
               }});
  }
}

void WeightFiles::add_torch_file(const fs::path& path) {
  const auto file = std::make_shared<const foreign::PtFile>(path);
  for (auto& [name, found] : tensors_in(*file, *weights_within(file->root(), left_out_))) {
    const auto tensor = std::make_shared<const foreign::StoredTensor>(std::move(found));
    WeightPlace place{
        {name, tensor->dtype, tensor->sizes}, path, [tensor] { return tensor->read(); }, {}};
    if (tensor->is_contiguous()) {
      place.read_part = [tensor](int64_t begin, int64_t count) {
        return tensor->read(begin, count);
      };
    }
    add_place(std::move(place));
  }
  checks_.emplace_back([file] { file->verify(); });
}

void WeightFiles::add_place(WeightPlace place) {
  const auto name = place.info.name;
  const auto file = place.file;
  const auto [found, is_new] = places_.try_emplace(name, std::move(place));
  if (!is_new) {
    throw CheckpointError(fmt::format("Both {} and {} hold a tensor '{}'.",
                                      found->second.file.string(), file.string(), excerpt(name)));
  }
  by_file_.push_back(name);
}

void WeightFiles::add_index(const fs::path& index) {
  const auto read = read_index(index);
  std::set<std::string> files;
  for (const auto& [tensor, file] : read.file_of) files.insert(file);
  for (const auto& file : files) add(index.parent_path() / file);
  for (const auto& [tensor, file] : read.file_of) {
    const auto found = places_.find(tensor);
    if (found != places_.end() && found->second.file == index.parent_path() / file) continue;
    throw CheckpointError(fmt::format("{} holds no tensor '{}', which {} says it has.",
                                      (index.parent_path() / file).string(), excerpt(tensor),
                                      index.string()));
  }
  for (const auto& [name, kept] : read.metadata) {
    if (!read.file_of.contains(name) && read.file_of.contains(kept)) ties_[name] = kept;
  }
}

void WeightFiles::drop_wrapper() {
  const std::string wrapper = "module.";
  const bool wrapped = !places_.empty() && std::ranges::all_of(places_, [&](const auto& each) {
    return each.first.starts_with(wrapper);
  });
  if (!wrapped) return;
  WeightPlaces places;
  for (auto& [name, place] : places_) {
    place.info.name = name.substr(wrapper.size());
    places.emplace(place.info.name, std::move(place));
  }
  places_ = std::move(places);
  for (auto& name : by_file_) name.erase(0, wrapper.size());
}

std::vector<std::string> WeightFiles::names() const {
  std::vector<std::string> names;
  for (const auto& entry : places_) names.push_back(entry.first);
  return names;
}

void WeightFiles::read_back_quantised() {
  read_back_bitsandbytes(places_);
  std::erase_if(by_file_, [&](const auto& name) { return !places_.contains(name); });
}

at::Tensor WeightFiles::read(std::string_view name, int64_t begin, int64_t count) const {
  return place(name).range(begin, count);
}

at::Tensor WeightPlace::range(int64_t begin, int64_t count) const {
  const int64_t numel = c10::multiply_integers(info.shape);
  if (begin < 0 || count < 0 || count > numel - begin) {
    throw CheckpointError(
        fmt::format("'{}' of {} has {} elements, and {} from number {} on were asked for.",
                    info.name, file.string(), numel, count, begin));
  }
  if (read_part) return read_part(begin, count);
  return read().reshape({-1}).narrow(0, begin, count).clone();
}

void WeightFiles::verify() const {
  for (const auto& check : checks_) check();
}

const WeightPlace& WeightFiles::place(std::string_view name) const {
  const auto found = places_.find(name);
  if (found != places_.end()) return found->second;
  throw CheckpointError(
      fmt::format("{} holds no tensor '{}'.{}", path_.string(), name, did_you_mean(name, names())));
}

}  // namespace zero
