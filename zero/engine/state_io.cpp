// Saving and loading the engine's states, sharded or in full.
//
// A checkpoint is one file for each rank, with the elements that the rank owns, by parameter, and a
// manifest (Note [Checkpoints] in checkpoint/manifest.h). At stage 0 rank 0's file has all of them,
// and with replicas those of the first shard group. The files are in a WholeFolder: they replace an
// earlier save only once all are complete and on the disk.
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "zero/base/device_limit.h"
#include "zero/base/error.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/gather_texts.h"
#include "zero/device/stream.h"
#include "zero/engine/background_save.h"
#include "zero/engine/engine_impl.h"
#include "zero/engine/slice_file.h"
#include "zero/engine/state_sink.h"
#include "zero/engine/state_source.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

bool is_shard(const std::string& name) { return name == Manifest::kFile || is_rank_file(name); }

// Throws CheckpointError where `folder` is not an earlier save's: a save takes the place of the
// whole folder. Files beside the shards may be the program's notes on that save.
void check_replaceable(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error) || fs::is_empty(folder, error)) return;
  std::string other;
  std::string inner;  // a folder
  const bool saved = is_save(folder);
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    std::error_code ignored;  // a link to nowhere is no folder
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

// Calls `save` with the weights of training in force, and brings those of evaluation back if they
// were, also where the save fails, which all ranks have agreed on.
template <class Save>
void on_trained(EvaluationWeights& evaluation, const Save& save) {
  const bool evaluated = evaluation.end();
  const auto bring_back = [&] {
    if (evaluated) evaluation.begin();
  };
  try {
    save();
  } catch (const CheckpointError&) {
    bring_back();
    throw;
  }
  bring_back();
}

}  // namespace

StateParts Engine::Impl::parts() {
  return {plan.layout(), flows.table(), plan.model(), flows.factored(), plan.config()};
}

Manifest Engine::Impl::manifest(bool delayed) {
  auto manifest = describe(parts(), saved_progress(), delayed);
  for (size_t g = 0; g < hyper_parameters.groups().size(); ++g)
    manifest.groups.push_back(dump(hyper_parameters.optimizer(g)));
  manifest.buffer_policy = buffer_policy == BufferPolicy::rank_0    ? "rank_0"
                           : buffer_policy == BufferPolicy::average ? "average"
                                                                    : "per_rank";
  return manifest;
}

Progress Engine::Impl::saved_progress() const {
  return {.steps = progress.steps(),
          .parameter_steps = flows.update().steps(),
          .loss_scale = progress.loss_scale(),
          .grad_norm = progress.last_norm()};
}

void Engine::Impl::load_states(std::string_view label,
                               const std::function<std::unique_ptr<StateSource>()>& open) {
  evaluation.end();
  std::unique_ptr<StateSource> source;
  Progress loaded;
  comm::agree<CheckpointError>(plan.group(), label, [&] {
    source = open();
    loaded = source->progress();
    flows.schedule().wait();
  });
  const bool delayed = plan.timing().delayed_after && source->has_in_force();
  changes.replace_states(label, [&] {
    progress.set_steps(loaded.steps);
    progress.loss_scale() = loaded.loss_scale;
    progress.set_last_norm(loaded.grad_norm);
    flows.update().steps() = std::move(loaded.parameter_steps);
    // A file that cannot be read any more fails on every rank.
    comm::agree<CheckpointError>(plan.group(), label, [&] { restore(parts(), *source, delayed); });
    plan.model().has_values();
  });
  if (delayed) flows.schedule().resume_delayed();
}

bool Engine::Impl::may_save_beside() const {
  return !is_asynchronous(plan.group().device()) && plan.config().memory_budget == 0;
}

std::unique_ptr<SliceFile> Engine::Impl::slice_file(bool delayed) {
  const auto& group = plan.group();
  const bool owns = plan.placement().sharded.optimizer ? plan.placement().replicas->rank() == 0
                                                       : group.rank() == 0;
  return std::make_unique<SliceFile>(parts(), group.rank(), group.size(),
                                     SliceFile::Contents{.owned = owns, .in_force = delayed});
}

void Engine::prepare_saves() {
  auto& impl = *impl_;
  if (!impl.may_save_beside() || impl.saving != nullptr) return;
  const HostScope not_refused;
  const bool delays = config().offload_optimizer.delayed_update_after > 0;
  try {
    impl.save_memory.prepare(SaveSnapshot::bytes_at_once(*impl.slice_file(delays)));
  } catch (const OutOfMemory&) {  // the save says it, to every rank
  }
}

void Engine::save(const std::string& folder, const Attached& attached, const SaveOptions& options) {
  const Aside aside(impl_->flows);
  complete_save();
  constexpr const char* kLabel = "Engine::save";
  auto& impl = *impl_;
  auto& group = impl.plan.group();
  impl.plan.model().check_values(kLabel);
  impl.changes.at_boundary(kLabel);
  on_trained(impl.evaluation, [&] {
    const bool beside = options.background && impl.may_save_beside();
    const auto partial = WholeFolder::partial(folder);
    std::unique_ptr<BackgroundSave::Folder> whole;
    const bool delayed = impl.changes.settle_update(kLabel);
    const auto& hosts = options.on_each_host;
    comm::agree<CheckpointError>(group, kLabel, [&] {
      if ((hosts ? group.local_rank() : group.rank()) != 0) return;
      as_checkpoint_error([&] {
        check_replaceable(folder);
        // NOLINTNEXTLINE(modernize-make-unique): this aggregate does not move
        whole.reset(new BackgroundSave::Folder{
            {folder, &fail<CheckpointError>}, impl.manifest(delayed), group.size()});
      });
    });
    auto file = comm::agree<CheckpointError>(group, kLabel, [&] {
      std::unique_ptr<SliceFile> made;
      as_checkpoint_error([&] {
        made = impl.slice_file(delayed);
        made->create(partial);
      });
      return made;
    });
    if (hosts && hosts->make_room) {
      int64_t bytes = 0;
      for (const auto& piece : file->pieces()) bytes += piece.bytes;
      const auto all = comm::gather_records(group, bytes, kLabel);
      comm::agree<CheckpointError>(group, kLabel, [&] { hosts->make_room(all); });
    }
    std::shared_ptr<SaveSnapshot> snapshot;
    comm::agree<CheckpointError>(group, kLabel, [&] {
      as_checkpoint_error([&] {
        snapshot = std::make_shared<SaveSnapshot>(
            std::move(file),
            beside ? std::optional(options.staging_bytes) : std::optional<int64_t>(),
            impl.save_memory);
      });
    });
    // The thread reads on another stream than the one that has written.
    wait_for_device(group.device());
    // No rank keeps a save that another one could not begin.
    std::unique_ptr<BackgroundSave> saving;
    comm::agree<CheckpointError>(group, kLabel, [&] {
      as_checkpoint_error([&] {
        saving =
            std::make_unique<BackgroundSave>(snapshot, partial, attached, std::move(whole), hosts);
      });
    });
    impl.saving = std::move(saving);
    impl.flows.table().observe(std::move(snapshot));
    if (!beside) complete_save();
  });
}

SaveProgress Engine::save_progress() const {
  return impl_->saving ? impl_->saving->progress() : SaveProgress::none;
}

void Engine::complete_save() {
  auto& impl = *impl_;
  if (impl.saving == nullptr) return;
  impl.flows.gather().start_owed();
  const auto saving = std::exchange(impl.saving, nullptr);
  const struct Observed {  // until the file is written, or given up
    StateTable& table;
    ~Observed() { table.observe(nullptr); }
  } observed{impl.flows.table()};
  auto& group = impl.plan.group();
  // Rank 0 waits for the files of all ranks, which it must not do if one has failed.
  comm::agree<CheckpointError>(group, "Engine::save", [&] { saving->wait_for_file(); });
  comm::agree<CheckpointError>(group, "Engine::save", [&] { saving->wait(); });
  if (!saving->on_each_host()) return;
  const auto entries = comm::gather_texts(group, saving->entry(), "Engine::save");
  comm::agree<CheckpointError>(group, "Engine::save",
                               [&] { as_checkpoint_error([&] { saving->complete(entries); }); });
}

Attached Engine::load(const std::string& folder) {
  const Aside aside(impl_->flows);
  complete_save();
  constexpr const char* kLabel = "Engine::load";
  auto& impl = *impl_;
  auto& group = impl.plan.group();
  const int rank = group.rank();
  comm::agree<CheckpointError>(group, kLabel, [&] {
    if (rank == 0) WholeFolder::recover(folder, &fail<CheckpointError>);
  });
  if (!comm::any_rank(group, has_manifest(folder), kLabel)) {
    const int owner =
        impl.plan.placement().sharded.optimizer ? impl.plan.placement().shards->rank() : 0;
    impl.load_states(kLabel,
                     [&] { return open_shards(impl.parts(), folder, owner, rank, group.size()); });
    return {};
  }
  auto manifest =
      comm::agree<DamagedCheckpoint>(group, kLabel, [&] { return read_manifest(folder); });
  const auto attached = manifest.file_of(rank).attached;
  std::unique_ptr<StateSource> source;
  comm::agree<CheckpointError>(group, kLabel,
                               [&] { source = open_slices(impl.parts(), folder, manifest, rank); });
  comm::agree<DamagedCheckpoint>(group, kLabel,
                                 [&] { verify(folder, manifest, rank, group.size()); });
  impl.load_states(kLabel, [&] { return std::move(source); });
  return attached;
}

Attached Engine::load_on_each_host(const std::string& folder, const FetchFiles& fetch) {
  const Aside aside(impl_->flows);
  complete_save();
  constexpr const char* kLabel = "Engine::load_on_each_host";
  auto& impl = *impl_;
  auto& group = impl.plan.group();
  const int rank = group.rank();
  auto manifest =
      comm::agree<DamagedCheckpoint>(group, kLabel, [&] { return read_manifest(folder); });
  auto source = comm::agree<CheckpointError>(
      group, kLabel, [&] { return open_slices(impl.parts(), folder, manifest, rank); });
  const auto attached = manifest.file_of(rank).attached;
  // The files of other hosts need not be here.
  const auto needed = files_needed(impl.parts(), folder, manifest, rank);
  std::erase_if(manifest.files, [&](const Manifest::File& file) {
    return std::find(needed.begin(), needed.end(), file.name) == needed.end();
  });
  comm::agree<DamagedCheckpoint>(group, kLabel, [&] {
    fetch(needed);
    verify(folder, manifest);
  });
  impl.load_states(kLabel, [&] { return std::move(source); });
  return attached;
}

void Engine::save_full(const std::string& path) {
  const Aside aside(impl_->flows);
  auto& impl = *impl_;
  impl.plan.model().check_values("Engine::save_full");
  impl.changes.at_boundary("Engine::save_full");
  on_trained(impl.evaluation, [&] {
    impl.changes.settle_update("Engine::save_full");
    save_tensors(
        impl.parts(), impl.saved_progress(), impl.plan.group(),
        [&](int64_t unit, const at::Tensor& owned) { return impl.flows.table().full(unit, owned); },
        path);
  });
}

void Engine::load_full(const std::string& path) {
  const Aside aside(impl_->flows);
  impl_->load_states("Engine::load_full", [&] { return open_tensors(impl_->parts(), path); });
}

}  // namespace zero
