// Records what a program asks of the file system, and says what a loss of power may leave of it.
//
// The program that links this has the C library's calls replaced by ones that note them down. A
// disk keeps what was synced. Of the rest it may keep anything: here, of a file the data as last
// synced, all of it, or zeros in its place, and of the entries of folders (made, renamed, removed)
// any of the changes since the folder was synced, each rename whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace zero::test {

/// One call that changed something, in terms of nodes (files and folders).
struct FileCall {
  struct Entry {
    size_t folder = 0;
    std::string name;
    int node = -1;  ///< what the name is now; -1: nothing
  };
  std::string what;              ///< for people
  std::vector<Entry> entries{};  ///< changed together or not at all
  int written = -1;              ///< the node that `bytes` go to at `offset`
  size_t offset = 0;
  std::string bytes{};
  bool truncates = false;  ///< `written` gets the size `offset`
  int synced = -1;
};

/// The files (their bytes) and folders (nothing) below a root, by their paths relative to it.
struct Tree {
  std::map<std::string, std::string> files{};
  std::map<std::string, bool> folders{};
  bool operator==(const Tree&) const = default;
  bool operator<(const Tree& other) const {
    return std::tie(files, folders) < std::tie(other.files, other.folders);
  }
  /// Makes `root` hold this and nothing else.
  void put(const std::filesystem::path& root) const;
  static Tree of(const std::filesystem::path& root);
};

/// Records the calls of all threads below `root`, an empty folder, while it lives. One at a time.
class FileCalls {
 public:
  explicit FileCalls(const std::filesystem::path& root);
  FileCalls(const FileCalls&) = delete;
  FileCalls& operator=(const FileCalls&) = delete;
  ~FileCalls();

  /// As on a file system that cannot swap two names: renameat2 fails with EINVAL.
  void refuse_swaps(bool refuse);
  std::vector<FileCall> calls() const;
};

/// Returns the files after all of `calls`, if nothing is lost.
Tree after(const std::vector<FileCall>& calls);

/// Calls `visit` with each tree that may be found where the power was lost after `count` calls.
void visit_remains(const std::vector<FileCall>& calls, size_t count,
                   const std::function<void(const Tree&)>& visit);

}  // namespace zero::test
