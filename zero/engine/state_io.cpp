// Saving and loading the engine's states, sharded or in full.
//
// A sharded save is one file a rank, of the elements that the rank owns, by unit; at stage 0 rank
// 0's file has everything, and with replicas those of the first block. They are in a WholeFolder:
// an earlier save is replaced only once every rank's file is complete and on the disk.
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/comm/agreement.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSharded = "libzero sharded states 1";
constexpr const char* kFull = "libzero full states 1";

std::string shard_name(int rank, int ranks) {
  return fmt::format("rank-{}-of-{}.safetensors", rank, ranks);
}

bool is_shard(const std::string& name) {
  return name.starts_with("rank-") && name.find("-of-") != std::string::npos &&
         name.ends_with(".safetensors");
}

// A save takes the place of the whole folder, so that must be an earlier save's: whatever it was
// that the path was meant to be. Files beside the shards may be the program's notes on that save.
void check_replaceable(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error) || fs::is_empty(folder, error)) return;
  std::string other;
  std::string inner;  // a folder
  bool saved = false;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    std::error_code ignored;  // a link to nowhere is no folder
    saved = saved || is_shard(name);
    if (fs::is_directory(entry.symlink_status(ignored))) {
      inner = name;
    } else if (!is_shard(name)) {
      other = name;
    }
  }
  if (error || (saved && inner.empty())) return;  // an error is said by who writes there
  throw CheckpointError(
      fmt::format("'{}' holds '{}', which no save writes, and a save takes the place of the whole "
                  "folder. Give another folder, or move that away.",
                  folder.string(), inner.empty() ? other : inner));
}

std::string state_key(std::string_view state, std::string_view parameter) {
  return fmt::format("optimizer.{}.{}", state, parameter);
}

const std::string& metadata(const SafetensorsReader& file, const std::string& path,
                            const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end())
    throw CheckpointError(fmt::format(
        "'{}' has no '{}' in its header: it was not written by Engine::save or Engine::save_full.",
        path, key));
  return found->second;
}

void expect(const std::string& path, std::string_view what, const std::string& expected,
            const std::string& found) {
  if (expected == found) return;
  throw CheckpointError(
      fmt::format("'{}' was saved with {} {}, but this run has {}. Resume with the same, or save "
                  "with Engine::save_full, which loads at any stage and number of ranks.",
                  path, what, found, expected));
}

void expect_tensor(const SafetensorsReader& file, const std::string& path,
                   const TensorInfo& wanted) {
  for (const auto& info : file.tensors()) {
    if (info.name != wanted.name) continue;
    if (info == wanted) return;
    throw CheckpointError(fmt::format("'{}' holds '{}' as {} ({}), but the model needs {} ({}).",
                                      path, wanted.name, c10::toString(info.dtype),
                                      fmt::join(info.shape, ", "), c10::toString(wanted.dtype),
                                      fmt::join(wanted.shape, ", ")));
  }
  throw CheckpointError(
      fmt::format("'{}' has no '{}': it is of another model or optimizer.", path, wanted.name));
}

// In any floating-point dtype where `like` has one.
void expect_values(const SafetensorsReader& file, const std::string& path, const std::string& name,
                   const at::Tensor& like) {
  auto dtype = like.scalar_type();
  for (const auto& info : file.tensors()) {
    if (info.name == name && at::isFloatingType(info.dtype) && at::isFloatingType(dtype))
      dtype = info.dtype;
  }
  expect_tensor(file, path, {name, dtype, like.sizes().vec()});
}

// Sizes and strides of each parameter, which say what its flat array means.
nlohmann::json shapes_of(const Model& model) {
  auto list = nlohmann::json::array();
  for (const auto& each : model.parameters())
    list.push_back({each.sizes().vec(), each.strides().vec()});
  return list;
}

// Files of earlier versions do not say.
void expect_shapes(const SafetensorsReader& file, const std::string& path, const Model& model) {
  const auto found = file.metadata().find("shapes");
  if (found == file.metadata().end()) return;
  const auto theirs = nlohmann::json::parse(found->second, nullptr, false);
  const auto ours = shapes_of(model);
  for (size_t p = 0; p < ours.size(); ++p) {
    const auto other = theirs.is_array() && p < theirs.size() ? theirs[p] : nlohmann::json();
    if (other == ours[p]) continue;
    const bool pair = other.is_array() && other.size() == 2;
    const size_t differs = pair && other[0] == ours[p][0] ? 1 : 0;
    throw CheckpointError(
        fmt::format("'{}' holds parameter '{}' with {} {}, but the model has it with {}.", path,
                    model.names()[p], differs == 1 ? "strides" : "shape",
                    pair ? other[differs].dump() : other.dump(), ours[p][differs].dump()));
  }
}

// A cell of the table in a sharded save: the elements that this rank owns.
struct SavedCell {
  std::string key;
  int64_t unit = 0;
  State state = State::parameters;
  TensorInfo info;
};

// A low-precision parameter is saved beside its master, since the user may have written it since
// the last update. fp32 master weights are the parameters, wherever they lie.
std::vector<SavedCell> saved_cells(const StateTable& table, int64_t units) {
  std::vector<SavedCell> cells;
  for (int64_t u = 0; u < units; ++u) {
    const auto& plan = table.plan(u);
    const auto add = [&](State state, at::ScalarType dtype) {
      const auto key = fmt::format("unit.{}.{}", u, table.name(u, state));
      cells.push_back({key, u, state, {key, dtype, {plan.entries(state, plan.owned.size())}}});
    };
    add(State::parameters, plan.dtype);
    if (!plan.trainable) continue;
    if (plan.dtype != at::kFloat && !plan.narrow) add(State::master, at::kFloat);
    for (size_t m = 0; m < plan.moments.size(); ++m) {
      const auto state = moment(static_cast<int64_t>(m));
      add(state, plan.dtype_of(state));
    }
  }
  return cells;
}

// Factored states by the keys of full saves. Every rank holds the same, and each file of a sharded
// save has them: it says all that its rank needs.
using FactoredByKey = std::vector<std::pair<std::string, at::Tensor>>;
FactoredByKey factored_states(const FactoredStates& states, const Model& model) {
  FactoredByKey all;
  for (int64_t p = 0; p < model.size(); ++p) {
    if (!states.has(p)) continue;
    for (const auto name : FactoredStates::kNames)
      all.emplace_back(state_key(name, model.name(p)), states.find(p, name));
  }
  return all;
}

TensorInfo info_of(const std::string& key, const at::Tensor& tensor) {
  return {key, tensor.scalar_type(), tensor.sizes().vec()};
}

void load_cell(StateTable& table, const SavedCell& cell, const at::Tensor& values) {
  table.replace(cell.unit, cell.state, values);
  const auto& plan = table.plan(cell.unit);
  if (cell.state == State::parameters && plan.copies_master())
    table.replace(cell.unit, State::master, values);
}

// What a sharded save depends on.
std::map<std::string, std::string> description(const Engine& engine) {
  return {{"stage", std::to_string(engine.config().stage)},
          {"world_size", std::to_string(engine.layout().world_size())},
          {"unit_bytes", std::to_string(engine.config().unit_bytes)},
          {"parameters", nlohmann::json(engine.parameter_names()).dump()}};
}

// That, and the steps taken.
std::map<std::string, std::string> header(const Engine& engine, const Model& model,
                                          const std::vector<int64_t>& counts,
                                          const std::optional<LossScale>& scale,
                                          const char* format) {
  auto header = description(engine);
  header["format"] = format;
  header["steps"] = std::to_string(engine.steps());
  header["shapes"] = shapes_of(model).dump();
  header["parameter_steps"] = nlohmann::json(counts).dump();
  if (scale) {
    const auto state = scale->state();
    header["loss_scale"] = nlohmann::json{
        {"scale", state.scale},
        {"clean", state.clean},
        {"hysteresis",
         state.hysteresis}}.dump();
  }
  return header;
}

// What the file at `path` has of a loss scale; none where it was saved without one.
std::optional<LossScaleState> loss_scale_state(const SafetensorsReader& file,
                                               const std::string& path) {
  const auto found = file.metadata().find("loss_scale");
  if (found == file.metadata().end()) return {};
  try {
    const auto json = nlohmann::json::parse(found->second);
    return LossScaleState{.scale = json.at("scale").get<double>(),
                          .clean = json.at("clean").get<int64_t>(),
                          .hysteresis = json.at("hysteresis").get<int64_t>()};
  } catch (const std::exception& error) {
    throw CheckpointError(
        fmt::format("'{}' has a loss scale that cannot be read ({}).", path, error.what()));
  }
}

// The scale that continues the file's: a new one where that has none, or `scale` is none.
std::optional<LossScale> continued(const Config& config, const SafetensorsReader& file,
                                   const std::string& path) {
  if (!config.scales_loss()) return {};
  LossScale scale(config.loss_scaling);
  const auto state = loss_scale_state(file, path);
  if (!state) return scale;
  try {
    scale.restore(*state);
  } catch (const ConfigError& error) {
    throw CheckpointError(fmt::format("'{}': {}", path, error.what()));
  }
  return scale;
}

struct StepCounts {
  int64_t steps = 0;
  std::vector<int64_t> by_parameter;
};

// Those in the header of the file at `path`.
StepCounts step_counts(const SafetensorsReader& file, const std::string& path, size_t parameters) {
  const auto& count = metadata(file, path, "steps");
  const auto& by_parameter = metadata(file, path, "parameter_steps");
  try {
    StepCounts counts{std::stoll(count),
                      nlohmann::json::parse(by_parameter).get<std::vector<int64_t>>()};
    if (counts.by_parameter.size() != parameters)
      throw CheckpointError(fmt::format("'{}' counts the steps of {} parameters; the model has {}.",
                                        path, counts.by_parameter.size(), parameters));
    return counts;
  } catch (const CheckpointError&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError(
        fmt::format("'{}' has a step count that cannot be read ({}).", path, error.what()));
  }
}

}  // namespace

void Engine::save(const std::string& folder) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.at_boundary("Engine::save");
  const auto partial = WholeFolder::partial(folder);
  std::optional<WholeFolder> whole;
  impl.change_parameters("Engine::save");
  const int rank = impl.group().rank();
  comm::agree<CheckpointError>(impl.group(), "Engine::save", [&] {
    if (rank != 0) return;
    check_replaceable(folder);
    whole.emplace(folder, &fail<CheckpointError>);
  });
  comm::agree<CheckpointError>(impl.group(), "Engine::save", [&] {
    const bool owns =
        impl.placement.sharded.optimizer ? impl.placement.replicas->rank() == 0 : rank == 0;
    const auto cells =
        owns ? saved_cells(*impl.table, impl.layout.unit_count()) : std::vector<SavedCell>{};
    const auto buffers = impl.model.plain_buffers();
    std::vector<TensorInfo> infos;
    for (const auto& cell : cells) infos.push_back(cell.info);
    const auto factored = owns ? factored_states(*impl.factored, impl.model) : FactoredByKey{};
    for (const auto& [key, values] : factored) infos.push_back(info_of(key, values));
    for (const auto& [name, buffer] : buffers)
      infos.push_back({"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
    SafetensorsWriter writer(
        partial / shard_name(rank, impl.group().size()), infos,
        header(*this, impl.model, impl.update->steps(), impl.loss_scale, kSharded));
    for (const auto& cell : cells) {
      const bool coded = impl.table->plan(cell.unit).is_coded(cell.state);
      writer.write(cell.key, coded ? impl.table->read_kept(cell.unit, cell.state)
                                   : impl.table->read(cell.unit, cell.state));
    }
    for (const auto& [key, values] : factored) writer.write(key, values);
    for (const auto& [name, buffer] : buffers) writer.write("buffer." + name, buffer);
    writer.commit();
  });
  comm::agree<CheckpointError>(impl.group(), "Engine::save", [&] {
    if (whole) whole->commit();
  });
}

void Engine::load(const std::string& folder) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  const int owner = impl.placement.sharded.optimizer ? impl.placement.shards->rank() : 0;
  const auto path = (fs::path(folder) / shard_name(owner, impl.group().size())).string();
  const auto first = (fs::path(folder) / shard_name(0, impl.group().size())).string();
  const auto own =
      (fs::path(folder) / shard_name(impl.group().rank(), impl.group().size())).string();
  std::unique_ptr<SafetensorsReader> file;
  std::unique_ptr<SafetensorsReader> with_buffers;
  const auto buffers = impl.model.plain_buffers();
  const auto cells = saved_cells(*impl.table, impl.layout.unit_count());
  const auto factored = factored_states(*impl.factored, impl.model);
  StepCounts counts;
  std::optional<LossScale> scale;
  comm::agree<CheckpointError>(impl.group(), "Engine::load", [&] {
    if (impl.group().rank() == 0) WholeFolder::recover(folder, &fail<CheckpointError>);
  });
  comm::agree<CheckpointError>(impl.group(), "Engine::load", [&] {
    if (!fs::exists(path)) {
      throw CheckpointError(
          fmt::format("'{}' does not exist. Engine::load resumes at the number of ranks that "
                      "saved; Engine::save_full and load_full change it.",
                      path));
    }
    file = std::make_unique<SafetensorsReader>(path);
    with_buffers = std::make_unique<SafetensorsReader>(own);
    // Earlier versions saved rank 0's for all.
    if (!buffers.empty() && !with_buffers->contains("buffer." + buffers.front().first))
      with_buffers = std::make_unique<SafetensorsReader>(first);
    expect(path, "format", kSharded, metadata(*file, path, "format"));
    for (const auto& [key, value] : description(*this))
      expect(path, key, value, metadata(*file, path, key));
    expect_shapes(*file, path, impl.model);
    for (const auto& cell : cells) expect_tensor(*file, path, cell.info);
    for (const auto& [key, values] : factored) expect_tensor(*file, path, info_of(key, values));
    for (const auto& [name, buffer] : buffers)
      expect_values(*with_buffers, own, "buffer." + name, buffer);
    counts = step_counts(*file, path, impl.model.names().size());
    scale = continued(config(), *file, path);
    impl.schedule->wait();
  });
  impl.replace_states("Engine::load", [&] {
    impl.steps = counts.steps;
    impl.loss_scale = scale;
    impl.update->steps() = std::move(counts.by_parameter);
    for (const auto& cell : cells) load_cell(*impl.table, cell, file->read(cell.key));
    for (const auto& [key, values] : factored) values.copy_(file->read(key));
    for (size_t i = 0; i < buffers.size(); ++i)
      impl.model.set_buffer(i, with_buffers->read("buffer." + buffers[i].first));
  });
}

void Engine::save_full(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.at_boundary("Engine::save_full");
  impl.change_parameters("Engine::save_full");
  const auto buffers = impl.model.plain_buffers();
  const auto factored = factored_states(*impl.factored, impl.model);
  const bool writes = impl.group().rank() == 0;
  std::unique_ptr<SafetensorsWriter> writer;
  comm::agree<CheckpointError>(impl.group(), "Engine::save_full", [&] {
    if (!writes) return;
    std::vector<TensorInfo> infos;
    for (size_t p = 0; p < impl.model.parameters().size(); ++p) {
      infos.push_back(
          {impl.model.names()[p], at::kFloat, impl.model.parameters()[p].sizes().vec()});
      for (const auto name : impl.table->names(impl.layout.unit_of(static_cast<int64_t>(p)))) {
        if (name != "master")
          infos.push_back({state_key(name, impl.model.names()[p]), at::kFloat,
                           impl.model.parameters()[p].sizes().vec()});
      }
    }
    for (const auto& [key, values] : factored) infos.push_back(info_of(key, values));
    for (const auto& [name, buffer] : buffers)
      infos.push_back({"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
    writer = std::make_unique<SafetensorsWriter>(
        path, infos, header(*this, impl.model, impl.update->steps(), impl.loss_scale, kFull));
  });
  // Rank 0 may fail to write in the middle; it still takes part in the gathers, and all learn of it
  // at the end.
  std::string failure;
  const auto attempt = [&](const std::function<void()>& write) {
    if (!writes || !failure.empty()) return;
    try {
      write();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  };
  for (int64_t u = 0; u < impl.layout.unit_count(); ++u) {
    const auto names = impl.table->names(u);
    const auto gather_and_write = [&](const at::Tensor& owned, std::string_view state) {
      const auto unit = impl.full(u, owned);
      for (const auto& segment : impl.layout.unit(u).segments) {
        const auto p = static_cast<size_t>(segment.parameter);
        attempt([&] {
          const auto value =
              unflattened(unit.narrow(0, segment.offset, segment.numel).to(at::kFloat),
                          impl.model.parameters()[p]);
          writer->write(
              state == "master" ? impl.model.names()[p] : state_key(state, impl.model.names()[p]),
              value);
        });
      }
    };
    if (names.empty()) gather_and_write(impl.table->read(u, State::parameters), "master");
    for (const auto name : names)
      gather_and_write(impl.table->read(u, *impl.table->find(u, name)), name);
  }
  comm::agree<CheckpointError>(impl.group(), "Engine::save_full", [&] {
    if (!writes) return;
    for (const auto& [key, values] : factored)
      attempt([&, &key = key, &values = values] { writer->write(key, values); });
    for (const auto& [name, buffer] : buffers)
      attempt([&, &name = name, &buffer = buffer] { writer->write("buffer." + name, buffer); });
    attempt([&] { writer->commit(); });
    if (!failure.empty()) throw CheckpointError(failure);
  });
}

void Engine::load_full(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  const auto buffers = impl.model.plain_buffers();
  const auto factored = factored_states(*impl.factored, impl.model);
  std::unique_ptr<SafetensorsReader> file;
  StepCounts counts;
  std::optional<LossScale> scale;
  comm::agree<CheckpointError>(impl.group(), "Engine::load_full", [&] {
    file = std::make_unique<SafetensorsReader>(path);
    expect(path, "format", kFull, metadata(*file, path, "format"));
    for (size_t p = 0; p < impl.model.parameters().size(); ++p) {
      const auto shape = impl.model.parameters()[p].sizes().vec();
      expect_tensor(*file, path, {impl.model.names()[p], at::kFloat, shape});
      for (const auto name : impl.table->names(impl.layout.unit_of(static_cast<int64_t>(p)))) {
        if (name != "master")
          expect_tensor(*file, path, {state_key(name, impl.model.names()[p]), at::kFloat, shape});
      }
    }
    for (const auto& [key, values] : factored) expect_tensor(*file, path, info_of(key, values));
    for (const auto& [name, buffer] : buffers) expect_values(*file, path, "buffer." + name, buffer);
    expect(path, "parameters", nlohmann::json(impl.model.names()).dump(),
           metadata(*file, path, "parameters"));
    counts = step_counts(*file, path, impl.model.names().size());
    scale = continued(config(), *file, path);
    impl.schedule->wait();
  });
  impl.replace_states("Engine::load_full", [&] {
    impl.steps = counts.steps;
    impl.loss_scale = scale;
    impl.update->steps() = std::move(counts.by_parameter);
    for (size_t p = 0; p < impl.model.parameters().size(); ++p) {
      const auto i = static_cast<int64_t>(p);
      const int64_t u = impl.layout.unit_of(i);
      const auto& like = impl.model.parameters()[p];
      const auto values = flattened(file->read(impl.model.names()[p]), like, at::kFloat);
      impl.table->write_parameter(i, values, Tier::device);
      for (const auto name : impl.table->names(u)) {
        if (name == "master") {
          impl.table->set_master(i, values);
        } else {
          const auto cell = *impl.table->find(u, name);
          const auto array = impl.table->read(u, cell);
          impl.write_owned(
              i, array,
              flattened(file->read(state_key(name, impl.model.names()[p])), like, at::kFloat));
          impl.table->put(u, cell, array);
        }
      }
    }
    for (const auto& [key, values] : factored) values.copy_(file->read(key));
    for (size_t i = 0; i < buffers.size(); ++i)
      impl.model.set_buffer(i, file->read("buffer." + buffers[i].first));
  });
}

void Engine::load_weights(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  const auto buffers = impl.model.plain_buffers();
  std::unique_ptr<SafetensorsReader> file;
  std::vector<std::string> keys;                           // by parameter
  std::vector<std::pair<size_t, std::string>> of_buffers;  // that the file has
  comm::agree<CheckpointError>(impl.group(), "Engine::load_weights", [&] {
    file = std::make_unique<SafetensorsReader>(path);
    for (int64_t p = 0; p < impl.model.size(); ++p) {
      const auto names = impl.model.names_of(p);
      const auto found = std::find_if(names.begin(), names.end(),
                                      [&](const auto& name) { return file->contains(name); });
      keys.push_back(found == names.end() ? names.front() : *found);
      expect_values(*file, path, keys.back(), impl.model.parameter(p));
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      for (const auto& key : {"buffer." + buffers[i].first, buffers[i].first}) {
        if (!file->contains(key)) continue;
        expect_values(*file, path, key, buffers[i].second);
        of_buffers.emplace_back(i, key);
        break;
      }
    }
    impl.schedule->wait();
  });
  impl.replace_states("Engine::load_weights", [&] {
    impl.steps = 0;
    if (impl.loss_scale) impl.loss_scale.emplace(impl.config.loss_scaling);
    impl.update->steps().assign(keys.size(), 0);
    impl.factored->clear();
    for (int64_t u = 0; u < impl.layout.unit_count(); ++u) {
      const auto& plan = impl.table->plan(u);
      for (size_t m = 0; m < plan.moments.size(); ++m)
        impl.table->replace(u, moment(static_cast<int64_t>(m)), at::zeros({plan.owned.size()}));
    }
    for (int64_t p = 0; p < impl.model.size(); ++p) {
      const auto values =
          flattened(file->read(keys[static_cast<size_t>(p)]), impl.model.parameter(p), at::kFloat);
      impl.table->write_parameter(p, values, Tier::device);
      if (impl.model.trainable(p)) impl.table->set_master(p, values);
    }
    for (const auto& [i, key] : of_buffers) impl.model.set_buffer(i, file->read(key));
  });
}

}  // namespace zero
