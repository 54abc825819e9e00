// Reads files of weights alone as views: files of safetensors or torch.save, one or several with an
// index.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/readers.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/weight_files.h"

namespace zero::foreign {

namespace fs = std::filesystem;

namespace {

using Lazies = std::vector<std::pair<std::string, LazyTensor>>;

bool is_torch_file(const fs::path& path) {
  const auto extension = path.extension().string();
  return extension == ".pt" || extension == ".bin" || extension == ".pth" || extension == ".ckpt";
}

// Returns the value with the weights: programs keep them among other things under one of these
// keys.
const Value& weights_within(const Value& root, std::vector<std::string>& left_out) {
  for (const auto* key : {"state_dict", "model_state_dict", "model", "module"}) {
    const auto* found = root.find(key);
    if (found == nullptr || !found->is(Value::Kind::dict)) continue;
    std::vector<std::string> others;
    for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
      const auto name = root.items[i]->as_text().value_or("(a key that is no text)");
      if (name != key) others.push_back(name);
    }
    if (!others.empty())
      left_out.push_back(listed(others, fmt::format("the weights are under '{}'", key)));
    return *found;
  }
  return root;
}

void add_torch_file(const fs::path& path, CheckpointView& view, Lazies& tensors) {
  const PtFile file(path);
  file.verify();
  for (auto& [name, tensor] : tensors_in(file, weights_within(file.root(), view.left_out)))
    tensors.emplace_back(name, lazy(tensor));
}

void add_safetensors(const fs::path& path, Lazies& tensors) {
  const auto reader = std::make_shared<const SafetensorsReader>(path);
  for (const auto& info : reader->tensors())
    tensors.emplace_back(info.name, LazyTensor{info.dtype, info.shape, [reader, name = info.name] {
                                                 return reader->read(name);
                                               }});
}

void add_file(const fs::path& path, CheckpointView& view, Lazies& tensors) {
  if (path.extension() == ".safetensors") {
    add_safetensors(path, tensors);
  } else {
    add_torch_file(path, view, tensors);
  }
}

// Adds the files that an index names. Its metadata may have names of tied tensors.
void add_indexed(const fs::path& index, CheckpointView& view, Lazies& tensors,
                 std::map<std::string, std::string>& ties) {
  const auto read = read_weight_index(index);
  std::map<std::string, std::set<std::string>> by_file;
  for (const auto& [name, file] : read.file_of) by_file[file].insert(name);
  for (const auto& [file, names] : by_file) {
    const auto first = tensors.size();
    add_file(index.parent_path() / file, view, tensors);
    for (const auto& name : names) {
      const bool there =
          std::any_of(tensors.begin() + static_cast<std::ptrdiff_t>(first), tensors.end(),
                      [&](const auto& each) { return each.first == name; });
      if (!there)
        throw CheckpointError(fmt::format("'{}' names '{}', which '{}' does not hold.",
                                          index.string(), excerpt(name), file));
    }
  }
  for (const auto& [name, kept] : read.metadata) {
    if (!read.file_of.contains(name) && read.file_of.contains(kept)) ties[name] = kept;
  }
}

}  // namespace

CheckpointView view_weights(const fs::path& path) {
  CheckpointView view;
  view.form = "weights";
  view.missing.emplace_back(
      "states of an optimizer, steps and hyper-parameters: training begins with new ones");
  Lazies tensors;
  std::map<std::string, std::string> ties;
  if (!fs::is_directory(path)) {
    add_file(path, view, tensors);
  } else {
    std::vector<fs::path> indices;
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(path)) {
      const auto name = entry.path().filename().string();
      if (name.ends_with(".index.json")) indices.push_back(entry.path());
      if (name.ends_with(".safetensors")) files.push_back(entry.path());
    }
    for (const auto& entry : fs::directory_iterator(path)) {
      if (files.empty() && indices.empty() && is_torch_file(entry.path()))
        files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    std::sort(indices.begin(), indices.end());
    if (!indices.empty()) {  // if there are several, the index of safetensors
      add_indexed(indices.back(), view, tensors, ties);
    } else {
      for (const auto& file : files) add_file(file, view, tensors);
    }
    if (files.empty() && indices.empty())
      throw CheckpointError(fmt::format(
          "'{}' is no checkpoint of a known form: it has no manifest.json, no latest and "
          "*model_states.pt (DeepSpeed), no .metadata (PyTorch distributed), and no .safetensors, "
          ".bin or .pt files.",
          path.string()));
  }
  // Names of a model in DistributedDataParallel begin with "module.".
  const std::string wrapper = "module.";
  const bool wrapped = !tensors.empty() && std::ranges::all_of(tensors, [&](const auto& each) {
    return each.first.starts_with(wrapper);
  });
  std::set<std::string> names;
  for (auto& [key, tensor] : tensors) {
    const auto name = wrapped ? key.substr(wrapper.size()) : key;
    if (!names.insert(name).second)
      throw CheckpointError(
          fmt::format("'{}' holds two tensors that are named '{}'.", path.string(), excerpt(name)));
    // Files do not say which floating-point tensors are buffers; the engine finds them.
    if (!at::isFloatingType(tensor.dtype)) {
      view.buffers[name] = std::move(tensor);
      continue;
    }
    auto& parameter = view.parameters.emplace_back();
    parameter.name = name;
    parameter.shape = tensor.shape;
    parameter.states["parameter"] = std::move(tensor);
    for (const auto& [other, kept] : ties) {
      if (kept == name) parameter.other_names.push_back(other);
    }
  }
  return view;
}

}  // namespace zero::foreign
