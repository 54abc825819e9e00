// Reads DeepSpeed's stage 0 and its universal checkpoints, whose states are whole tensors.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/deepspeed.h"

namespace zero::foreign {

namespace fs = std::filesystem;
using nlohmann::json;
using Sizes = std::vector<int64_t>;

namespace {

// Finds the group of each of `shapes` (or none, if it is frozen), so that the parameters of each
// group come in the group's order. If there is exactly one way, it returns the groups, -1 for none.
// Otherwise it returns the number of ways: 0, or 2 for "two or more".
class GroupOrder {
 public:
  GroupOrder(const std::vector<Sizes>& shapes, const std::vector<std::vector<Sizes>>& groups)
      : shapes_(shapes), groups_(groups), left_(shapes.size()) {
    for (const auto& group : groups) left_ -= std::min(left_, group.size());
  }

  std::optional<std::vector<int>> find() {
    std::vector<size_t> heads(groups_.size(), 0);
    if (ways(0, heads, left_) != 1) return {};
    std::vector<int> found;
    size_t frozen = left_;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      for (int g = -1; g < static_cast<int>(groups_.size()); ++g) {
        if (!take(i, g, heads, frozen)) continue;
        if (ways(i + 1, heads, frozen) == 1) {
          found.push_back(g);
          break;
        }
        give_back(g, heads, frozen);
      }
    }
    return found;
  }
  int count() {
    std::vector<size_t> heads(groups_.size(), 0);
    return ways(0, heads, left_);
  }

 private:
  bool take(size_t i, int g, std::vector<size_t>& heads, size_t& frozen) const {
    if (g < 0) {
      if (frozen == 0) return false;
      --frozen;
      return true;
    }
    const auto& group = groups_[static_cast<size_t>(g)];
    auto& head = heads[static_cast<size_t>(g)];
    if (head == group.size() || group[head] != shapes_[i]) return false;
    ++head;
    return true;
  }
  static void give_back(int g, std::vector<size_t>& heads, size_t& frozen) {
    if (g < 0) {
      ++frozen;
    } else {
      --heads[static_cast<size_t>(g)];
    }
  }
  // Returns the number of ways to place the names from number i on: 0, 1, or 2 for "two or more".
  int ways(size_t i, std::vector<size_t>& heads, size_t frozen) {
    if (i == shapes_.size()) {
      for (size_t g = 0; g < heads.size(); ++g) {
        if (heads[g] != groups_[g].size()) return 0;
      }
      return 1;
    }
    constexpr size_t kMost = 1 << 20;
    constexpr size_t kDeepest = 20'000;  // the function calls itself for each parameter
    if (shapes_.size() > kDeepest) return 2;
    auto key = heads;
    key.push_back(i);
    if (const auto known = known_.find(key); known != known_.end()) return known->second;
    if (known_.size() > kMost) return 2;
    int sum = 0;
    for (int g = -1; g < static_cast<int>(groups_.size()) && sum < 2; ++g) {
      if (!take(i, g, heads, frozen)) continue;
      sum += ways(i + 1, heads, frozen);
      give_back(g, heads, frozen);
    }
    return known_[key] = std::min(sum, 2);
  }

  const std::vector<Sizes>& shapes_;
  const std::vector<std::vector<Sizes>>& groups_;
  size_t left_;
  std::map<std::vector<size_t>, int> known_;
};

const Value* by_number(const Value& dict, int64_t number) {
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    if (dict.items[i]->as_integer() == number) return dict.items[i + 1];
  }
  return nullptr;
}

// The states of a parameter, in the form of torch.optim.
struct WholeStates {
  std::map<std::string, LazyTensor> states;
  std::optional<int64_t> steps;
  Sizes shape;
};

WholeStates whole_states(const PtFile& file, const Value& dict) {
  WholeStates found;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const auto key = dict.items[i]->as_text().value_or("");
    if (key == "step") found.steps = steps_of(file, dict.items[i + 1]);
    if (!is_state(key)) continue;
    const auto tensor = file.tensor(*dict.items[i + 1]);
    if (!tensor) throw CheckpointError(fmt::format("the state '{}' is no tensor", key));
    found.states[key] = lazy(*tensor);
    found.shape = tensor->sizes;
  }
  return found;
}

}  // namespace

void view_unsharded(const DeepspeedModel& model, CheckpointView& view) {
  const auto& file = model.file();
  view.form = "DeepSpeed, stage 0";
  const auto* saved = file.root().find("optimizer");
  const auto* inner = saved;
  const Value* masters = nullptr;
  if (saved != nullptr && saved->find("optimizer_state_dict") != nullptr) {  // bf16 or fp16
    inner = saved->find("optimizer_state_dict");
    masters = saved->find("fp32_groups");
    view.loss_scale = loss_scale_of(*saved);
  }
  const auto* states = inner == nullptr ? nullptr : inner->find("state");
  const auto* list = inner == nullptr ? nullptr : inner->find("param_groups");
  if (states == nullptr || list == nullptr || !list->is_sequence()) {
    view.missing.emplace_back("states of an optimizer: the folder has none");
    return;
  }
  std::vector<std::vector<WholeStates>> groups;
  std::vector<std::vector<Sizes>> shapes;
  for (size_t g = 0; g < list->items.size(); ++g) {
    const auto* members = list->items[g]->find("params");
    const auto numbers = members == nullptr ? std::nullopt : members->as_sizes();
    if (!numbers) throw CheckpointError("a param group has no params");
    auto& group = groups.emplace_back();
    auto& sizes = shapes.emplace_back();
    for (size_t i = 0; i < numbers->size(); ++i) {
      const auto* state = by_number(*states, (*numbers)[i]);
      group.push_back(state == nullptr ? WholeStates{} : whole_states(file, *state));
      auto& each = group.back();
      if (masters != nullptr && g < masters->items.size() && i < masters->items[g]->items.size()) {
        const auto master = file.tensor(*masters->items[g]->items[i]);
        if (!master) throw CheckpointError("fp32_groups holds what is no tensor");
        each.states["parameter"] = lazy(*master);
        each.shape = master->sizes;
      }
      sizes.push_back(each.shape);
    }
  }
  std::vector<const std::pair<std::string, StoredTensor>*> named;
  std::vector<Sizes> of_names;
  std::set<std::pair<uint64_t, int64_t>> places;
  for (const auto& each : model.module()) {
    const auto& [name, tensor] = each;
    if (model.is_buffer(name) || model.is_tied(name) ||
        !places.emplace(tensor.storage, tensor.offset).second)
      continue;
    named.push_back(&each);
    of_names.push_back(tensor.sizes);
  }
  GroupOrder order(of_names, shapes);
  const auto groups_of = order.find();
  if (!groups_of)
    throw CheckpointError(fmt::format(
        "a checkpoint of stage 0 has no names of the optimizer's states, and its shapes fit the "
        "parameters in {}. Save it at stage 1, or import the weights alone (--weights)",
        order.count() == 0 ? "no order" : "more than one order"));
  std::vector<size_t> next(groups.size(), 0);
  for (size_t i = 0; i < named.size(); ++i) {
    const int g = (*groups_of)[i];
    if (g < 0) continue;  // frozen: add_rest adds it
    auto& from = groups[static_cast<size_t>(g)][next[static_cast<size_t>(g)]++];
    auto& to = view.parameters.emplace_back();
    to.name = named[i]->first;
    to.shape = of_names[i];
    to.group = g;
    to.steps = from.steps.value_or(view.steps);
    to.states = std::move(from.states);
    if (!to.states.contains("parameter")) to.states["parameter"] = lazy(named[i]->second);
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    std::set<std::string> names;
    for (const auto& each : view.parameters) {
      if (each.group != static_cast<int64_t>(g)) continue;
      for (const auto& [name, state] : each.states) names.insert(name);
    }
    const auto optimizer = optimizer_of(hyper_parameters(*list->items[g]), names);
    view.add_group(optimizer);
    for (auto& each : view.parameters) {
      if (each.group == static_cast<int64_t>(g)) each.optimizer = optim::name(optimizer);
    }
  }
}

void view_universal(const fs::path& folder, const DeepspeedModel& model, CheckpointView& view) {
  view.form = "DeepSpeed, universal";
  std::map<std::string, std::pair<int64_t, Sizes>> known;  // group and shape by name
  for (size_t g = 0; g < model.groups().size(); ++g) {
    for (const auto& [name, shape] : model.groups()[g])
      known[name] = {static_cast<int64_t>(g), shape};
  }
  std::vector<json> hyper;
  std::optional<int64_t> all_steps;
  if (fs::exists(folder / "optimizer_state.pt")) {
    const PtFile file(folder / "optimizer_state.pt");
    const auto* inner = file.root().find("optimizer_state_dict");
    const auto* list = file.root().find("param_groups");
    if (list == nullptr && inner != nullptr) list = inner->find("param_groups");
    if (list != nullptr) {
      for (const auto* group : list->items) hyper.push_back(hyper_parameters(*group));
    }
    if (const auto* states = inner == nullptr ? nullptr : inner->find("state");
        states != nullptr && states->items.size() > 1)
      all_steps = steps_of(file, states->items[1]->find("step"));
    // Sub-groups of stage 3 name their param group by its place.
    std::map<int64_t, int64_t> group_of;
    for (size_t g = 0; list != nullptr && g < list->items.size(); ++g) {
      const auto* members = list->items[g]->find("params");
      const auto numbers = members == nullptr ? std::nullopt : members->as_sizes();
      if (!numbers || model.groups().size() <= list->items.size()) continue;
      for (const auto sub : *numbers) group_of[sub] = static_cast<int64_t>(g);
    }
    for (auto& [name, each] : known) {
      if (group_of.contains(each.first)) each.first = group_of[each.first];
    }
  }
  if (hyper.empty()) hyper.push_back(json::object());
  std::vector<fs::path> folders;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  std::vector<std::string> unknown;
  std::map<int64_t, std::set<std::string>> states_of_group;
  for (const auto& path : folders) {
    const auto name = path.filename().string();
    CheckpointView::Parameter parameter;
    parameter.name = name;
    const auto place = known.find(name);
    if (place != known.end()) {
      parameter.group = std::min(place->second.first, static_cast<int64_t>(hyper.size()) - 1);
      parameter.shape = place->second.second;
    }
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(path)) {
      const auto state = entry.path().stem().string();
      const PtFile file(entry.path());
      file.verify();
      if (state == "step") {
        parameter.steps = steps_of(file, &file.root()).value_or(0);
        continue;
      }
      if (state != "fp32" && !is_state(state)) {
        unknown.push_back(name + "/" + state);
        continue;
      }
      const auto* value = file.root().find("param");
      const bool bare = value == nullptr;
      auto tensor = file.tensor(bare ? file.root() : *value);
      if (!tensor)
        throw CheckpointError(fmt::format("'{}' holds no tensor", entry.path().string()));
      if (place == known.end()) {
        parameter.shape = tensor->sizes;
      } else if (tensor->sizes != parameter.shape) {
        if (!tensor->is_contiguous() ||
            tensor->numel() != LazyTensor{at::kFloat, parameter.shape, {}}.numel())
          throw CheckpointError(fmt::format("'{}' holds a tensor of another shape than [{}]",
                                            entry.path().string(),
                                            fmt::join(parameter.shape, ",")));
        tensor->sizes = parameter.shape;  // the file's tensor is flat at stage 3
        tensor->strides = row_major(parameter.shape);
      }
      if (state != "fp32") names.insert(state);
      parameter.states[state == "fp32" ? "parameter" : state] = lazy(*tensor);
    }
    // Buffers, frozen and tied parameters have only their weights here, and the model file has the
    // same weights.
    if (names.empty() && place == known.end()) continue;
    if (!parameter.states.contains("parameter"))
      throw CheckpointError(fmt::format("'{}' has no fp32.pt", path.string()));
    if (parameter.steps == 0) parameter.steps = all_steps.value_or(view.steps);
    states_of_group[parameter.group].insert(names.begin(), names.end());
    view.parameters.push_back(std::move(parameter));
  }
  if (!unknown.empty())
    view.left_out.push_back(listed(unknown, "states that no optimizer of libzero has"));
  std::vector<std::string> kinds;
  for (size_t g = 0; g < hyper.size(); ++g) {
    const auto optimizer = optimizer_of(hyper[g], states_of_group[static_cast<int64_t>(g)]);
    view.add_group(optimizer);
    kinds.emplace_back(optim::name(optimizer));
  }
  for (auto& each : view.parameters) each.optimizer = kinds[static_cast<size_t>(each.group)];
}

}  // namespace zero::foreign
