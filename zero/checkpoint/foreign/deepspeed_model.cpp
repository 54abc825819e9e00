// Reads the model file of DeepSpeed's rank 0, which has the names and shapes of the tensors in
// other files.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/deepspeed.h"

namespace zero::foreign {

namespace {

std::vector<std::string> keys_of(const Value& dict) {
  std::vector<std::string> keys;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2)
    keys.push_back(dict.items[i]->as_text().value_or(""));
  return keys;
}

}  // namespace

DeepspeedModel::DeepspeedModel(const PtFile& file) : file_(&file) {
  const auto& root = file.root();
  if (const auto* module = root.find("module"); module != nullptr) {
    for (size_t i = 0; i + 1 < module->items.size(); i += 2) {
      const auto name = module->items[i]->as_text();
      if (auto tensor = file.tensor(*module->items[i + 1]); name && tensor)
        module_.emplace_back(*name, std::move(*tensor));
    }
  }
  if (const auto* names = root.find("buffer_names"); names != nullptr) {
    for (const auto* name : names->items) buffers_.insert(name->as_text().value_or(""));
  }
  if (const auto* shared = root.find("shared_params"); shared != nullptr) {
    for (size_t i = 0; i + 1 < shared->items.size(); i += 2) {
      const auto alias = shared->items[i]->as_text();
      const auto kept = shared->items[i + 1]->as_text();
      if (alias && kept) ties_[*alias] = *kept;
    }
  }
  read_shapes(root);
}

void DeepspeedModel::read_shapes(const Value& root) {
  const auto* shapes = root.find("param_shapes");
  if (shapes == nullptr || !shapes->is_sequence()) return;
  for (const auto* group : shapes->items) {
    auto& list = groups_.emplace_back();
    for (size_t i = 0; i + 1 < group->items.size(); i += 2) {
      const auto name = group->items[i]->as_text();
      auto shape = group->items[i + 1]->as_sizes();
      if (!name || !shape || std::ranges::any_of(*shape, [](int64_t size) { return size < 0; }))
        throw CheckpointError("param_shapes is not a list of names and shapes");
      list.emplace_back(*name, std::move(*shape));
    }
  }
}

void DeepspeedModel::describe(CheckpointView& view) const {
  const auto& root = file_->root();
  const auto number = [&](const char* key) {
    const auto* value = root.find(key);
    return value == nullptr ? 0 : value->as_integer().value_or(0);
  };
  view.steps = std::max<int64_t>(number("global_steps") - number("skipped_steps"), 0);
  for (const auto& [name, tensor] : module_) {
    if (buffers_.contains(name)) view.buffers[name] = lazy(tensor);
  }
  // DeepSpeed puts the user's client_state beside its own keys.
  static const std::set<std::string> kKnown{"module",
                                            "buffer_names",
                                            "optimizer",
                                            "param_shapes",
                                            "frozen_param_shapes",
                                            "frozen_param_fragments",
                                            "shared_params",
                                            "data_sampler",
                                            "random_ltd",
                                            "skipped_steps",
                                            "global_steps",
                                            "global_samples",
                                            "dp_world_size",
                                            "mp_world_size",
                                            "checkpoint_parallel_dimensions",
                                            "ds_config",
                                            "ds_version",
                                            "universal_checkpoint_info",
                                            "sparse_tensor_module_names"};
  std::vector<std::string> left;
  for (const auto& key : keys_of(root)) {
    const auto* value = root.find(key);
    if (kKnown.contains(key) || value == nullptr || value->is(Value::Kind::none)) continue;
    if (auto text = value->as_json()) {
      view.attached["deepspeed." + key] = std::move(*text);
    } else {
      left.push_back(key);
    }
  }
  if (!left.empty())
    view.left_out.push_back(listed(left, "objects or tensors of the program that saved"));
}

void DeepspeedModel::add_rest(CheckpointView& view, const std::vector<PtFile>& models,
                              bool sharded) const {
  std::map<std::string, CheckpointView::Parameter*> known;
  std::map<std::pair<uint64_t, int64_t>, std::string> places;
  for (auto& each : view.parameters) known[each.name] = &each;
  const auto add = [&](const std::string& name, LazyTensor values) {
    CheckpointView::Parameter frozen;
    frozen.name = name;
    frozen.shape = values.shape;
    frozen.states["parameter"] = std::move(values);
    view.parameters.push_back(std::move(frozen));
  };
  std::set<std::string> done;
  for (const auto& each : view.parameters) done.insert(each.name);
  if (const auto* shapes = file_->root().find("frozen_param_shapes");
      sharded && shapes != nullptr && shapes->is(Value::Kind::dict)) {
    for (size_t i = 0; i + 1 < shapes->items.size(); i += 2) {
      const auto name = shapes->items[i]->as_text().value_or("");
      auto shape = shapes->items[i + 1]->as_sizes().value_or(std::vector<int64_t>{});
      int64_t left = LazyTensor{at::kFloat, shape, {}}.numel();
      std::vector<Part> parts;
      for (const auto& model : models) {
        const auto* pieces = model.root().find("frozen_param_fragments");
        const auto* piece = pieces == nullptr ? nullptr : pieces->find(name);
        const auto tensor = piece == nullptr ? std::nullopt : model.tensor(*piece);
        if (!tensor) throw CheckpointError(fmt::format("the frozen '{}' lacks a part", name));
        const auto count = std::min(left, tensor->numel());
        parts.push_back({*tensor, 0, count});
        left -= count;
      }
      add(name, join(std::move(parts), std::move(shape)));
      done.insert(name);
    }
  }
  for (const auto& [name, tensor] : module_) {
    if (done.contains(name)) places.emplace(std::pair(tensor.storage, tensor.offset), name);
  }
  for (const auto& [name, tensor] : module_) {
    if (buffers_.contains(name) || sharded || done.contains(name) || ties_.contains(name)) continue;
    if (places.emplace(std::pair(tensor.storage, tensor.offset), name).second)
      add(name, lazy(tensor));
  }
  known.clear();
  for (auto& each : view.parameters) known[each.name] = &each;
  for (const auto& [alias, kept] : ties_) {
    if (known.contains(kept)) known[kept]->other_names.push_back(alias);
  }
  if (sharded) return;
  for (const auto& [name, tensor] : module_) {
    const auto at = places.find({tensor.storage, tensor.offset});
    if (buffers_.contains(name) || known.contains(name) || ties_.contains(name) ||
        at == places.end())
      continue;
    known.at(at->second)->other_names.push_back(name);
  }
}

}  // namespace zero::foreign
