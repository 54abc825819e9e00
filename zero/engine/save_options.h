// How a checkpoint is saved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zero {

/// A checkpoint for which each host has a folder of its own, under the name that its ranks give.
/// There are the files of the host's ranks, other hosts' files that `written` has brought, and the
/// whole manifest. All hosts' folders have their names when `Engine::complete_save` returns.
struct HostFolders {
  /// Called on each rank before anything is written, with the bytes of each rank's file. A
  /// CheckpointError on any rank ends the save.
  std::function<void(std::span<const int64_t> bytes)> make_room{};
  /// Called on each rank when its file is complete, perhaps beside training.
  std::function<void(const std::filesystem::path& file)> written{};
};

/// Brings files of a checkpoint into this host's folder, where they are not there yet. Throws
/// CheckpointError.
using FetchFiles = std::function<void(const std::vector<std::string>& names)>;

struct SaveOptions {
  /// Saves beside the steps that follow: Note [Saving beside training] in background_save.h.
  bool background = false;
  /// The most bytes of host memory for copies of states that a step is about to change and that are
  /// not in the file yet. A step waits for the file where they do not suffice. The copies of
  /// parameters and buffers are not among them.
  int64_t staging_bytes = int64_t{256} << 20;
  /// Without it all ranks write to one folder, which all hosts see.
  std::optional<HostFolders> on_each_host{};
};

/// How far a rank is with a save in the background. Rank 0 has `written` its part when the files of
/// all ranks are there and the folder has its name; with a folder on each host, every rank has when
/// its own file is there.
enum class SaveProgress : uint8_t { none, under_way, written, failed };

}  // namespace zero
