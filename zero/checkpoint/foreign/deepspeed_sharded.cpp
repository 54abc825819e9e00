// Reads stages 1 to 3 of DeepSpeed: flat arrays, of which each rank has saved its part.
#include <ATen/ceil_div.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/foreign/deepspeed.h"

namespace zero::foreign {

using nlohmann::json;

namespace {

// A group of parameters that lie one behind the other: a param group at stages 1 and 2, a sub-group
// at stage 3.
struct FlatGroup {
  const DeepspeedModel::Shapes& shapes;
  int64_t param_group = 0;
  json hyper;
  std::map<std::string, std::vector<StoredTensor>> flats;  // by state, then by rank
  std::optional<int64_t> steps;
};

class Sharded {
 public:
  Sharded(const std::vector<std::filesystem::path>& files, const std::vector<PtFile>& models,
          CheckpointView& view)
      : models_(models), view_(view), model_(models.front()) {
    for (const auto& path : files) {
      files_.emplace_back(path);
      files_.back().verify();
      const auto* states = files_.back().root().find("optimizer_state_dict");
      if (states == nullptr)
        throw CheckpointError(fmt::format("'{}' has no optimizer_state_dict", path.string()));
      states_.push_back(states);
    }
    ranks_ = static_cast<int64_t>(files_.size());
    const auto* stage = states_[0]->find("zero_stage");
    if (stage != nullptr && stage->is(Value::Kind::object)) stage = stage->argument(0);
    // The files of BF16_Optimizer do not name the stage.
    stage_ = stage == nullptr ? 1 : stage->as_integer().value_or(1);
    if (const auto* count = states_[0]->find("partition_count"); count != nullptr) {
      const auto* one = count->is_sequence() && !count->items.empty() ? count->items[0] : count;
      if (one->as_integer().value_or(ranks_) != ranks_)
        throw CheckpointError(fmt::format("it was saved by {} ranks, and the files of {} are there",
                                          *one->as_integer(), ranks_));
    }
  }

  void read() {
    view_.stage = stage_;
    view_.form = fmt::format("DeepSpeed, stage {} of {} ranks", stage_, ranks_);
    read_loss_scale();
    const auto& groups = model_.groups();
    if (groups.empty())
      throw CheckpointError("its model file has no param_shapes: DeepSpeed before 0.6 wrote it");
    for (size_t g = 0; g < groups.size(); ++g) read_group(g);
    model_.add_rest(view_, models_, stage_ == 3);
  }

 private:
  void read_loss_scale() {
    const auto* scaler = states_[0]->find("loss_scaler");
    if (scaler == nullptr || !scaler->is(Value::Kind::object)) return;
    view_.loss_scale = loss_scale_of(*scaler);
  }

  const Value& base(size_t rank) const {
    const auto* base =
        states_[rank]->find(stage_ == 3 ? "optimizer_state_dict" : "base_optimizer_state");
    if (base == nullptr) throw CheckpointError("an optimizer file has no states");
    return *base;
  }

  const Value* state_of(size_t rank, size_t g) const {
    const auto& all = base(rank);
    if (all.is_sequence()) return g < all.items.size() ? all.items[g] : nullptr;  // elastic
    const auto* states = all.find("state");
    if (states == nullptr) return nullptr;
    for (size_t i = 0; i + 1 < states->items.size(); i += 2) {
      if (states->items[i]->as_integer() == static_cast<int64_t>(g)) return states->items[i + 1];
    }
    return nullptr;
  }

  // Returns the number of the param group to which a group belongs, and its hyper-parameters.
  std::pair<int64_t, json> param_group(size_t g) const {
    const auto* list = base(0).find("param_groups");
    if (list == nullptr || !list->is_sequence()) return {static_cast<int64_t>(g), json::object()};
    for (size_t i = 0; i < list->items.size(); ++i) {
      const auto* members = list->items[i]->find("params");
      const auto numbers = members == nullptr ? std::nullopt : members->as_sizes();
      const bool in =
          stage_ == 3
              ? numbers && std::ranges::find(*numbers, static_cast<int64_t>(g)) != numbers->end()
              : i == g;
      if (in) return {static_cast<int64_t>(i), hyper_parameters(*list->items[i])};
    }
    throw CheckpointError(fmt::format("no parameter group has the flat array {}", g));
  }

  void read_group(size_t g) {
    FlatGroup group{model_.groups()[g], 0, {}, {}, {}};
    std::tie(group.param_group, group.hyper) = param_group(g);
    std::set<std::string> others;
    for (size_t rank = 0; rank < files_.size(); ++rank) {
      const auto* masters =
          states_[rank]->find(stage_ == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups");
      if (masters == nullptr || !masters->is_sequence() || g >= masters->items.size())
        throw CheckpointError(fmt::format("rank {} has no master weights of group {}", rank, g));
      add(group, "parameter", rank, *masters->items[g]);
      const auto* state = state_of(rank, g);
      for (size_t i = 0; state != nullptr && i + 1 < state->items.size(); i += 2) {
        const auto key = state->items[i]->as_text().value_or("");
        if (key == "step") {
          if (rank == 0) group.steps = steps_of(files_[rank], state->items[i + 1]);
        } else if (is_state(key)) {
          add(group, key, rank, *state->items[i + 1]);
        } else {
          others.insert(key);
        }
      }
    }
    if (!others.empty())
      view_.left_out.push_back(
          listed({others.begin(), others.end()}, "states that no optimizer of libzero has"));
    place(group);
  }

  void add(FlatGroup& group, const std::string& state, size_t rank, const Value& value) {
    auto tensor = files_[rank].tensor(value);
    if (!tensor || !tensor->is_contiguous())
      throw CheckpointError(
          fmt::format("the state '{}' of rank {} is no flat tensor", state, rank));
    auto& list = group.flats[state];
    if (list.size() != rank)
      throw CheckpointError(
          fmt::format("rank {} has a state '{}', and another rank lacks it", rank, state));
    list.push_back(std::move(*tensor));
  }

  // Adds the group's parameters to the view.
  void place(const FlatGroup& group) {
    std::set<std::string> names;
    for (const auto& [state, flats] : group.flats) {
      if (static_cast<int64_t>(flats.size()) != ranks_)
        throw CheckpointError(fmt::format("not every rank has the state '{}'", state));
      if (state != "parameter") names.insert(state);
    }
    const auto optimizer = optimizer_of(group.hyper, names);
    while (view_.groups.size() <= static_cast<size_t>(group.param_group))
      view_.add_group(optimizer);
    const bool muon = stage_ < 3 && names.contains("momentum_buffer") &&
                      group.hyper.value("use_muon", json(false)) == json(true);
    const auto size = partition_size(group);
    int64_t offset = 0;
    for (size_t i = 0; i < group.shapes.size(); ++i) {
      const auto& [name, shape] = group.shapes[i];
      auto& parameter = view_.parameters.emplace_back();
      parameter.name = name;
      parameter.shape = shape;
      parameter.optimizer = optim::name(optimizer);
      parameter.group = group.param_group;
      parameter.steps = group.steps.value_or(names.empty() ? 0 : view_.steps);
      const int64_t numel = LazyTensor{at::kFloat, shape, {}}.numel();
      for (const auto& [state, flats] : group.flats) {
        try {
          parameter.states[state] = stage_ == 3 ? by_parameter(flats, offset, shape, numel)
                                    : muon && state == "momentum_buffer"
                                        ? whole_of_touched(flats, group, i, size, shape)
                                        : by_group(flats, offset, size, shape, numel);
        } catch (const CheckpointError& error) {
          throw CheckpointError(
              fmt::format("the state '{}' of '{}': {}", state, name, error.what()));
        }
      }
      offset += stage_ == 3 ? at::ceil_div(numel, ranks_) : numel + padding(group.param_group, i);
    }
  }

  // Returns the number of zeros behind a parameter in its group (`parameter_alignment`).
  int64_t padding(int64_t g, size_t parameter) const {
    const auto* all = states_[0]->find("param_alignment_paddings");
    if (all == nullptr || !all->is_sequence() || g >= static_cast<int64_t>(all->items.size()))
      return 0;
    const auto list = all->items[static_cast<size_t>(g)]->as_sizes();
    return list && parameter < list->size() ? std::max<int64_t>((*list)[parameter], 0) : 0;
  }

  // Returns the elements of a rank's part. The parts of the last ranks may lack the padding at the
  // end.
  static int64_t partition_size(const FlatGroup& group) {
    int64_t size = 0;
    for (const auto& flat : group.flats.at("parameter")) size = std::max(size, flat.numel());
    return size;
  }

  // At stages 1 and 2 the parameters of a group lie one behind the other, cut into equal parts.
  static LazyTensor by_group(const std::vector<StoredTensor>& flats, int64_t offset, int64_t size,
                             std::vector<int64_t> shape, int64_t numel) {
    std::vector<Part> parts;
    // Moments have the padding that masters may lack, even if each rank has some of it.
    for (const auto& flat : flats) size = std::max(size, flat.numel());
    for (size_t rank = 0; rank < flats.size(); ++rank) {
      const auto first = static_cast<int64_t>(rank) * size;
      const auto begin = std::max(offset, first);
      const auto end = std::min(offset + numel, first + size);
      if (begin < end) parts.push_back({flats[rank], begin - first, end - begin});
    }
    if (parts.empty() && numel == 0) parts.push_back({flats[0], 0, 0});
    return join(std::move(parts), std::move(shape));
  }

  // At stage 3 each parameter by itself is cut into equal parts.
  LazyTensor by_parameter(const std::vector<StoredTensor>& flats, int64_t offset,
                          std::vector<int64_t> shape, int64_t numel) const {
    const auto share = at::ceil_div(numel, ranks_);
    std::vector<Part> parts;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      const auto count = std::clamp<int64_t>(numel - rank * share, 0, share);
      parts.push_back({flats[static_cast<size_t>(rank)], offset, count});
    }
    return join(std::move(parts), std::move(shape));
  }

  // With Muon at stages 1 and 2, a rank has the whole momentum of every parameter that its part
  // touches. Returns the momentum of the first such rank.
  LazyTensor whole_of_touched(const std::vector<StoredTensor>& flats, const FlatGroup& group,
                              size_t wanted, int64_t size, std::vector<int64_t> shape) const {
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      int64_t offset = 0;
      int64_t in_buffer = 0;
      for (size_t i = 0; i <= wanted; ++i) {
        const int64_t numel = LazyTensor{at::kFloat, group.shapes[i].second, {}}.numel();
        const bool touched = offset < (rank + 1) * size && offset + numel > rank * size;
        if (i == wanted && touched)
          return join({{flats[static_cast<size_t>(rank)], in_buffer, numel}}, std::move(shape));
        if (touched) in_buffer += numel;
        offset += numel + padding(group.param_group, i);
      }
    }
    throw CheckpointError("no rank has it");
  }

  const std::vector<PtFile>& models_;
  CheckpointView& view_;
  DeepspeedModel model_;
  std::vector<PtFile> files_;  // by rank, in the order of `states_`
  std::vector<const Value*> states_;
  int64_t ranks_ = 0;
  int64_t stage_ = 0;
};

}  // namespace

void view_sharded(const std::vector<std::filesystem::path>& files,
                  const std::vector<PtFile>& models, CheckpointView& view) {
  Sharded(files, models, view).read();
}

}  // namespace zero::foreign
