#include "zero/store/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>

#include "zero/base/error.h"

namespace zero::store {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "libzero-states-";
constexpr const char* kLock = "lock";

// Returns the first part of a folder's name, before the random ending. It tells which host made the
// folder.
std::string host_part() {
  std::string name;
  std::getline(std::ifstream("/proc/sys/kernel/hostname"), name);
  return fmt::format("{:08x}-", static_cast<uint32_t>(std::hash<std::string>{}(name)));
}

// Returns whether other hosts may use these files too. Locks of other hosts may be invisible here.
bool on_shared_file_system(const fs::path& folder) {
  constexpr std::array<uint32_t, 6> kOwn{
      0xEF53,     0x58465342, 0x9123683E,   // ext, XFS, Btrfs
      0x01021994, 0x794C7630, 0x2FC12FC1};  // tmpfs, overlay, ZFS
  struct statfs status {};
  return statfs(folder.c_str(), &status) != 0 ||
         std::find(kOwn.begin(), kOwn.end(), static_cast<uint32_t>(status.f_type)) == kOwn.end();
}

// Returns a descriptor that holds the lock of `file`, or -1 if another process has the lock (then
// errno says why).
int take_lock(const fs::path& file, int flags) {
  const int descriptor = open(file.c_str(), O_RDWR | O_CLOEXEC | flags, 0600);
  if (descriptor < 0) return -1;
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return descriptor;
  const int error = errno;
  close(descriptor);
  errno = error;
  return -1;
}

// Removes left-over folders as far as possible. Folders of another user cannot be removed, and
// another process may be removing the same ones. A folder without a lock file has only just been
// made, so it stays. If other hosts use `parent` too, only folders that this host has left are
// removed, since locks of other hosts may be invisible.
void remove_left_over(const fs::path& parent) {
  std::error_code error;
  const auto prefix = std::string(kPrefix) + (on_shared_file_system(parent) ? host_part() : "");
  for (const auto& entry : fs::directory_iterator(parent, error)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    const int lock = take_lock(entry.path() / kLock, 0);
    if (lock < 0) continue;
    fs::remove_all(entry.path(), error);
    close(lock);
  }
}

}  // namespace

Folder::Folder(const std::string& parent) {
  remove_left_over(parent);
  path_ = (fs::path(parent) / (std::string(kPrefix) + host_part() + "XXXXXX")).string();
  if (mkdtemp(path_.data()) == nullptr) {
    const int error = errno;
    throw StoreError(fmt::format(
        "Cannot make a folder in {}: {} (errno {}). Name an existing folder that this user may "
        "write, on a disk with room for the states.",
        parent, std::strerror(error), error));
  }
  // The lock is taken before the folder gets the name by which other processes look for it.
  const auto lock = fs::path(path_) / kLock;
  const auto unnamed = fs::path(path_) / "lock.new";
  lock_ = take_lock(unnamed, O_CREAT);
  if (lock_ >= 0 && rename(unnamed.c_str(), lock.c_str()) == 0) return;
  const int error = errno;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (lock_ >= 0) close(lock_);
  throw StoreError(
      fmt::format("Cannot lock {}/{}: {} (errno {}).", path_, kLock, std::strerror(error), error));
}

Folder::~Folder() {
  std::error_code ignored;
  if (owner_.here()) fs::remove_all(path_, ignored);
  close(lock_);
}

}  // namespace zero::store
