// Saving and loading the engine's states, sharded or in full.
//
// A sharded save is one file a rank, of the elements that the rank owns, by unit; at stage 0 rank
// 0's file has everything. It is written to `folder`.partial and takes the place of an earlier save
// only once every rank's file is complete.
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
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

std::string array_key(int64_t unit, std::string_view array) {
  return fmt::format("unit.{}.{}", unit, array);
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

}  // namespace

// The flat arrays that this rank owns, by their names in a sharded save. A low-precision parameter
// is saved beside its master, since the user may have written it since the last update.
std::vector<Engine::Impl::OwnedArray> Engine::Impl::owned_arrays() const {
  std::vector<OwnedArray> arrays;
  for (int64_t u = 0; u < layout->unit_count(); ++u) {
    arrays.push_back({array_key(u, "parameter"), u, {}, store->dtype(u)});
    for (const auto name : optimizer->array_names(u)) {
      if (name != "master" || optimizer->extra_bits(u))
        arrays.push_back({array_key(u, name), u, name, at::kFloat});
    }
  }
  return arrays;
}

at::Tensor Engine::Impl::values_of(const OwnedArray& array) const {
  return array.state.empty() ? store->owned(array.unit) : optimizer->array(array.unit, array.state);
}

TensorInfo Engine::Impl::info_of(const OwnedArray& array) const {
  return {array.key, array.dtype, {owned_range(array.unit).size()}};
}

std::map<std::string, std::string> Engine::Impl::description() const {
  return {{"stage", std::to_string(config.stage)},
          {"world_size", std::to_string(group->size())},
          {"unit_bytes", std::to_string(config.unit_bytes)},
          {"parameters", nlohmann::json(model.names()).dump()}};
}

namespace {

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

}  // namespace

std::map<std::string, std::string> Engine::Impl::header(const char* format) const {
  auto header = description();
  header["format"] = format;
  header["steps"] = std::to_string(steps);
  header["shapes"] = shapes_of(model).dump();
  header["parameter_steps"] = nlohmann::json(optimizer->steps()).dump();
  return header;
}

Engine::Impl::StepCounts Engine::Impl::step_counts(const SafetensorsReader& file,
                                                   const std::string& path) const {
  const auto& count = metadata(file, path, "steps");
  const auto& by_parameter = metadata(file, path, "parameter_steps");
  try {
    StepCounts counts{std::stoll(count),
                      nlohmann::json::parse(by_parameter).get<std::vector<int64_t>>()};
    if (counts.by_parameter.size() != model.names().size())
      throw CheckpointError(fmt::format("'{}' counts the steps of {} parameters; the model has {}.",
                                        path, counts.by_parameter.size(), model.size()));
    return counts;
  } catch (const CheckpointError&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError(
        fmt::format("'{}' has a step count that cannot be read ({}).", path, error.what()));
  }
}

void Engine::Impl::at_boundary(std::string_view what) const {
  check_between_steps(what);
  if (micro_batches == 0) return;
  throw Error(
      fmt::format("{} in the middle of an accumulation ({} of {} micro-batches): gradients are not "
                  "saved. Call it after the step.",
                  what, micro_batches, config.gradient_accumulation_steps));
}

void Engine::Impl::check_between_steps(std::string_view what) const {
  if (!gradients->used()) return;
  throw Error(
      fmt::format("{} between Engine::backward and Engine::step: with update_in_backward some "
                  "weights have been updated already and others have not. Call it after the step; "
                  "where the pass or the step failed, load a checkpoint first.",
                  what));
}

void Engine::Impl::take_steps(StepCounts counts) {
  steps = counts.steps;
  optimizer->steps() = std::move(counts.by_parameter);
}

void Engine::Impl::replace_states(std::string_view label, const std::function<void()>& write) {
  group->barrier(label);  // every rank has ended its gathers
  commit_writes();
  invalidate();  // refused while a zero::Gathered scope is open: then nothing has changed yet
  for (int64_t u = 0; u < layout->unit_count(); ++u) finish_update(u);
  optimizer->discard();
  gradients->clear();
  micro_batches = 0;
  write();
  for (int64_t u = 0; u < layout->unit_count(); ++u) store->publish(u);  // frozen ones, too
  store->finish_publish();
}

namespace {

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
  impl.change_parameters("Engine::save");
  const int rank = impl.group->rank();
  together(*impl.group, "Engine::save", [&] {
    if (rank != 0) return;
    fs::remove_all(partial);
    fs::create_directories(partial);
  });
  const auto remove_partial = [&] {
    std::error_code ignored;
    if (rank == 0) fs::remove_all(partial, ignored);
  };
  try {
    together(*impl.group, "Engine::save", [&] {
      const auto arrays = impl.placement.optimizer || rank == 0 ? impl.owned_arrays()
                                                                : std::vector<Impl::OwnedArray>{};
      const auto buffers = impl.model.plain_buffers();
      std::vector<TensorInfo> infos;
      for (const auto& array : arrays) infos.push_back(impl.info_of(array));
      for (const auto& [name, buffer] : buffers)
        infos.push_back({"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
      SafetensorsWriter writer(partial / shard_name(rank, impl.group->size()), infos,
                               impl.header(kSharded));
      for (const auto& array : arrays) writer.write(array.key, impl.values_of(array));
      for (const auto& [name, buffer] : buffers) writer.write("buffer." + name, buffer);
      writer.commit();
    });
    together(*impl.group, "Engine::save", [&] {
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
  const int owner = impl.placement.optimizer ? impl.group->rank() : 0;
  const auto path = (fs::path(folder) / shard_name(owner, impl.group->size())).string();
  const auto own = (fs::path(folder) / shard_name(impl.group->rank(), impl.group->size())).string();
  const auto first = (fs::path(folder) / shard_name(0, impl.group->size())).string();
  std::unique_ptr<SafetensorsReader> file;
  std::unique_ptr<SafetensorsReader> with_buffers;
  const auto buffers = impl.model.plain_buffers();
  const auto arrays = impl.owned_arrays();
  Impl::StepCounts counts;
  together(*impl.group, "Engine::load", [&] {
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
    for (const auto& [key, value] : impl.description())
      expect(path, key, value, metadata(*file, path, key));
    expect_shapes(*file, path, impl.model);
    for (const auto& array : arrays) expect_tensor(*file, path, impl.info_of(array));
    for (const auto& [name, buffer] : buffers)
      expect_values(*with_buffers, own, "buffer." + name, buffer);
    counts = impl.step_counts(*file, path);
    if (impl.queue) impl.queue->wait_all();
  });
  impl.replace_states("Engine::load", [&] {
    impl.take_steps(std::move(counts));
    for (const auto& array : arrays) {
      if (array.state.empty()) {
        const auto values = file->read(array.key);
        impl.store->replace(array.unit, values);
        impl.optimizer->follow(array.unit);
        // Master weights apart from fp32 parameters are not saved: they are the same.
        if (impl.optimizer->own_master(array.unit) && !impl.optimizer->extra_bits(array.unit) &&
            impl.gradients->trainable(array.unit))
          impl.optimizer->replace(array.unit, "master", values);
      } else {
        impl.optimizer->replace(array.unit, array.state, file->read(array.key));
      }
    }
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
  const bool writes = impl.group->rank() == 0;
  const auto buffers = impl.model.plain_buffers();
  std::unique_ptr<SafetensorsWriter> writer;
  together(*impl.group, "Engine::save_full", [&] {
    if (!writes) return;
    std::vector<TensorInfo> infos;
    for (size_t p = 0; p < impl.model.parameters().size(); ++p) {
      infos.push_back(
          {impl.model.names()[p], at::kFloat, impl.model.parameters()[p].sizes().vec()});
      for (const auto name :
           impl.optimizer->array_names(impl.layout->unit_of(static_cast<int64_t>(p)))) {
        if (name != "master")
          infos.push_back({state_key(name, impl.model.names()[p]), at::kFloat,
                           impl.model.parameters()[p].sizes().vec()});
      }
    }
    for (const auto& [name, buffer] : buffers)
      infos.push_back({"buffer." + name, buffer.scalar_type(), buffer.sizes().vec()});
    writer = std::make_unique<SafetensorsWriter>(path, infos, impl.header(kFull));
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
  for (int64_t u = 0; u < impl.layout->unit_count(); ++u) {
    const auto names = impl.optimizer->array_names(u);
    const auto gather_and_write = [&](const at::Tensor& owned, std::string_view state) {
      const auto unit = impl.full(u, owned);
      for (const auto& segment : impl.layout->unit(u).segments) {
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
    if (names.empty()) gather_and_write(impl.store->owned(u), "master");
    for (const auto name : names) gather_and_write(impl.optimizer->array(u, name), name);
  }
  together(*impl.group, "Engine::save_full", [&] {
    if (!writes) return;
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
  std::unique_ptr<SafetensorsReader> file;
  Impl::StepCounts counts;
  together(*impl.group, "Engine::load_full", [&] {
    file = std::make_unique<SafetensorsReader>(path);
    expect(path, "format", kFull, metadata(*file, path, "format"));
    for (size_t p = 0; p < impl.model.parameters().size(); ++p) {
      const auto shape = impl.model.parameters()[p].sizes().vec();
      expect_tensor(*file, path, {impl.model.names()[p], at::kFloat, shape});
      for (const auto name :
           impl.optimizer->array_names(impl.layout->unit_of(static_cast<int64_t>(p)))) {
        if (name != "master")
          expect_tensor(*file, path, {state_key(name, impl.model.names()[p]), at::kFloat, shape});
      }
    }
    for (const auto& [name, buffer] : buffers) expect_values(*file, path, "buffer." + name, buffer);
    expect(path, "parameters", nlohmann::json(impl.model.names()).dump(),
           metadata(*file, path, "parameters"));
    counts = impl.step_counts(*file, path);
    if (impl.queue) impl.queue->wait_all();
  });
  impl.replace_states("Engine::load_full", [&] {
    impl.take_steps(std::move(counts));
    for (size_t p = 0; p < impl.model.parameters().size(); ++p) {
      const auto i = static_cast<int64_t>(p);
      const int64_t u = impl.layout->unit_of(i);
      const auto& like = impl.model.parameters()[p];
      const auto values = flattened(file->read(impl.model.names()[p]), like, at::kFloat);
      impl.store->write(i, values);
      for (const auto name : impl.optimizer->array_names(u)) {
        if (name == "master") {
          impl.optimizer->set_master(i, values);
        } else {
          const auto array = impl.optimizer->array(u, name);
          impl.write_owned(
              i, array,
              flattened(file->read(state_key(name, impl.model.names()[p])), like, at::kFloat));
          impl.optimizer->put(u, name, array);
        }
      }
    }
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
  together(*impl.group, "Engine::load_weights", [&] {
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
    if (impl.queue) impl.queue->wait_all();
  });
  impl.replace_states("Engine::load_weights", [&] {
    impl.take_steps({0, std::vector<int64_t>(keys.size(), 0)});
    for (int64_t u = 0; u < impl.layout->unit_count(); ++u) {
      for (const auto name : impl.optimizer->array_names(u)) {
        if (name != "master")
          impl.optimizer->replace(u, name, at::zeros({impl.owned_range(u).size()}));
      }
    }
    for (int64_t p = 0; p < impl.model.size(); ++p) {
      const auto values =
          flattened(file->read(keys[static_cast<size_t>(p)]), impl.model.parameter(p), at::kFloat);
      impl.store->write(p, values);
      if (impl.model.trainable(p)) impl.optimizer->set_master(p, values);
    }
    for (const auto& [i, key] : of_buffers) impl.model.set_buffer(i, file->read(key));
  });
}

}  // namespace zero
