// A folder that appears whole or not at all.
//
// Note [Folders that appear whole]
// A folder that will become TARGET is filled as TARGET.partial. When it is complete, every file in
// it and its entries are synced. Then it takes the name TARGET in one operation of the file system:
// by a swap with the earlier TARGET (renameat2), or by a rename if there is none. Then the parent
// is synced, and only after that the earlier folder is removed. Whenever the process is killed or
// the power is lost, TARGET is the earlier folder or the new one, and whole. On file systems that
// cannot swap, two renames go by way of TARGET.earlier; between them there is no TARGET, and
// `recover` puts the earlier folder back. Folders that a killed process has left are removed when
// the next process begins. A process at work holds a lock, so that a second process notices it.
#pragma once

#include <filesystem>
#include <vector>

#include "zero/base/descriptor.h"
#include "zero/base/owner_process.h"
#include "zero/checkpoint/file.h"

namespace zero {

/// A folder that is being filled, and takes the place of an earlier one when it is complete. If it
/// is destroyed before `commit`, only the earlier folder is left. It is for one thread at a time;
/// other threads and processes may put files into it before `commit`.
class WholeFolder {
 public:
  /// Makes the folder to fill, and the parents of `target` if they are absent. Removes what an
  /// earlier process that was killed has left. `fail` is called if `target` is a file, if another
  /// process is filling the same folder, or if the system refuses, with its reason.
  WholeFolder(std::filesystem::path target, Fail fail);
  WholeFolder(const WholeFolder&) = delete;
  WholeFolder& operator=(const WholeFolder&) = delete;
  ~WholeFolder();

  /// Returns the folder to fill.
  const std::filesystem::path& path() const { return partial_; }
  /// Returns the folder to fill for code that did not make it: TARGET.partial.
  static std::filesystem::path partial(const std::filesystem::path& target);

  /// Syncs everything in the folder, gives it its name, and removes the earlier folder. Calls
  /// `fail` if the system refuses: then the earlier folder is as it was, or, if only the very last
  /// sync failed, the new one is there. To be called once.
  void commit();

  /// Gives the earlier folder its name back if a process was killed between the two renames of a
  /// file system that cannot swap. Otherwise does nothing.
  static void recover(const std::filesystem::path& target, Fail fail);
  /// Does the same as `recover`, and removes what a killed process has left beside `target`. Files
  /// that cannot be removed stay.
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
  std::vector<std::filesystem::path> parents_;  // their entries are new or will change
  bool committed_ = false;
};

}  // namespace zero
