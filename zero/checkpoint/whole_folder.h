// A folder that is whole or absent.
//
// Note [Folders that appear whole]
// A folder that will be TARGET is filled as TARGET.partial. To complete it, every file in it and
// its entries are synced before it takes the name, in one operation of the file system: by a swap
// with the earlier TARGET (renameat2), or by a rename where there is none; then the parent is
// synced, and only after that is the earlier one removed. Wherever the process is killed or the
// power is lost, TARGET is the earlier folder or the new one, whole. File systems that cannot swap
// get two renames by way of TARGET.earlier; between them there is no TARGET, and `recover` puts the
// earlier one back. What a process that was killed has left is removed when the next begins. The
// one at work holds a lock, so that a second finds it.
#pragma once

#include <filesystem>
#include <vector>

#include "zero/base/descriptor.h"
#include "zero/base/owner_process.h"
#include "zero/checkpoint/file.h"

namespace zero {

/// A folder being filled, that takes the place of an earlier one when it is complete. Destroyed
/// before `commit`, it leaves the earlier one and nothing else. One thread at a time; others, and
/// other processes, may put files into it before `commit`.
class WholeFolder {
 public:
  /// Makes the folder to fill, and the parents of `target` where they are absent; removes what an
  /// earlier one that was killed has left. `fail` is called where `target` is a file, where another
  /// process is filling the same folder, or where the system refuses, with its reason.
  WholeFolder(std::filesystem::path target, Fail fail);
  WholeFolder(const WholeFolder&) = delete;
  WholeFolder& operator=(const WholeFolder&) = delete;
  ~WholeFolder();

  /// Returns the folder to fill.
  const std::filesystem::path& path() const { return partial_; }
  /// Returns it for those who did not make it: TARGET.partial.
  static std::filesystem::path partial(const std::filesystem::path& target);

  /// Syncs everything in it, gives it its name, and removes the earlier folder. Calls `fail` where
  /// the system refuses: then the earlier folder is as it was, or, where the very last sync failed,
  /// the new one is there. Once.
  void commit();

  /// Gives the earlier folder its name back if a process was killed between the two renames of a
  /// file system that cannot swap. Otherwise does nothing.
  static void recover(const std::filesystem::path& target, Fail fail);
  /// Recovers, and removes what a process that was killed has left beside `target`. What cannot be
  /// removed stays.
  static void remove_left_overs(const std::filesystem::path& target);

 private:
  void make();
  void take_the_name();
  [[noreturn]] void report(const char* what, const std::filesystem::path& path) const;

  std::filesystem::path target_;
  std::filesystem::path partial_;
  Fail fail_;
  OwnerProcess owner_;
  Descriptor lock_;
  std::vector<std::filesystem::path> parents_;  // whose entries are new or will change
  bool committed_ = false;
};

}  // namespace zero
