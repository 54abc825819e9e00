// A private folder for a run's files on disk. It is removed when the run ends.
#pragma once

#include <string>

#include "zero/base/owner_process.h"

namespace zero::store {

/// A folder that belongs to this process alone, inside a folder that the user names.
class Folder {
 public:
  /// Removes the folders that killed runs have left in `parent` (nobody holds their locks any
  /// more), then makes a new one. Throws a StoreError that names the folder and the remedy.
  explicit Folder(const std::string& parent);
  /// Removes the folder and everything in it.
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  OwnerProcess owner_;
  int lock_ = -1;
};

}  // namespace zero::store
