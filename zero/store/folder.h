// A private folder for a run's files on disk, which goes with the run.
#pragma once

#include <string>

#include "zero/base/owner_process.h"

namespace zero::store {

/// A folder of this process alone, inside one that the user names.
class Folder {
 public:
  /// Removes what runs that were killed have left in `parent` (their folders are no longer locked),
  /// then makes a new one. Throws StoreError naming the folder and the remedy.
  explicit Folder(const std::string& parent);
  /// Removes it and what it holds.
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
