// Saving and loading the engine's states, sharded or in full.
//
// A sharded save is one file for each rank, with the elements that the rank owns, by unit. At stage
// 0 rank 0's file has all of them, and with replicas those of the first block. The files are in a
// WholeFolder: they replace an earlier save only once every rank's file is complete and on the
// disk.
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/comm/agreement.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/state_sink.h"
#include "zero/engine/state_source.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

std::string shard_name(int rank, int ranks) {
  return fmt::format("rank-{}-of-{}.safetensors", rank, ranks);
}

bool is_shard(const std::string& name) {
  return name.starts_with("rank-") && name.find("-of-") != std::string::npos &&
         name.ends_with(".safetensors");
}

// Throws CheckpointError where `folder` is not an earlier save's: a save takes the place of the
// whole folder. Files beside the shards may be the program's notes on that save.
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
  if (error || (saved && inner.empty())) return;  // who writes there reports an error
  throw CheckpointError(
      fmt::format("'{}' holds '{}', which no save writes, and a save takes the place of the whole "
                  "folder. Give another folder, or move that away.",
                  folder.string(), inner.empty() ? other : inner));
}

}  // namespace

StateParts Engine::Impl::parts() {
  return {plan.layout(), flows.table(), plan.model(), flows.factored(), plan.config()};
}

Progress Engine::Impl::saved_progress() const {
  return {progress.steps(), flows.update().steps(), progress.loss_scale()};
}

void Engine::Impl::load_states(std::string_view label,
                               const std::function<std::unique_ptr<StateSource>()>& open) {
  std::unique_ptr<StateSource> source;
  Progress loaded;
  comm::agree<CheckpointError>(plan.group(), label, [&] {
    source = open();
    loaded = source->progress();
    flows.schedule().wait();
  });
  changes.replace_states(label, [&] {
    progress.set_steps(loaded.steps);
    progress.loss_scale() = loaded.loss_scale;
    flows.update().steps() = std::move(loaded.parameter_steps);
    restore(parts(), *source);
  });
}

void Engine::save(const std::string& folder) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.changes.at_boundary("Engine::save");
  const auto partial = WholeFolder::partial(folder);
  std::optional<WholeFolder> whole;
  impl.changes.change_parameters("Engine::save");
  const int rank = impl.plan.group().rank();
  comm::agree<CheckpointError>(impl.plan.group(), "Engine::save", [&] {
    if (rank != 0) return;
    check_replaceable(folder);
    whole.emplace(folder, &fail<CheckpointError>);
  });
  comm::agree<CheckpointError>(impl.plan.group(), "Engine::save", [&] {
    const bool owns = impl.plan.placement().sharded.optimizer
                          ? impl.plan.placement().replicas->rank() == 0
                          : rank == 0;
    const auto sink = shard_sink(impl.parts(), owns);
    SavedFile file(impl.parts(), *sink, impl.saved_progress(),
                   partial / shard_name(rank, impl.plan.group().size()), owns);
    for_each_cell(impl.parts(), *sink, [&](int64_t unit, State state, const at::Tensor& cell) {
      sink->write(file.writer(), unit, state, cell);
    });
    file.commit();
  });
  comm::agree<CheckpointError>(impl.plan.group(), "Engine::save", [&] {
    if (whole) whole->commit();
  });
}

void Engine::load(const std::string& folder) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  comm::agree<CheckpointError>(impl.plan.group(), "Engine::load", [&] {
    if (impl.plan.group().rank() == 0) WholeFolder::recover(folder, &fail<CheckpointError>);
  });
  const auto file_of = [&](int rank) {
    return fs::path(folder) / shard_name(rank, impl.plan.group().size());
  };
  const int owner =
      impl.plan.placement().sharded.optimizer ? impl.plan.placement().shards->rank() : 0;
  impl.load_states("Engine::load", [&] {
    return open_shards(impl.parts(), file_of(owner), file_of(impl.plan.group().rank()), file_of(0));
  });
}

void Engine::save_full(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  auto& impl = *impl_;
  impl.changes.at_boundary("Engine::save_full");
  impl.changes.change_parameters("Engine::save_full");
  const auto sink = tensor_sink(impl.parts(), [&](int64_t unit, const at::Tensor& owned) {
    return impl.flows.table().full(unit, owned);
  });
  std::unique_ptr<SavedFile> file;  // of rank 0 alone
  comm::agree<CheckpointError>(impl.plan.group(), "Engine::save_full", [&] {
    if (impl.plan.group().rank() == 0)
      file = std::make_unique<SavedFile>(impl.parts(), *sink, impl.saved_progress(), path, true);
  });
  // Rank 0 may fail to write in the middle. It still takes part in the gathers, and all ranks learn
  // of the failure at the end.
  std::string failure;
  const auto attempt = [&](const std::function<void()>& write) {
    if (!file || !failure.empty()) return;
    try {
      write();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  };
  for_each_cell(impl.parts(), *sink, [&](int64_t unit, State state, const at::Tensor& cell) {
    attempt([&] { sink->write(file->writer(), unit, state, cell); });
  });
  comm::agree<CheckpointError>(impl.plan.group(), "Engine::save_full", [&] {
    attempt([&] { file->commit(); });
    if (!failure.empty()) throw CheckpointError(failure);
  });
}

void Engine::load_full(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  impl_->load_states("Engine::load_full", [&] { return open_tensors(impl_->parts(), path); });
}

void Engine::load_weights(const std::string& path) {
  const c10::NoGradGuard no_grad;
  const HostScope not_refused;
  impl_->load_states("Engine::load_weights", [&] { return open_weights(impl_->parts(), path); });
}

}  // namespace zero
