#include "zero/checkpoint/foreign/export.h"

#include <ATen/Functions.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "zero/base/error.h"
#include "zero/base/json.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/foreign/pickle.h"
#include "zero/checkpoint/foreign/pt_file.h"
#include "zero/checkpoint/foreign/pt_writer.h"
#include "zero/checkpoint/foreign/readers.h"
#include "zero/checkpoint/in_force.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/whole_folder.h"

namespace zero::foreign {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

using Parameter = CheckpointView::Parameter;

std::unique_ptr<WholeFolder> new_folder(const fs::path& to) {
  if (fs::exists(to) && !(fs::is_directory(to) && fs::is_empty(to)))
    throw CheckpointError(
        fmt::format("'{}' is there. Name a folder that does not exist.", to.string()));
  return std::make_unique<WholeFolder>(to, &fail<CheckpointError>);
}

bool is_moment(const std::string& state) {
  return state != "parameter" && state != "master" && state != kInForce;
}

std::string value_of(const ordered_json& json) {
  if (json.is_boolean()) return pickled::boolean(json.get<bool>());
  if (json.is_number_integer()) return pickled::integer(json.get<int64_t>());
  if (json.is_number()) return pickled::real(json.get<double>());
  if (json.is_string()) return pickled::text(json.get<std::string>());
  if (!json.is_array()) return pickled::none();
  std::vector<std::string> items;
  for (const auto& item : json) items.push_back(value_of(item));
  return pickled::tuple(items);
}

// Returns the hyper-parameters of a group as torch.optim names them.
ordered_json torch_group(const std::string& group) {
  const auto own = ordered_json::parse(group);
  const auto type = own.value("type", std::string());
  auto made = own.value("params", ordered_json::object());
  made.erase("adam_w_mode");
  made.erase("torch_adam");
  if (type == "AdamW" || type == "Adam") {
    made["amsgrad"] = false;
    made["decoupled_weight_decay"] = type == "AdamW";
  }
  if (type == "Muon") made["use_muon"] = true;
  for (const auto* key : {"maximize", "capturable", "differentiable"}) made[key] = false;
  for (const auto* key : {"foreach", "fused"}) made[key] = nullptr;
  return made;
}

std::string pickled_group(const ordered_json& group, const std::string& parameters) {
  std::vector<std::pair<std::string, std::string>> items;
  for (const auto& [key, value] : group.items())
    items.emplace_back(pickled::text(key), value_of(value));
  items.emplace_back(pickled::text("params"), parameters);
  return pickled::dict(items);
}

}  // namespace

std::vector<std::string> export_huggingface(const CheckpointView& view, const fs::path& to,
                                            int64_t shard_bytes) {
  const auto folder = new_folder(to);
  std::vector<std::pair<std::string, LazyTensor>> tensors;
  ordered_json metadata;
  for (const auto& each : view.parameters) {
    tensors.emplace_back(each.name, view.for_use(each, false));
    for (const auto& other : each.other_names) metadata[other] = each.name;
  }
  for (const auto& [name, buffer] : view.buffers) tensors.emplace_back(name, buffer);
  const auto bytes_of = [](const LazyTensor& tensor) {
    return tensor.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  };
  std::vector<std::vector<size_t>> shards(1);
  int64_t total = 0;
  int64_t in_shard = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto bytes = bytes_of(tensors[i].second);
    if (in_shard > 0 && in_shard + bytes > shard_bytes) {
      shards.emplace_back();
      in_shard = 0;
    }
    shards.back().push_back(i);
    in_shard += bytes;
    total += bytes;
  }
  ordered_json map;
  for (size_t s = 0; s < shards.size(); ++s) {
    const auto name = shards.size() == 1
                          ? std::string("model.safetensors")
                          : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
    std::vector<TensorInfo> infos;
    for (const auto i : shards[s])
      infos.push_back({tensors[i].first, tensors[i].second.dtype, tensors[i].second.shape});
    SafetensorsWriter file(folder->path() / name, infos, {{"format", "pt"}});
    for (const auto i : shards[s]) {
      file.write(tensors[i].first, tensors[i].second.read());
      map[tensors[i].first] = name;
    }
    file.commit();
  }
  metadata["total_size"] = total;
  if (shards.size() > 1 || metadata.size() > 1) {
    const ordered_json index{{"metadata", metadata}, {"weight_map", map}};
    write_file(folder->path() / "model.safetensors.index.json", index.dump(2) + "\n",
               fail<CheckpointError>);
  }
  folder->commit();
  return {"optimizer states, steps and hyper-parameters: the form has weights alone"};
}

// Note [What DeepSpeed reads of a universal folder]
// For each parameter DeepSpeed reads `fp32.pt`, the states and `step.pt`. It also reads
// `optimizer_state.pt` with the groups, and the model file, which its stages look for under two
// names. At stage 3 it gives all groups the hyper-parameters of the first group in
// `optimizer_state_dict`. So that group has only those that all groups share, and the rate, which
// must be there. DeepSpeed takes neither buffers nor frozen parameters from such a folder.
std::vector<std::string> export_deepspeed(const CheckpointView& view, const fs::path& to) {
  using namespace pickled;
  const auto folder = new_folder(to);
  const std::string tag = fmt::format("global_step{}_universal", view.steps);
  const auto step = folder->path() / tag;
  std::vector<std::string> frozen;
  for (const auto& each : view.parameters) {
    if (each.optimizer.empty()) {
      frozen.push_back(each.name);
      continue;
    }
    if (each.name.find('/') != std::string::npos || each.name == "." || each.name == "..")
      throw CheckpointError(fmt::format("The parameter '{}' has a name that no folder can have.",
                                        excerpt(each.name)));
    const auto place = step / "zero" / each.name;
    fs::create_directories(place);
    const auto write = [&](const std::string& state, const LazyTensor& tensor) {
      PtWriter file;
      const auto values = file.tensor(tensor.read().to(at::kFloat));
      file.write(place / (state + ".pt"),
                 dict({{text("param"), values}, {text("cat_dim"), integer(0)}}));
    };
    write("fp32", each.weights());
    for (const auto& [state, tensor] : each.states) {
      if (is_moment(state)) write(state, tensor);
    }
    PtWriter file;
    file.write(place / "step.pt",
               file.tensor(at::full({}, static_cast<double>(each.steps), at::kFloat)));
  }
  if (frozen.size() == view.parameters.size())
    throw CheckpointError(
        "It has no states of an optimizer: a universal checkpoint of DeepSpeed would be empty. "
        "Export the weights with --to hf.");
  std::vector<std::string> groups;
  ordered_json common;
  for (size_t g = 0; g < view.groups.size(); ++g) {
    const auto group = torch_group(view.groups[g]);
    groups.push_back(pickled_group(group, list({integer(static_cast<int64_t>(g))})));
    if (g == 0) common = group;
    for (const auto& key : std::vector<std::string>(
             {"weight_decay", "betas", "eps", "momentum", "dampening", "nesterov"})) {
      if (common.contains(key) && (!group.contains(key) || common[key] != group[key]))
        common.erase(key);
    }
  }
  PtWriter states;
  const auto steps = states.tensor(at::full({}, static_cast<double>(view.steps), at::kFloat));
  states.write(step / "zero/optimizer_state.pt",
               dict({{text("ds_version"), text("0.19.8")},
                     {text("param_groups"), list(groups)},
                     {text("optimizer_state_dict"),
                      dict({{text("state"), dict({{integer(0), dict({{text("step"), steps}})}})},
                            {text("param_groups"), list({pickled_group(common, "]")})}})}}));
  std::vector<std::pair<std::string, std::string>> model{
      {text("module"), "}"},
      {text("dp_world_size"), integer(1)},
      {text("mp_world_size"), integer(1)},
      {text("global_steps"), integer(view.steps)},
      {text("skipped_steps"), integer(0)},
      {text("global_samples"), integer(0)},
      {text("lr_scheduler"), dict({{text("last_batch_iteration"), integer(view.steps - 1)}})}};
  for (const auto* name : {"mp_rank_00", "zero_pp_rank_0_mp_rank_00"})
    PtWriter().write(step / (std::string(name) + "_model_states.pt"), dict(model));
  write_file(folder->path() / "latest_universal", tag, fail<CheckpointError>);
  folder->commit();
  std::vector<std::string> left;
  const std::string why =
      "DeepSpeed does not load them from such a folder; export them with --to hf too";
  if (!frozen.empty()) left.push_back(listed(frozen, "frozen; " + why));
  std::vector<std::string> buffers;
  for (const auto& [name, buffer] : view.buffers) buffers.push_back(name);
  if (!buffers.empty()) left.push_back(listed(buffers, "buffers; " + why));
  if (view.groups.size() > 1)
    left.emplace_back(
        "hyper-parameters that differ between groups: DeepSpeed's stage 3 keeps its own "
        "configuration's");
  return left;
}

namespace {

constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";

// Writes pieces one behind the other, and a pickle that says where each of them lies.
class DistributedWriter {
 public:
  explicit DistributedWriter(const fs::path& folder)
      : folder_(folder), file_(folder / kFile, &fail<CheckpointError>) {}

  void tensor(const std::string& name, const LazyTensor& tensor) {
    using namespace pickled;
    const Sizes origin(tensor.shape.size(), 0);
    const auto properties = call(global(kMetadataModule, "TensorProperties"),
                                 {global("torch", torch_name(tensor.dtype))});
    const auto chunk =
        call(global(kMetadataModule, "ChunkStorageMetadata"), {sizes(origin), sizes(tensor.shape)});
    states_.emplace_back(text(name), call(global(kMetadataModule, "TensorStorageMetadata"),
                                          {properties, sizes(tensor.shape), list({chunk})}));
    PtWriter piece;
    const auto root = piece.tensor(tensor.read());
    place({text(name), sizes(origin)}, piece, root);
  }
  void object(const std::string& name, const std::string& value) {
    using namespace pickled;
    states_.emplace_back(text(name), call(global(kMetadataModule, "BytesStorageMetadata"), {}));
    place({text(name)}, PtWriter(), value);
  }
  void commit() {
    using namespace pickled;
    file_.commit();
    write_file(
        folder_ / ".metadata",
        whole(call(global(kMetadataModule, "Metadata"), {dict(states_), none(), dict(places_)})),
        fail<CheckpointError>);
  }

 private:
  using Sizes = std::vector<int64_t>;
  static constexpr const char* kFile = "__0_0.distcp";

  void place(const std::vector<std::string>& index, const PtWriter& piece,
             const std::string& root) {
    using namespace pickled;
    const auto begin = static_cast<int64_t>(file_.size());
    const auto bytes = static_cast<int64_t>(piece.append(file_, root));
    places_.emplace_back(call(global(kMetadataModule, "MetadataIndex"), index),
                         call(global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
                              {text(kFile), integer(begin), integer(bytes)}));
  }

  fs::path folder_;
  OutputFile file_;
  std::vector<std::pair<std::string, std::string>> states_;
  std::vector<std::pair<std::string, std::string>> places_;
};

}  // namespace

std::vector<std::string> export_distributed(const CheckpointView& view, const fs::path& to) {
  const auto folder = new_folder(to);
  DistributedWriter writer(folder->path());
  std::vector<std::vector<std::string>> members(view.groups.size());
  for (const auto& each : view.parameters) {
    writer.tensor("model." + each.name, each.weights());
    for (const auto& other : each.other_names) writer.tensor("model." + other, each.weights());
    if (each.optimizer.empty()) continue;
    const auto prefix = "optim.state." + each.name + ".";
    for (const auto& [state, tensor] : each.states) {
      if (is_moment(state)) writer.tensor(prefix + state, tensor);
    }
    const auto steps = static_cast<double>(each.steps);
    writer.tensor(prefix + "step",
                  {at::kFloat, {}, [steps] { return at::full({}, steps, at::kFloat); }});
    members.at(static_cast<size_t>(each.group)).push_back(each.name);
  }
  for (const auto& [name, buffer] : view.buffers) writer.tensor("model." + name, buffer);
  for (size_t g = 0; g < view.groups.size(); ++g) {
    const auto prefix = fmt::format("optim.param_groups.{}.", g);
    const auto group = torch_group(view.groups[g]);
    for (const auto& [key, value] : group.items()) writer.object(prefix + key, value_of(value));
    std::vector<std::string> names;
    for (const auto& name : members[g]) names.push_back(pickled::text(name));
    writer.object(prefix + "params", pickled::list(names));
  }
  writer.commit();
  folder->commit();
  return {};
}

}  // namespace zero::foreign
