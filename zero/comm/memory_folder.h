// A folder in memory that a launcher keeps for its ranks, which come and go.
#pragma once

#include <filesystem>
#include <string>

#include "zero/base/descriptor.h"

namespace zero::comm {

/// In this environment variable `zero launch` gives its ranks the path of the folder.
inline constexpr const char* kMemoryVariable = "ZERO_MEMORY_FOLDER";
/// The folder is made here, a file system in memory, if nobody names another place.
inline constexpr const char* kMemoryPlace = "/dev/shm";

/// A new, empty folder that only this user can read. It goes with its owner. If the process is
/// killed, a small process that waits for that removes the folder. If that one is killed too, the
/// next folder that is made at the same place does.
class MemoryFolder {
 public:
  /// Makes it in the folder `place`. To be called while the process has one thread. Throws
  /// ConfigError.
  explicit MemoryFolder(const std::filesystem::path& place);
  MemoryFolder(const MemoryFolder&) = delete;
  MemoryFolder& operator=(const MemoryFolder&) = delete;
  ~MemoryFolder();

  const std::filesystem::path& path() const { return path_; }

 private:
  void make(const std::filesystem::path& place);
  void start_keeper();

  std::filesystem::path path_;
  Descriptor lock_;   // held as long as somebody needs the folder
  Descriptor alive_;  // the end of a pipe, whose other end sees it go
};

}  // namespace zero::comm
