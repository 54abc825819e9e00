// Copies of all states in the memory of the hosts, from which a run goes on when ranks have died.
//
//   zero::MemoryCopies copies(group, *zero::MemoryCopies::launcher_folder());
//   if (auto found = copies.newest()) copies.load(engine, *found);
//   for (int64_t step = ...) {
//     ...
//     if (step % 10 == 0) copies.begin(engine, step);       // beside the next steps
//     if (engine.save_progress() is over on all ranks) copies.complete(engine);
//   }
//
// Note [Copies in memory]
// A copy is a checkpoint in files of memory, in a folder that outlives the ranks: `zero launch`
// keeps one on each host. Each rank writes its slices there, as to a checkpoint on disk, and sends
// its file to the host behind its own, to the rank at the same place. So each file is in the memory
// of two hosts, or of the only one. A copy counts when all hosts have the manifest, which
// `complete` writes once all files are where they belong; only then does the copy before it go. So
// wherever ranks or hosts die, the last copy that was complete is there, on the hosts that are left
// as long as no two neighbours are lost together.
//
// After a restart the ranks look at what all hosts hold, take the newest copy of which each file is
// on some host, and fetch from there the files that have their slices. As with any checkpoint, the
// number of ranks and the stage may have changed, and every byte that is used is checked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "zero/checkpoint/host_files.h"
#include "zero/checkpoint/manifest.h"
#include "zero/comm/group.h"
#include "zero/engine/engine.h"

namespace zero {

/// Outlives the engines that it is given. All ranks make the same calls.
class MemoryCopies {
 public:
  /// Returns the folder that the launcher keeps on this host for its ranks; none if there is no
  /// launcher that does.
  static std::optional<std::filesystem::path> launcher_folder();

  /// Uses `folder`, one for each host, which is made if it is absent. A copy is refused unless
  /// `spare_bytes` of the host's memory stay free beside it. Collective. Throws ConfigError if
  /// hosts have different numbers of ranks, CommError if a rank cannot listen for the others.
  MemoryCopies(std::shared_ptr<comm::Group> group, std::filesystem::path folder,
               int64_t spare_bytes = 0);
  ~MemoryCopies();
  MemoryCopies(const MemoryCopies&) = delete;
  MemoryCopies& operator=(const MemoryCopies&) = delete;

  /// Begins a copy of the states after `step`, as Engine::save does with `options`. It completes a
  /// save that is under way first. Collective. Throws CheckpointError if a host has too little
  /// memory: the copy before it stays.
  void begin(Engine& engine, int64_t step, const Attached& attached = {}, SaveOptions options = {});
  /// Completes the copy, and drops the one before it. Collective. Throws CheckpointError if a rank
  /// has failed: the copy before it stays then.
  void complete(Engine& engine);
  /// Returns the bytes that this host holds of the copy of a step.
  int64_t bytes_of(int64_t step) const;

  /// A copy that can be loaded.
  struct Found {
    int64_t step = 0;
    std::filesystem::path folder;  ///< of this host, with the manifest
    /// A sentence about each newer copy, which is not complete or damaged.
    std::vector<std::string> faults;
  };
  /// Returns the newest copy of which the hosts have every file, and drops all that cannot be
  /// loaded. Collective. `faults` gets the sentences where there is no such copy. Throws
  /// CheckpointError.
  std::optional<Found> newest(std::vector<std::string>* faults = nullptr);
  /// Loads a copy, as Engine::load does. A file that is not as it was written is removed, and taken
  /// from the other host that has it; `found.faults` then names it. Collective. Throws
  /// DamagedCheckpoint if no host has a file as it was written.
  Attached load(Engine& engine, Found& found);
  /// Drops the copy of a step. Collective.
  void drop(int64_t step);
  /// Drops all copies. Collective.
  void clear();

 private:
  std::filesystem::path folder_of(int64_t step) const;
  std::string holdings() const;
  std::vector<std::filesystem::path> all_but(const std::set<int64_t>& steps) const;
  static void remove(const std::vector<std::filesystem::path>& folders);
  void make_room(std::span<const int64_t> bytes) const;
  void send(const std::filesystem::path& file) const;
  Attached load_once(Engine& engine, const Found& found) const;
  bool forget_damaged(Found& found);
  void fetch(const Found& found, const std::vector<std::string>& names) const;

  std::shared_ptr<comm::Group> group_;
  std::filesystem::path folder_;
  int64_t spare_bytes_;
  std::optional<HostFiles> files_;         // if there are several hosts
  int64_t step_ = 0;                       // of the copy that `begin` has begun
  std::vector<std::vector<int>> holders_;  // by file of the copy found, the hosts that have it
  std::jthread remover_;
};

}  // namespace zero
