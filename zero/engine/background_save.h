// A checkpoint that is written beside the steps that follow it.
//
// Note [Saving beside training]
// A save holds the training thread only while it copies parameters in memory, with the halves of
// split master weights, buffers and factored states. All other states, and parameters on a disk,
// change in one place, the table, and a thread writes them from where they lie. Before the table
// changes a unit whose slices are not in the file yet, it calls `SaveSnapshot::before_change`. This
// copies those slices aside while the staging memory has room for them, and otherwise waits until
// they are in the file. So the file has the states of the moment of the save, bit for bit; a save
// needs the staging memory and no second set of states; and the next update waits for the disk only
// where the disk is slower than the passes before it.
//
// A delayed update may be under way. The save waits until it is computed, copies its new parameters
// as well as those in force, and saves both.
//
// The ranks do not communicate meanwhile. Each leaves its entry of the manifest beside its file.
// Rank 0's thread waits for the entries of all ranks, writes the manifest, and gives the folder its
// name. Engine::complete_save, which is collective, tells every rank how that went. With a folder
// on each host (HostFolders) no thread can wait for the others' entries: complete_save gathers
// them, and the first rank of each host writes the manifest.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "zero/base/error.h"
#include "zero/base/ledger.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/engine/save_options.h"
#include "zero/engine/slice_file.h"
#include "zero/engine/state_table.h"

namespace zero {

/// The memory of the copies that a save in the background makes at once. It stays from save to
/// save.
class SaveMemory {
 public:
  explicit SaveMemory(std::shared_ptr<Ledger> ledger) : ledger_(std::move(ledger)) {}
  ~SaveMemory() { wait(); }
  SaveMemory(const SaveMemory&) = delete;
  SaveMemory& operator=(const SaveMemory&) = delete;

  /// Gets memory of so many bytes, and has a thread touch it. The system needs up to half a second
  /// to find 124 MB in huge pages where files have filled the memory.
  void prepare(int64_t bytes);
  /// Returns memory of so many bytes at least. It waits for the thread of `prepare`.
  const at::Tensor& get(int64_t bytes);
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }

 private:
  void wait();

  std::shared_ptr<Ledger> ledger_;
  at::Tensor memory_;
  std::thread touching_;
};

/// A file of slices, and the values that it needs as they were when this was made. The file lives
/// as long as this, since updates may call `before_change` until then.
class SaveSnapshot final : public TableObserver {
 public:
  /// Copies the parameters, the buffers and the factored states into `memory`. Nobody else may use
  /// it while this lives. Copies of other states take `staging_bytes` at most at a time. Without
  /// `staging_bytes` nothing is copied: nothing may change until all is written.
  SaveSnapshot(std::unique_ptr<SliceFile> file, std::optional<int64_t> staging_bytes,
               SaveMemory& memory);

  /// Returns the bytes that a save of this file copies at once.
  static int64_t bytes_at_once(const SliceFile& file);

  /// Writes all values to the file, in the order of its pieces, completes it, and returns its entry
  /// in the manifest. Called once, by one thread. Throws CheckpointError.
  Manifest::File write();
  /// Lets every thread go on that waits for `write`, which has failed or will not be called.
  void give_up();

  void before_change(int64_t unit) override;

 private:
  enum class Place : uint8_t { table, in_use, aside, gone };
  struct Slice {
    Place place = Place::table;
    at::Tensor copy{};
    std::shared_ptr<int64_t> block{};  // staged bytes of the memory that the copy is a part of
  };

  void copy_aside(const std::vector<size_t>& pieces, const at::Tensor& memory,
                  const std::shared_ptr<int64_t>& block);
  bool try_copy_aside(const std::vector<size_t>& pieces);
  at::Tensor take(size_t piece);
  void release(size_t piece);

  std::unique_ptr<SliceFile> file_;
  std::shared_ptr<Ledger> ledger_;
  int64_t staging_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slice> slices_;                 // by piece
  std::vector<std::vector<size_t>> of_unit_;  // pieces of master weights and optimizer states
  int64_t staged_ = 0;                        // bytes of `staging_bytes_` in use
  bool given_up_ = false;
};

/// Calls `body`, and makes a CheckpointError of any error that is none and no CommError: a save
/// that fails on one rank fails on all ranks in the same way.
template <class Body>
void as_checkpoint_error(const Body& body) {
  try {
    body();
  } catch (const CheckpointError&) {
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError(error.what());
  }
}

/// The thread of a rank that writes its file, and on rank 0 completes the folder.
class BackgroundSave {
 public:
  /// The task of rank 0, or of the first rank of each host.
  struct Folder {
    WholeFolder folder;
    Manifest manifest;  ///< without files
    int ranks = 1;
  };

  /// Starts the thread. `attached` goes into the entry of this rank. `folder` is empty on all ranks
  /// but those that complete one.
  BackgroundSave(std::shared_ptr<SaveSnapshot> snapshot, std::filesystem::path partial,
                 Attached attached, std::unique_ptr<Folder> folder,
                 std::optional<HostFolders> on_each_host);
  /// Gives up what has not ended: the earlier checkpoint stays.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  SaveProgress progress() const { return progress_; }
  /// Blocks until this rank's file is complete. Throws what has failed.
  void wait_for_file();
  /// Blocks until the thread has ended. Throws what has failed.
  void wait();
  bool on_each_host() const { return on_each_host_.has_value(); }
  /// Returns this rank's entry, where each host has a folder. After `wait`.
  const std::string& entry() const { return entry_; }
  /// Completes this host's folder with the entries of all ranks, if that is this rank's task.
  void complete(const std::vector<std::string>& entries);

 private:
  void run(Attached attached);
  void complete(Folder& folder);
  Manifest::File entry_of(const std::filesystem::path& name);

  std::shared_ptr<SaveSnapshot> snapshot_;
  std::filesystem::path partial_;
  std::unique_ptr<Folder> folder_;
  std::optional<HostFolders> on_each_host_;
  std::string entry_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_file_ = false;
  bool stopped_ = false;
  std::exception_ptr failure_;
  std::atomic<SaveProgress> progress_{SaveProgress::under_way};
  std::thread thread_;  // ends first
};

}  // namespace zero
