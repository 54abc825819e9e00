// Saving and loading the engine's states, sharded or in full.
//
// A sharded save is one file a rank, of the elements that the rank owns, by unit; at stage 0 rank
// 0's file has everything. It is written to `folder`.partial and takes the place of an earlier save
// only once every rank's file is complete.
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/comm/gather_records.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/flat.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSharded = "libzero sharded states 1";
constexpr const char* kFull = "libzero full states 1";

// Runs `work` on this rank; if it fails on any rank, all throw: that rank its own error, the others
// one that names it.
void together(comm::Group& group, std::string_view what, const std::function<void()>& work) {
  std::string failure;
  try {
    work();
  } catch (const CommError&) {
    throw;  // the group itself has failed: nothing can be agreed on
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const auto failed = comm::first_failure(group, !failure.empty(), what);
  if (!failure.empty()) throw CheckpointError(failure);
  if (failed)
    throw CheckpointError(
        fmt::format("{} failed on rank {}, which says why; nothing was changed.", what, *failed));
}

std::string shard_name(int rank, int ranks) {
  return fmt::format("rank-{}-of-{}.safetensors", rank, ranks);
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
      cells.push_back({key, u, state, {key, dtype, {plan.owned.size()}}});
    };
    add(State::parameters, plan.dtype);
    if (!plan.trainable) continue;
    if (plan.dtype != at::kFloat) add(State::master, at::kFloat);
    for (size_t m = 0; m < plan.moments.size(); ++m)
      add(moment(static_cast<int64_t>(m)), at::kFloat);
  }
  return cells;
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
std::map<std::string, std::string> header(const Engine& engine, const std::vector<int64_t>& counts,
                                          const char* format) {
  auto header = description(engine);
  header["format"] = format;
  header["steps"] = std::to_string(engine.steps());
  header["parameter_steps"] = nlohmann::json(counts).dump();
  return header;
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

// The folder of a save without a separator at its end, so that names can be put beside it.
fs::path save_folder(const std::string& folder) {
  fs::path target(folder);
  while (target.has_relative_path() && (!target.has_filename() || target.filename() == "."))
    target = target.parent_path();
  if (const auto name = target.filename(); name.empty() || name == "." || name == "..")
    throw CheckpointError(fmt::format(
        "Engine::save was given '{}'. Name a folder of its own, as 'checkpoint'.", folder));
  return target;
}

}  // namespace

void Engine::save(const std::string& folder) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.at_boundary("Engine::save");
  const auto target = save_folder(folder);
  const fs::path partial(target.string() + ".partial");
  impl.change_parameters("Engine::save", [] {});
  const int rank = impl.group().rank();
  together(impl.group(), "Engine::save", [&] {
    if (rank != 0) return;
    fs::remove_all(partial);
    fs::create_directories(partial);
  });
  const auto remove_partial = [&] {
    std::error_code ignored;
    if (rank == 0) fs::remove_all(partial, ignored);
  };
  try {
    together(impl.group(), "Engine::save", [&] {
      const auto cells = impl.placement.sharded.optimizer || rank == 0
                             ? saved_cells(*impl.table, impl.layout.unit_count())
                             : std::vector<SavedCell>{};
      const auto buffers = rank == 0 ? impl.model.buffers() : std::vector<Model::Buffer>{};
      std::vector<TensorInfo> infos;
      for (const auto& cell : cells) infos.push_back(cell.info);
      for (const auto& [name, buffer] : buffers)
        infos.push_back({"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
      SafetensorsWriter writer(partial / shard_name(rank, impl.group().size()), infos,
                               header(*this, impl.update->steps(), kSharded));
      for (const auto& cell : cells)
        writer.write(cell.key, impl.table->read(cell.unit, cell.state));
      for (const auto& [name, buffer] : buffers) writer.write("buffer." + name, buffer);
      writer.commit();
    });
    together(impl.group(), "Engine::save", [&] {
      if (rank != 0) return;
      // An earlier save is moved aside first, so that one of the two is always whole.
      const fs::path earlier(target.string() + ".earlier");
      fs::remove_all(earlier);
      if (fs::exists(target)) fs::rename(target, earlier);
      fs::rename(partial, target);
      fs::remove_all(earlier);
    });
  } catch (const CheckpointError&) {
    remove_partial();
    throw;
  }
}

void Engine::load(const std::string& folder) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  const int owner = impl.placement.sharded.optimizer ? impl.group().rank() : 0;
  const auto path = (fs::path(folder) / shard_name(owner, impl.group().size())).string();
  const auto first = (fs::path(folder) / shard_name(0, impl.group().size())).string();
  std::unique_ptr<SafetensorsReader> file;
  std::unique_ptr<SafetensorsReader> replicated;
  const auto cells = saved_cells(*impl.table, impl.layout.unit_count());
  StepCounts counts;
  together(impl.group(), "Engine::load", [&] {
    if (!fs::exists(path)) {
      throw CheckpointError(
          fmt::format("'{}' does not exist. Engine::load resumes at the number of ranks that "
                      "saved; Engine::save_full and load_full change it.",
                      path));
    }
    file = std::make_unique<SafetensorsReader>(path);
    replicated = std::make_unique<SafetensorsReader>(first);
    expect(path, "format", kSharded, metadata(*file, path, "format"));
    for (const auto& [key, value] : description(*this))
      expect(path, key, value, metadata(*file, path, key));
    for (const auto& cell : cells) expect_tensor(*file, path, cell.info);
    for (const auto& [name, buffer] : impl.model.buffers())
      expect_tensor(*replicated, first,
                    {"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
    counts = step_counts(*file, path, impl.model.names().size());
    impl.schedule->wait();
  });
  impl.replace_states("Engine::load", [&] {
    impl.steps = counts.steps;
    impl.update->steps() = std::move(counts.by_parameter);
    for (const auto& cell : cells) load_cell(*impl.table, cell, file->read(cell.key));
    for (const auto& [name, buffer] : impl.model.buffers())
      buffer.detach().copy_(replicated->read("buffer." + name));
  });
}

void Engine::save_full(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.at_boundary("Engine::save_full");
  impl.change_parameters("Engine::save_full", [] {});
  const bool writes = impl.group().rank() == 0;
  std::unique_ptr<SafetensorsWriter> writer;
  together(impl.group(), "Engine::save_full", [&] {
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
    for (const auto& [name, buffer] : impl.model.buffers())
      infos.push_back({"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
    writer = std::make_unique<SafetensorsWriter>(path, infos,
                                                 header(*this, impl.update->steps(), kFull));
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
  together(impl.group(), "Engine::save_full", [&] {
    if (!writes) return;
    for (const auto& [name, buffer] : impl.model.buffers())
      attempt([&, &name = name, &buffer = buffer] { writer->write("buffer." + name, buffer); });
    attempt([&] { writer->commit(); });
    if (!failure.empty()) throw CheckpointError(failure);
  });
}

void Engine::load_full(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  std::unique_ptr<SafetensorsReader> file;
  StepCounts counts;
  together(impl.group(), "Engine::load_full", [&] {
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
    for (const auto& [name, buffer] : impl.model.buffers())
      expect_tensor(*file, path, {"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
    expect(path, "parameters", nlohmann::json(impl.model.names()).dump(),
           metadata(*file, path, "parameters"));
    counts = step_counts(*file, path, impl.model.names().size());
    impl.schedule->wait();
  });
  impl.replace_states("Engine::load_full", [&] {
    impl.steps = counts.steps;
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
    for (const auto& [name, buffer] : impl.model.buffers())
      buffer.detach().copy_(file->read("buffer." + name));
  });
}

}  // namespace zero
