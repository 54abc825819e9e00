// Reads PyTorch's distributed checkpoints (DCP) as views. They are folders with .metadata, whose
// tensors lie in boxes in .distcp files, or folders of safetensors files that say where their
// pieces belong.
#include <ATen/Functions.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/foreign/readers.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/config/config.h"

namespace zero::foreign {

namespace fs = std::filesystem;
using nlohmann::json;
using Sizes = std::vector<int64_t>;

namespace {

constexpr const char* kSharding = "DCP_SHARDING_INFO";

// A piece of a tensor: a box that begins at `offsets`.
struct Box {
  Sizes offsets;
  Sizes sizes;
  std::function<at::Tensor()> read;
};

// Returns the tensor that the boxes make up; they must have each element once.
LazyTensor from_boxes(const std::string& name, at::ScalarType dtype, Sizes shape,
                      std::vector<Box> boxes) {
  const auto numel_of = [](const Sizes& sizes) {
    return LazyTensor{at::kFloat, sizes, {}}.numel();
  };
  std::erase_if(boxes, [&](const Box& box) { return numel_of(box.sizes) == 0; });
  const auto refuse = [&](const std::string& why) {
    throw CheckpointError(fmt::format("the pieces of '{}' {}", excerpt(name), why));
  };
  int64_t found = 0;
  for (const auto& box : boxes) {
    bool fits = box.offsets.size() == shape.size() && box.sizes.size() == shape.size();
    for (size_t d = 0; d < shape.size() && fits; ++d)
      fits = box.offsets[d] >= 0 && box.sizes[d] >= 0 && box.sizes[d] <= shape[d] &&
             box.offsets[d] <= shape[d] - box.sizes[d];
    if (!fits) refuse(fmt::format("reach beyond its shape [{}]", fmt::join(shape, ",")));
    found += numel_of(box.sizes);
  }
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = i + 1; j < boxes.size(); ++j) {
      bool meet = true;
      for (size_t d = 0; d < shape.size() && meet; ++d)
        meet = boxes[i].offsets[d] < boxes[j].offsets[d] + boxes[j].sizes[d] &&
               boxes[j].offsets[d] < boxes[i].offsets[d] + boxes[i].sizes[d];
      if (meet) refuse("overlap");
    }
  }
  if (found != numel_of(shape))
    refuse(fmt::format("have {} of its {} elements", found, numel_of(shape)));
  return {dtype, shape, [boxes = std::move(boxes), shape, dtype, name] {
            auto whole = at::empty(shape, dtype);
            for (const auto& box : boxes) {
              const auto piece = box.read();
              if (!piece.sizes().equals(box.sizes) || piece.scalar_type() != dtype)
                throw CheckpointError(fmt::format(
                    "A piece of '{}' is a tensor of [{}] where [{}] was announced.", excerpt(name),
                    fmt::join(piece.sizes(), ","), fmt::join(box.sizes, ",")));
              auto place = whole;
              for (size_t d = 0; d < shape.size(); ++d)
                place = place.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
              place.copy_(piece);
            }
            return whole;
          }};
}

using Tensors = std::map<std::string, LazyTensor>;

bool is_safetensors(const fs::path& path) {
  const InputFile file(path, &fail<CheckpointError>);
  char head[10] = {};
  if (file.size() < sizeof head) return false;
  file.read_at(0, head, sizeof head);
  return head[8] == '{';
}

// Returns the pieces in safetensors files. A text in the headers says how the tensors are sharded.
Tensors from_safetensors(const std::vector<fs::path>& files) {
  struct Found {
    at::ScalarType dtype;
    Sizes shape;
    std::vector<Box> boxes;
  };
  std::map<std::string, Found> all;
  for (const auto& path : files) {
    const auto reader = std::make_shared<const SafetensorsReader>(path);
    const auto text = reader->metadata().find(kSharding);
    const auto sharding =
        text == reader->metadata().end() ? json::object() : parse_json(text->second);
    for (const auto& info : reader->tensors()) {
      Sizes offsets(info.shape.size(), 0);
      if (sharding.contains(info.name)) {
        const auto& said = sharding[info.name];
        if (!said.is_object() || !said.contains("saved_offsets") ||
            !said["saved_offsets"].is_array())
          throw CheckpointError(
              fmt::format("'{}' does not say where '{}' belongs", path.string(), info.name));
        offsets = said["saved_offsets"].get<Sizes>();
      }
      if (offsets.size() != info.shape.size())
        throw CheckpointError(fmt::format("'{}' has {} offsets of the piece '{}' of [{}]",
                                          path.string(), offsets.size(), info.name,
                                          fmt::join(info.shape, ",")));
      auto& found = all.try_emplace(info.name, Found{info.dtype, Sizes(info.shape.size(), 0), {}})
                        .first->second;
      if (found.shape.size() != info.shape.size() || found.dtype != info.dtype)
        throw CheckpointError(
            fmt::format("the pieces of '{}' differ in dtype or dimensions", info.name));
      for (size_t d = 0; d < offsets.size(); ++d)
        found.shape[d] = std::max(found.shape[d], offsets[d] + info.shape[d]);
      const bool twice = std::ranges::any_of(found.boxes, [&](const Box& box) {
        return box.offsets == offsets && box.sizes == info.shape;
      });
      if (!twice)
        found.boxes.push_back(
            {offsets, info.shape, [reader, name = info.name] { return reader->read(name); }});
    }
  }
  Tensors tensors;
  for (auto& [name, found] : all)
    tensors[name] = from_boxes(name, found.dtype, found.shape, std::move(found.boxes));
  return tensors;
}

// The pickle .metadata, and the objects that are stored in the files.
class Metadata {
 public:
  explicit Metadata(const fs::path& folder)
      : folder_(folder), pickle_(read_file(folder / ".metadata", &fail<CheckpointError>)) {
    const auto& root = pickle_.root();
    if (!root.is_instance("Metadata")) throw CheckpointError("its .metadata is of another kind");
    const auto* storage = root.member("storage_data", 2);
    const auto* states = root.member("state_dict_metadata", 0);
    if (storage == nullptr || states == nullptr || !storage->is(Value::Kind::dict) ||
        !states->is(Value::Kind::dict))
      throw CheckpointError("its .metadata names no tensors or files");
    for (size_t i = 0; i + 1 < storage->items.size(); i += 2) {
      const auto& index = *storage->items[i];
      const auto* name = index.member("fqn", 0);
      const auto* offset = index.member("offset", 1);
      if (name == nullptr || !name->is(Value::Kind::text))
        throw CheckpointError("a piece in its .metadata has no name");
      const auto sizes = offset == nullptr ? std::nullopt : offset->as_sizes();
      places_[{std::string(name->text), sizes.value_or(Sizes{})}] = storage->items[i + 1];
    }
    for (size_t i = 0; i + 1 < states->items.size(); i += 2) {
      const auto name = states->items[i]->as_text();
      if (!name) throw CheckpointError("a tensor in its .metadata has no name");
      const auto& value = *states->items[i + 1];
      if (value.is_instance("TensorStorageMetadata")) {
        add_tensor(*name, value);
      } else if (value.is_instance("BytesStorageMetadata")) {
        add_object(*name);
      }
    }
  }

  Tensors tensors;
  std::map<std::string, std::string> objects;  // as JSON
  std::vector<std::string> others;             // names of objects that JSON has no form for

 private:
  struct Piece {
    fs::path path;
    uint64_t offset = 0;
    uint64_t length = 0;
  };

  std::optional<Piece> place_of(const std::string& name, const Sizes& offsets) const {
    const auto found = places_.find({name, offsets});
    if (found == places_.end()) return {};
    const auto* file = found->second->member("relative_path", 0);
    const auto* offset = found->second->member("offset", 1);
    const auto* length = found->second->member("length", 2);
    const auto* changed = found->second->member("transform_descriptors", 3);
    if (changed != nullptr && !changed->is(Value::Kind::none) && !changed->items.empty())
      throw CheckpointError(fmt::format("'{}' was compressed or changed when it was saved", name));
    const auto text = file == nullptr ? std::nullopt : file->as_text();
    const auto from = offset == nullptr ? std::nullopt : offset->as_integer();
    const auto bytes = length == nullptr ? std::nullopt : length->as_integer();
    if (!text || !from || !bytes || *from < 0 || *bytes < 0 ||
        text->find('/') != std::string::npos || *text == "..")
      throw CheckpointError(fmt::format("its .metadata has no place for '{}'", excerpt(name)));
    return Piece{folder_ / *text, static_cast<uint64_t>(*from), static_cast<uint64_t>(*bytes)};
  }

  void add_tensor(const std::string& name, const Value& value) {
    const auto* properties = value.member("properties", 0);
    const auto* size = value.member("size", 1);
    const auto* chunks = value.member("chunks", 2);
    const auto shape = size == nullptr ? std::nullopt : size->as_sizes();
    const Value* type = nullptr;
    if (properties != nullptr) {
      // The state of the properties is a tuple that begins with the dtype.
      const auto* state = properties->state;
      type = state != nullptr && state->is_sequence() && !state->items.empty()
                 ? state->items[0]
                 : properties->member("dtype", 0);
    }
    const auto dtype =
        type != nullptr && type->is(Value::Kind::global) ? torch_dtype(type->text) : std::nullopt;
    if (!shape || !dtype || chunks == nullptr || !chunks->is_sequence())
      throw CheckpointError(
          fmt::format("its .metadata has no shape, dtype or pieces of '{}'", excerpt(name)));
    std::vector<Box> boxes;
    std::set<fs::path> used;
    uint64_t left = 0;  // bytes of the files with pieces; no tensor can exceed them
    for (const auto* chunk : chunks->items) {
      const auto* at = chunk->member("offsets", 0);
      const auto* of = chunk->member("sizes", 1);
      auto offsets = at == nullptr ? std::nullopt : at->as_sizes();
      auto sizes = of == nullptr ? std::nullopt : of->as_sizes();
      if (!offsets || !sizes)
        throw CheckpointError(fmt::format("a piece of '{}' has no place", excerpt(name)));
      uint64_t bytes = c10::elementSize(*dtype);
      for (const auto each : *sizes) {
        if (each < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(each), &bytes))
          throw CheckpointError(fmt::format("a piece of '{}' is too large", excerpt(name)));
      }
      if (bytes == 0) continue;
      const auto piece = place_of(name, *offsets);
      if (!piece || piece->length < bytes)
        throw CheckpointError(fmt::format("a piece of '{}' at [{}] has no bytes in a file",
                                          excerpt(name), fmt::join(*offsets, ",")));
      check(*piece);
      if (used.insert(piece->path).second) left += sizes_.at(piece->path);
      if (bytes > left)
        throw CheckpointError(
            fmt::format("the pieces of '{}' have more bytes than their files", excerpt(name)));
      left -= bytes;
      boxes.push_back({*offsets, *sizes, [piece = *piece] {
                         const PtFile file(piece.path, piece.offset, piece.length);
                         file.verify();
                         const auto tensor = file.tensor(file.root());
                         if (!tensor)
                           throw CheckpointError(fmt::format("'{}' holds no tensor at byte {}.",
                                                             piece.path.string(), piece.offset));
                         return tensor->read();
                       }});
    }
    tensors[name] = from_boxes(name, *dtype, *shape, std::move(boxes));
  }

  void add_object(const std::string& name) {
    const auto piece = place_of(name, {});
    if (!piece) throw CheckpointError(fmt::format("'{}' has no bytes in a file", excerpt(name)));
    const PtFile file(piece->path, piece->offset, piece->length);
    if (auto text = file.root().as_json()) {
      objects[name] = std::move(*text);
    } else {
      others.push_back(name);
    }
  }

  // Throws if a piece does not lie within its file.
  void check(const Piece& piece) {
    auto size = sizes_.find(piece.path);
    if (size == sizes_.end())
      size = sizes_.emplace(piece.path, InputFile(piece.path, &fail<CheckpointError>).size()).first;
    if (piece.offset > size->second || piece.length > size->second - piece.offset)
      throw CheckpointError(fmt::format(
          "'{}' is truncated: it has {} bytes, and a piece lies at "
          "[{}, {})",
          piece.path.string(), size->second, piece.offset, piece.offset + piece.length));
  }

  fs::path folder_;
  Pickle pickle_;
  std::map<std::pair<std::string, Sizes>, const Value*> places_;
  std::map<fs::path, uint64_t> sizes_;
};

std::vector<fs::path> files_of(const fs::path& folder, std::string_view extension) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == extension) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Sorts tensors into weights and states by their names: "PREFIX.state.NAME.exp_avg" and
// "PREFIX.param_groups.N.lr" or "PREFIX.param_groups.NAME.lr".
class Sorter {
 public:
  // With `named_by_place`, names may begin with the place that the model has in the program's
  // state.
  Sorter(Tensors tensors, std::map<std::string, std::string> objects, bool named_by_place,
         CheckpointView& view)
      : tensors_(std::move(tensors)),
        objects_(std::move(objects)),
        named_by_place_(named_by_place),
        view_(view) {}

  void sort() {
    take_states();
    take_groups();
    const auto prefix = prefix_of_weights();
    std::vector<std::string> left;
    for (auto& [key, tensor] : tensors_) {
      if (!key.starts_with(prefix)) {
        left.push_back(key);
        continue;
      }
      add(key.substr(prefix.size()), std::move(tensor));
    }
    if (!left.empty())
      view_.left_out.push_back(listed(left, "tensors that are neither weights nor known states"));
    for (const auto& [name, states] : states_) {
      if (!added_.contains(name))
        throw CheckpointError(
            fmt::format("it has states of '{}' and no weights of that name", name));
    }
    for (auto& [key, text] : objects_) view_.attached["dcp." + key] = std::move(text);
    if (states_.empty())
      view_.missing.emplace_back(
          "states of an optimizer, steps and hyper-parameters: training begins with new ones");
  }

 private:
  void take_states() {
    const std::string mark = "state.";
    std::vector<std::string> taken;
    for (auto& [key, tensor] : tensors_) {
      const auto last = key.rfind('.');
      const auto at = key.starts_with(mark) ? 0 : key.find("." + mark);
      if (last == std::string::npos || at == std::string::npos) continue;
      const auto begin = at + (at == 0 && key.starts_with(mark) ? 0 : 1) + mark.size();
      if (begin >= last) continue;
      const auto name = key.substr(begin, last - begin);
      const auto state = key.substr(last + 1);
      if (state == "step") {
        steps_[name] =
            static_cast<int64_t>(tensor.read().reshape({}).to(at::kDouble).item<double>());
      } else if (is_state(state)) {
        states_[name][state] = std::move(tensor);
      } else {
        continue;
      }
      optimizer_prefix_ = key.substr(0, begin - mark.size());
      taken.push_back(key);
    }
    for (const auto& key : taken) tensors_.erase(key);
  }

  // Sets the hyper-parameters of each parameter.
  void take_groups() {
    const auto prefix = optimizer_prefix_ + "param_groups.";
    std::map<std::string, json> by_key;  // by number or by the parameter's name
    std::map<std::string, std::vector<std::string>> members;
    std::vector<std::string> taken;
    for (const auto& [key, text] : objects_) {
      const auto last = key.rfind('.');
      if (!key.starts_with(prefix) || last == std::string::npos || last < prefix.size()) continue;
      const auto group = key.substr(prefix.size(), last - prefix.size());
      const auto field = key.substr(last + 1);
      const auto value = parse_json(text);
      taken.push_back(key);
      if (field != "params") {
        by_key[group][field] = value;
        continue;
      }
      for (const auto& name : value) {
        if (name.is_string()) members[group].push_back(name.get<std::string>());
      }
    }
    for (const auto& key : taken) objects_.erase(key);
    for (const auto& [group, fields] : by_key) {
      if (!members.contains(group)) members[group].push_back(group);
      for (const auto& name : members[group]) hyper_[name] = fields;
    }
  }

  // Returns the prefix that the program has put before the names of the weights. Without it they
  // are the names of the states.
  std::string prefix_of_weights() const {
    for (const auto& [name, states] : states_) {
      if (tensors_.contains(name)) return "";
      for (const auto& [key, tensor] : tensors_) {
        if (key.ends_with("." + name)) return key.substr(0, key.size() - name.size());
      }
    }
    for (const std::string prefix : {"model.", "app.model."}) {
      const bool all = std::ranges::all_of(
          tensors_, [&](const auto& each) { return each.first.starts_with(prefix); });
      if (named_by_place_ && all && !tensors_.empty()) return prefix;
    }
    return "";
  }

  void add(const std::string& name, LazyTensor tensor) {
    const auto states = states_.find(name);
    if (states == states_.end() && !at::isFloatingType(tensor.dtype)) {
      view_.buffers[name] = std::move(tensor);
      return;
    }
    added_.insert(name);
    auto& parameter = view_.parameters.emplace_back();
    parameter.name = name;
    parameter.shape = tensor.shape;
    parameter.states["parameter"] = std::move(tensor);
    if (states == states_.end()) return;
    std::set<std::string> names;
    for (const auto& [state, values] : states->second) {
      names.insert(state);
      parameter.states[state] = values;
    }
    const auto hyper = hyper_.contains(name) ? hyper_.at(name) : json::object();
    const auto optimizer = optimizer_of(hyper, names);
    const auto text = dump(optimizer);
    parameter.optimizer = optim::name(optimizer);
    const auto group = std::ranges::find(view_.groups, text);
    parameter.group = group - view_.groups.begin();
    if (group == view_.groups.end()) view_.groups.push_back(text);
    // SGD counts no steps, and needs to know only that its momentum is no first one. Schedule-free
    // optimizers count them in the group.
    const int64_t uncounted = hyper.contains("k") && hyper.at("k").is_number_integer()
                                  ? hyper.at("k").get<int64_t>()
                                  : int64_t{parameter.states.size() > 1};
    parameter.steps = steps_.contains(name) ? steps_.at(name) : uncounted;
    view_.steps = std::max(view_.steps, parameter.steps);
  }

  Tensors tensors_;
  std::map<std::string, std::string> objects_;
  bool named_by_place_;
  CheckpointView& view_;
  std::map<std::string, std::map<std::string, LazyTensor>> states_;
  std::map<std::string, int64_t> steps_;
  std::map<std::string, json> hyper_;
  std::set<std::string> added_;
  std::string optimizer_prefix_ = "optim.";
};

}  // namespace

bool is_distributed(const fs::path& path) {
  if (!fs::is_directory(path)) return false;
  if (fs::exists(path / ".metadata")) return true;
  for (const auto& file : files_of(path, ".safetensors")) {
    if (SafetensorsReader(file).metadata().contains(kSharding)) return true;
  }
  return false;
}

CheckpointView view_distributed(const fs::path& path) {
  CheckpointView view;
  view.form = "PyTorch, distributed";
  try {
    auto files = files_of(path, ".distcp");
    const bool pickled =
        fs::exists(path / ".metadata") && (files.empty() || !is_safetensors(files.front()));
    if (pickled) {
      Metadata metadata(path);
      if (!metadata.others.empty())
        view.left_out.push_back(listed(metadata.others, "objects of the program that saved"));
      Sorter(std::move(metadata.tensors), std::move(metadata.objects), true, view).sort();
    } else {
      if (files.empty()) files = files_of(path, ".safetensors");
      const bool named_by_place = fs::exists(path / ".metadata");
      Sorter(from_safetensors(files), {}, named_by_place, view).sort();
    }
  } catch (const Error& error) {
    const std::string message = error.what();
    if (message.starts_with("'")) throw CheckpointError(message);
    throw CheckpointError(fmt::format("'{}': {}.", path.string(), message));
  }
  return view;
}

}  // namespace zero::foreign
